"""The siblings say the same: the same files, names, order, parameters and summaries, in each framework's words."""

import ast
import dataclasses
import inspect
import re
import sys
from pathlib import Path

import pytest
from flax import nnx

import mha_jax
import mha_torch
import parity

PACKAGES = {"jax": mha_jax, "torch": mha_torch}
OURS = {"mha_jax", "mha_torch", "mha_tt", "parity"}

# ---- What one sibling has and the others have not: the whole list ----------------------------------------------------

FRAMEWORK = {"jax": {"jax", "flax"}, "torch": {"torch"}}

WORDS = {
    "jax": {"JAX": "the framework", "jnp.": "xp.", "jax.": "xp."},
    "torch": {"PyTorch": "the framework", "torch.": "xp."},
}

EXTRA_PARAMETERS = {
    "jax": {"rngs", "param_dtype", "rng", "dropout_rng"},  # randomness is explicit, and flax's word for a dtype
    "torch": {"device", "dtype"},  # where tensors lie, and torch's word for a dtype
}

EXTRA_NAMES = {
    "jax": {
        "to_scores_rank",  # strict rank promotion is kept, so ranks are made equal by hand
        "Projection",  # nnx.Linear rounds to the narrow dtype before it adds the bias, torch's after
        "AttentionLayer.dropout_rng",  # torch draws from a global generator instead,
        "AttentionLayer.drop_output",  # with F.dropout
    },
    "torch": {
        "AttentionLayer.reset_parameters",  # torch's hook to draw the weights again; nnx makes a new module
        "AttentionLayer.extra_repr",  # torch's hook into its own `__repr__`, which documents it
    },
}

COMMON_PARAMETERS = {"init_cache": {"dtype"}, "kv_cache_nbytes": {"dtype"}}  # of the cache, in both; not torch's extra

CALL = {"__call__": "call", "forward": "call"}


# ---- Reading the sources ---------------------------------------------------------------------------------------------


def is_extra(name, public):
    """Whether a name, or the class that it belongs to, is in the list."""
    return not EXTRA_NAMES[name].isdisjoint({public, public.partition(".")[0]})


def folder(name):
    return Path(PACKAGES[name].__path__[0])


def parse(name, file):
    return ast.parse((folder(name) / file).read_text())


def is_public(name):
    return not name.startswith("_") or name in ("__init__", "__call__")


def definitions(name, file):
    """The public functions, classes and methods of a file by name, in order; `forward` and `__call__` as `call`."""
    found = {}
    for node in parse(name, file).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        else:
            names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
        found |= {public: node for public in names if is_public(public)}
        for member in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(member, ast.FunctionDef) and is_public(member.name):
                found[f"{node.name}.{CALL.get(member.name, member.name)}"] = member
    return found


def functions(name, file):
    return {public: node for public, node in definitions(name, file).items() if isinstance(node, ast.FunctionDef)}


def parameters(name, public, function):
    """The parameters that siblings share, in order, each as (kind, name, default, axes of its annotation)."""
    arguments = function.args
    positional, keyword = [*arguments.posonlyargs, *arguments.args], arguments.kwonlyargs
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults + arguments.kw_defaults
    kinds = ["positional"] * len(positional) + ["keyword"] * len(keyword)
    extra = EXTRA_PARAMETERS[name] - COMMON_PARAMETERS.get(public, set())
    return [
        (kind, argument.arg, default and in_neutral_words(name, ast.unparse(default)), axes(argument.annotation))
        for kind, argument, default in zip(kinds, [*positional, *keyword], defaults, strict=True)
        if argument.arg not in extra
    ]


def axes(annotation):
    """The axis strings of an annotation, such as `B N T H`."""
    return re.findall(r"'([^']*)'", ast.unparse(annotation)) if annotation else []


def in_neutral_words(name, text):
    for word, neutral in WORDS[name].items():
        text = text.replace(word, neutral)
    return text


def summary(name, node):
    """The first line of a docstring."""
    return in_neutral_words(name, (ast.get_docstring(node) or "").partition("\n")[0])


FILES = sorted(path.name for path in folder("torch").glob("*.py"))
PUBLIC = [  # all but the checks, which no user calls
    (file, public)
    for file in FILES
    if file != "checks.py"
    for public in functions("torch", file)
    if not is_extra("torch", public)
]
SUMMARISED = [
    (file, public)
    for file in FILES
    for public, node in definitions("torch", file).items()
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and not is_extra("torch", public)
]

PUBLIC_IDS = [f"{file.removesuffix('.py')}-{public}" for file, public in PUBLIC]
SUMMARISED_IDS = [f"{file.removesuffix('.py')}-{public}" for file, public in SUMMARISED]

every_sibling = pytest.mark.parametrize("name", PACKAGES)
every_file = pytest.mark.parametrize("file", FILES)


# ---- Files and names -------------------------------------------------------------------------------------------------


def test_siblings_have_the_same_files():
    files = {name: sorted(path.name for path in folder(name).iterdir() if path.is_file()) for name in PACKAGES}
    assert files["jax"] == files["torch"]


def test_siblings_have_the_same_public_names():
    assert mha_jax.__all__ == mha_torch.__all__


@every_sibling
def test_public_names_exist(name):
    missing = [public for public in PACKAGES[name].__all__ if not hasattr(PACKAGES[name], public)]
    assert not missing


@every_file
def test_definitions_have_the_same_names_in_the_same_order(file):
    names = {name: [public for public in definitions(name, file) if not is_extra(name, public)] for name in PACKAGES}
    assert names["jax"] == names["torch"]


# ---- Parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "public"), PUBLIC, ids=PUBLIC_IDS)
def test_parameters_have_the_same_names_kinds_defaults_and_axes(file, public):
    expected = parameters("torch", public, functions("torch", file)[public])
    assert parameters("jax", public, functions("jax", file)[public]) == expected


@pytest.mark.parametrize(("file", "public"), PUBLIC, ids=PUBLIC_IDS)
def test_results_have_the_same_axes(file, public):
    assert axes(functions("jax", file)[public].returns) == axes(functions("torch", file)[public].returns)


@every_sibling
@pytest.mark.parametrize("kind", ["MultiHeadAttention", "MultiHeadSelfAttention", "MultiHeadAttentionWithCache"])
def test_module_keywords_are_the_fields_of_the_spec(name, kind):
    _, *signature = inspect.signature(getattr(PACKAGES[name], kind).__init__).parameters.values()  # without self
    fields = {field.name: field.default for field in dataclasses.fields(parity.AttentionSpec)}
    no_default = {inspect.Parameter.empty: dataclasses.MISSING}
    keywords = {
        parameter.name: no_default.get(parameter.default, parameter.default)
        for parameter in signature
        if parameter.name not in EXTRA_PARAMETERS[name]
    }
    assert list(keywords.items()) == list(fields.items())


@every_sibling
def test_config_of_a_module_is_a_spec(name):
    extra = {"rngs": nnx.Rngs(0)} if name == "jax" else {}
    module = PACKAGES[name].MultiHeadAttention(12, 4, num_kv_heads=2, rope_theta=100.0, head_dim=4, **extra)
    spec = parity.AttentionSpec(12, 4, num_kv_heads=2, rope_theta=100.0, head_dim=4)
    assert module.config == dataclasses.asdict(spec)


# ---- Docstrings ------------------------------------------------------------------------------------------------------


@every_file
def test_files_have_the_same_summary(file):
    assert summary("jax", parse("jax", file)) == summary("torch", parse("torch", file))


@pytest.mark.parametrize(("file", "public"), SUMMARISED, ids=SUMMARISED_IDS)
def test_definitions_have_the_same_summary(file, public):
    assert summary("jax", definitions("jax", file)[public]) == summary("torch", definitions("torch", file)[public])


@every_sibling
@every_file
def test_every_public_definition_has_a_docstring(name, file):
    bare = [
        public
        for public, node in definitions(name, file).items()
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not public.endswith(("__init__", "extra_repr"))  # a constructor's is its class's, the hook's is torch's
        and not ast.get_docstring(node)
    ]
    assert not bare


# ---- Imports ---------------------------------------------------------------------------------------------------------


@every_sibling
@every_file
def test_sibling_imports_only_its_framework_numpy_and_itself(name, file):
    modules = set()
    for node in ast.walk(parse(name, file)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module)
    foreign = {module.split(".")[0] for module in modules} - sys.stdlib_module_names
    assert foreign <= FRAMEWORK[name] | {f"mha_{name}", "numpy", "jaxtyping"}
