"""The siblings say the same: the same files, names, order, parameters and summaries, in each framework's words.

They are read as source, for no environment has all three frameworks.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

import mha_jax
import mha_torch

NAMES = ["jax", "torch", "tt"]
PACKAGES = {"jax": mha_jax, "torch": mha_torch}  # those that are installed beside each other

# ---- What one sibling has and the others have not: the whole list ----------------------------------------------------

FRAMEWORK = {"jax": {"jax", "flax"}, "torch": {"torch"}, "tt": {"ttnn"}}

LAZY_IMPORTS = {
    ("tt", "mock/shadows.py"): {"torch"},
    ("tt", "mock/goldens.py"): {"torch"},
}  # ttnn's golden functions are written in it; without values none is needed

WORDS = {
    "jax": {"JAX": "the framework", "jnp.": "xp.", "jax.": "xp."},
    "torch": {"PyTorch": "the framework", "torch.": "xp."},
    "tt": {"TTNN": "the framework", "ttnn.": "xp."},
}

EXTRA_FILES = {  # and folders
    "jax": {
        "kernels/blockwise.py",  # the fused kernel for a CPU, which the others' frameworks bring,
        "kernels/blocks.py",  # how it divides its work,
        "kernels/windows.py",  # and where it leaves out most keys
        "kernels/whole.py",  # its form for few scores
        "kernels/library.py",  # the framework's own kernel, for other devices,
        "kernels/splash.py",  # and the one for TPUs
        "kernels/nonfinite.py",  # keeps what is not finite where it is seen, around kernels that do not
        "compiled.py",  # compiles once for callers who do not
        "parallel/heads.py",  # heads divided over the devices of a mesh, in the framework's words
        "parallel/sharding.py",  # how arrays are divided among devices, as their types say
        "parallel/tokens.py",  # tokens divided over the devices of a mesh: heads are shared out for them,
        "parallel/ring.py",  # or keys and values go round
    },
    "torch": {
        "kernels/flex.py",  # a second kernel of the framework's own, for CUDA
        "kernels/sdpa.py",  # the first one, with the cheapest form of a mask,
        "kernels/windows.py",  # and a few queries at a time within windows
        "kernels/nonfinite.py",  # keeps what is not finite where it is seen, around a kernel that does not
        "parallel/heads.py",  # heads divided over processes, in the framework's words
        "parallel/local.py",  # and what one of these has
        "parallel/ring.py",  # tokens divided over processes
    },
    "tt": {
        "device.py",  # which is opened, and where arrays and weights enter it and leave it
        "layout.py",  # how the features of heads are ordered and padded there
        "recording.py",  # what a program did on a device, given back where there is none
        "mock/",  # boards that do not exist, and what operations compute on them
        "kernels/nonfinite.py",  # keeps what is not finite where it is seen, around kernels that do not
        "parallel/heads.py",  # heads divided over the chips of a mesh, in the framework's words
        "parallel/local.py",  # and what one of these has
        "decode/",  # a step that needs nothing of the host, and a cache in pages
    },
}

EXTRA_PARAMETERS = {
    "jax": {
        "rngs",  # randomness is explicit,
        "rng",
        "dropout_rng",
        *("dtype", "param_dtype"),  # these are the words of flax for the dtypes of the work and of the weights;
        "kernel",  # of `fused`: the one for a CPU is its own, which is told how to divide its work
    },
    "torch": {"device", "dtype"},  # where tensors lie, and torch's word for a dtype
    "tt": {
        "device",  # where tensors lie; there is no default one
        "dtype",  # of inputs and outputs, and of a module's cache,
        "weight_dtype",  # which differ: weights may be bfloat8_b where inputs are not
        "compute_kernel_config",  # the arithmetic of the device is chosen for each operation
        "rng",  # of NumPy: draws weights and seeds,
        "seed",  # for the device draws from a seed
        "slots",  # of `apply_norm`, and
        "head_dim",  # of `apply_rope`: heads are padded to whole tiles, so that their shape does not tell it
        *("page_size", "page_table"),  # of a cache in pages, and of the kernel for it
    },
}

COMMON_PARAMETERS = {  # some of these words mean the same in all siblings
    "multi_head_attention": {"kernel"},
    "multi_head_attention_with_cache": {"kernel"},
    "multi_head_attention_with_static_cache": {"kernel"},
    "multi_head_latent_attention": {"kernel"},
    "Cache.with_slots": {"slots"},
    "init_cache": {"dtype", "head_dim"},
    "init_latent_cache": {"dtype"},
    "MultiHeadAttentionWithCache.init_cache": {"dtype"},
    "MultiHeadLatentAttention.init_cache": {"dtype"},
    "kv_cache_nbytes": {"dtype", "head_dim"},
}

OTHER_DEFAULTS = {  # what the fused kernels take, where others say float32
    ("tt", "init_cache", "dtype"): "xp.bfloat16",
    ("tt", "init_latent_cache", "dtype"): "xp.bfloat16",
}

OTHER_AXES = {"kv_rank N*(H+Hv)": "N*(H+Hv) kv_rank"}  # torch keeps weights as (out, in), the others as (in, out)

CACHE_PARTS = {  # what attention takes of a cache, whose lengths are known elsewhere: on the host, in a graph, or not
    "jax": {"append_checked", "num_added", "token_positions", "has_room"},
    "torch": {"append_checked", "has_room", "Mask.block", "Scores.block", "block_of"},
    "tt": {"append_checked", "num_added", "write_rows", "Scores.block", "block_of"},
}

EXTRA_NAMES = {
    "jax": {
        "to_scores_rank",  # strict rank promotion is kept, so ranks are made equal by hand
        "Projection",  # nnx.Linear rounds to the narrow dtype before it adds the bias, torch's after
        "FusedAttention",  # the default kernel with block sizes of one's own
        "attend_without_weights",  # compiled by itself, a result that nobody asked for would be stored
        "AttentionLayer.dropout_rng",  # torch draws from a global generator instead
        *("FunctionalLayer.dropout_rng", "Scores.dropout_rng"),
        "Scores.has_dropout",  # no kernel has any
        "Mask.as_arrays",  # which compiled functions take
        "Mask.is_trivial",  # a gradient is kept from what is hidden
        "cast",  # torch has autocast
        "platform_of",  # arrays lie on one, or on none yet where they are traced
        "linear",  # sums in float32, also where a bias is added
        "NormLayer",  # a module that holds the parameters of a norm
        "MultiHeadLatentAttention.kv_b_proj",  # a type for what its base sets by name
        *CACHE_PARTS["jax"],
    },
    "torch": {
        "AttentionLayer.reset_parameters",  # torch's hook to draw the weights again; nnx makes a new module
        "AttentionLayer.extra_repr",  # torch's hook into its own `__repr__`, which documents it
        "NormLayer",  # a module that holds the parameters of a norm
        *("values_of", "is_graph"),  # are known or not by more than a type
        "constant",  # a copy to a GPU waits for it
        "is_transformed",  # vmap and fake tensors have no values
        "without_autocast",  # which would take sums in half precision
        "is_autocast_on",  # and narrowed or not by more than their own dtype
        *("Rotation", "rotation_of"),  # JAX's compiler shares what queries and keys have in common
        *("is_distributed", "replicate_like"),  # a tensor may be a DTensor,
        "needs_gradient",  # or one that asks for a gradient,
        "check_features",  # and a projection may return one, or some of its features
        *("AttentionLayer.find_nonfinite", "FunctionalLayer.find_nonfinite"),  # on any process
        "apply_norm_by_mean",  # of all processes
        "hooks_of",  # a module may do more than its weights say
        "check_device",  # tensors lie on several,
        "as_lengths",  # and lengths are taken to theirs
        "Mask.is_trivial",  # a gradient is kept from what is hidden
        "cache_dtype",  # under autocast it is not that of the weights
        "MultiHeadLatentAttention.kv_b_proj",  # a type for what its base sets by name
        *CACHE_PARTS["torch"],
    },
    "tt": {
        "as_dtype",  # converts on the device
        "MASKED",  # stands for -inf, of which the kernel makes NaN,
        "LOWEST_BIAS",  # and what a bias of the user's is raised to, so as to stay above it
        "DeviceMask",  # masks are made on the host, and uploaded once for many calls,
        "on_host",
        "on_device",  # or for one
        "bias_on_device",
        "CausalMask",
        "Rotation",  # turns are computed on the host, in float64, and uploaded once for many calls
        "rotation_of",
        "positions_and_rotation",  # for all that is projected in a call,
        *("rotated_head", "cos_and_sin"),  # or as a table, of which the device picks
        *("HeadWeights", "weights_of_heads"),  # a weight is taken apart once for many calls
        "project_absorbed",  # and queries are put together once
        "sinks_of_step",  # made once for many steps
        "attend_to_cache",  # one new token of each sequence has a kernel of its own
        *("LARGEST_CHUNK", "WIDE"),  # of the fused kernel, which is told how to divide its work
        *("HALF_TILE", "STEP_FEATURES"),  # up to which the one of a step approximates, and is right
        *("FusedAttention", "attend"),  # a kernel is made for an arithmetic of the device,
        *("supports", "step_supports"),  # and the framework's do not support every call
        "may_zero_rows",  # whether the one of prompts does, at logits of tens of thousands
        "MOST_KV_HEADS",  # more would be written wrongly, and unasked
        "AttentionLayer.load_weights",  # torch's state dict and nnx's state do this,
        "AttentionLayer.train",  # and their modules have these two
        "AttentionLayer.eval",
        "check_on_device",  # several operations crash on a tensor that lies on the host,
        "check_input_dtype",  # keep apart the dtype of inputs and that of weights, which differ here,
        "check_dtype",  # take three dtypes only,
        "check_head_dim",  # see the padding of heads as features,
        *("check_heads", "check_pair_order"),  # whose order depends on the layer,
        "check_cache_holds",  # write into a cache before anything else would tell that it is another layer's,
        "check_cached_step",  # and have a kernel for one new token of each sequence
        "Cache.places",  # are counted on the device
        *("Cache.pages", "Cache.page_table", "Cache.is_within"),  # a cache may lie in pages
        "PagedKVCache",
        *("KVCache.capacity", "LatentCache.capacity"),  # the slots are padded: their shape does not tell it
        "AttentionLayer.check_input",  # an input has the dtype of the module; dropout is drawn in bfloat16 only,
        "drop",  # for attention weights and outputs alike,
        *("Scores.seed", "FunctionalLayer.seed"),  # from a seed
        "FunctionalLayer.compute_kernel_config",  # the arithmetic of the device is chosen for each layer
        "FunctionalLayer.kept",  # steps keep what they make,
        *("AttentionLayer.plain_weights", "FunctionalLayer.plain_weights"),  # for one, of the weights as they are
        "upload_weights",  # weights are padded on their way to the device
        "download_weights",
        *CACHE_PARTS["tt"],
    },
}

OTHERWISE = {
    ("jax", "attend"),  # of `fused`, a kernel with the default block sizes
    ("jax", "Mask.check"),  # arrays are whole sequences on one mesh
    ("tt", "Cache.capacity"),  # the slots are padded to whole tiles, so that their shape does not tell it
    *(("tt", "Mask.check"), ("tt", "Scores.check")),  # a mask lies on the host, and a bias is converted
    ("tt", "Mask.to_bool"),  # gives a mask with its forms on the device
}

OTHER_SUMMARIES = {("tt", "check_bias")}  # a bias of any floating dtype is converted, on the host or on the device

CALL = {"__call__": "call", "forward": "call"}


# ---- Reading the sources ---------------------------------------------------------------------------------------------


def folder(name):
    return Path(__file__).parents[1] / f"mha_{name}"


@cache
def paths_of(name):
    """The files of a sibling, those in its folders too, by their place in it."""
    paths = [path for path in sorted(folder(name).rglob("*")) if path.is_file() and path.parent.name != "__pycache__"]
    return {path.relative_to(folder(name)).as_posix(): path for path in paths}


@cache
def parse(name, file):
    return ast.parse(paths_of(name)[file].read_text())


def files_of(name):
    return sorted(file for file in paths_of(name) if file.endswith(".py"))


def is_shared(name, file):
    """Tell if the others have a file, too; what a folder re-exports is of its sibling."""
    return not file.endswith("/__init__.py") and not any(_is_in(file, extra) for extra in EXTRA_FILES[name])


def _is_in(file, place):
    """Tell if a place is that of a file, or of a folder that it lies in."""
    return file == place or (place.endswith("/") and file.startswith(place))


def all_of(name):
    """What a package lists as its public names."""
    return next(
        ast.literal_eval(node.value)
        for node in parse(name, "__init__.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )


def is_public(name):
    return not name.startswith("_") or name in ("__init__", "__call__")


def targets(node):
    """The names that a statement binds by itself."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    found = [*getattr(node, "targets", []), getattr(node, "target", None)]
    return [target.id for target in found if isinstance(target, ast.Name)]


@cache
def definitions(name, file):
    """The public functions, classes, constants, methods and fields of a file by name, in order.

    `forward` and `__call__` are both called `call`.
    """
    found = {}
    for node in parse(name, file).body:
        found |= {public: node for public in targets(node) if is_public(public)}
        for member in node.body if isinstance(node, ast.ClassDef) and is_public(node.name) else []:
            found |= {f"{node.name}.{CALL.get(own, own)}": member for own in targets(member) if is_public(own)}
    return found


def functions(name, file):
    return {public: node for public, node in definitions(name, file).items() if isinstance(node, ast.FunctionDef)}


def is_extra(name, public):
    """Whether a name, or the class that it belongs to, is in the list, or defined in a file that is."""
    own = EXTRA_NAMES[name].union(*(definitions(name, file) for file in files_of(name) if not is_shared(name, file)))
    return not own.isdisjoint({public, public.partition(".")[0]})


def constructor(name, kind):
    """The constructor of a class, its own or that of its base."""
    found = definitions(name, "mha.py") | definitions(name, "cache_mha.py")
    while f"{kind}.__init__" not in found:
        kind = found[kind].bases[0].id
    return found[f"{kind}.__init__"]


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


def with_other_defaults(name, public, expected):
    """Parameters with the defaults that a sibling has in their place."""
    others = {argument: default for (*where, argument), default in OTHER_DEFAULTS.items() if where == [name, public]}
    return [(kind, argument, others.get(argument, default), axes) for kind, argument, default, axes in expected]


def axes(annotation):
    """The axis strings of an annotation, such as `B N T H`."""
    if annotation is None or isinstance(annotation, ast.Constant):  # a class in quotes has none
        return []
    found = re.findall(r"'([^']*)'", ast.unparse(annotation))
    return [OTHER_AXES.get(named, named) for named in found]


def in_neutral_words(name, text):
    for word, neutral in WORDS[name].items():
        text = text.replace(word, neutral)
    return text


def summary(name, node):
    """The first line of a docstring."""
    return in_neutral_words(name, (ast.get_docstring(node) or "").partition("\n")[0])


def imports(tree):
    """The packages that a file imports when it is imported itself, and those that it imports later or never."""
    late = set()
    for node in ast.walk(tree):
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if is_for_types or isinstance(node, ast.FunctionDef):
            late |= set(ast.walk(node))
    at_once, lazily = set(), set()
    for node in ast.walk(tree):
        found = lazily if node in late else at_once
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(node.module.partition(".")[0])
    return at_once - sys.stdlib_module_names, lazily - sys.stdlib_module_names


FILES = [file for file in files_of("torch") if is_shared("torch", file)]
OWN_FILES = [(name, file) for name in NAMES for file in files_of(name)]
OTHERS = [name for name in NAMES if name != "torch"]  # torch's is what the others are compared with
SHARED = [
    (name, file, public, node)
    for file in FILES
    for public, node in definitions("torch", file).items()
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and not is_extra("torch", public)
    for name in OTHERS
    if (name, public) not in OTHERWISE
]
PUBLIC = [  # all but the checks, which no user calls
    pytest.param(name, file, public, id=f"{name}-{file.removesuffix('.py')}-{public}")
    for name, file, public, node in SHARED
    if not public.startswith("check_") and isinstance(node, ast.FunctionDef)
]
SUMMARISED = [
    pytest.param(name, file, public, id=f"{name}-{file.removesuffix('.py')}-{public}")
    for name, file, public, _ in SHARED
    if (name, public) not in OTHER_SUMMARIES
]

every_sibling = pytest.mark.parametrize("name", NAMES)
every_other = pytest.mark.parametrize("name", OTHERS)
every_file = pytest.mark.parametrize("file", FILES)
every_own_file = pytest.mark.parametrize(("name", "file"), OWN_FILES)


# ---- Files and names -------------------------------------------------------------------------------------------------


@every_other
def test_siblings_have_the_same_files(name):
    shared = {sibling: {file for file in paths_of(sibling) if is_shared(sibling, file)} for sibling in NAMES}
    assert shared[name] == shared["torch"]
    assert [extra for extra in EXTRA_FILES[name] if not any(_is_in(file, extra) for file in paths_of(name))] == []


@every_other
def test_siblings_have_the_same_public_names(name):
    extra = {Path(file).stem for file in [*EXTRA_FILES[name], *files_of(name)] if not is_shared(name, file)}
    assert [public for public in all_of(name) if public not in extra and not is_extra(name, public)] == all_of("torch")


@every_sibling
def test_public_names_are_defined_where_they_are_imported_from(name):
    imported = set()
    for node in parse(name, "__init__.py").body:
        if isinstance(node, ast.ImportFrom):
            imported |= {alias.name for alias in node.names}
            place = "/".join(node.module.split(".")[1:])
            inside = folder(name) / place
            there = {path.stem for path in inside.iterdir()} if inside.is_dir() else definitions(name, f"{place}.py")
            assert not [alias.name for alias in node.names if alias.name not in there]
    assert imported == set(all_of(name))


@every_other
@every_file
def test_definitions_have_the_same_names_in_the_same_order(name, file):
    names = {
        sibling: [public for public in definitions(sibling, file) if not is_extra(sibling, public)] for sibling in NAMES
    }
    assert names[name] == names["torch"]


@every_sibling
def test_what_the_list_names_is_there(name):
    found = [definitions(name, file) for file in files_of(name)]
    arguments = {
        argument.arg
        for nodes in found
        for node in nodes.values()
        if isinstance(node, ast.FunctionDef)
        for argument in [*node.args.args, *node.args.kwonlyargs]
    }
    assert EXTRA_NAMES[name] <= set().union(*found)
    assert EXTRA_PARAMETERS[name] <= arguments


# ---- Parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "file", "public"), PUBLIC)
def test_parameters_have_the_same_names_kinds_defaults_and_axes(name, file, public):
    expected = parameters("torch", public, functions("torch", file)[public])
    expected = with_other_defaults(name, public, expected)
    assert parameters(name, public, functions(name, file)[public]) == expected


@pytest.mark.parametrize(("name", "file", "public"), PUBLIC)
def test_results_have_the_same_axes(name, file, public):
    assert axes(functions(name, file)[public].returns) == axes(functions("torch", file)[public].returns)


# ---- Docstrings ------------------------------------------------------------------------------------------------------


@every_other
@every_file
def test_files_have_the_same_summary(name, file):
    assert summary(name, parse(name, file)) == summary("torch", parse("torch", file))


@pytest.mark.parametrize(("name", "file", "public"), SUMMARISED)
def test_definitions_have_the_same_summary(name, file, public):
    assert summary(name, definitions(name, file)[public]) == summary("torch", definitions("torch", file)[public])


@every_own_file
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


@every_own_file
def test_sibling_imports_only_its_framework_numpy_and_itself(name, file):
    at_once, lazily = imports(parse(name, file))
    allowed = FRAMEWORK[name] | {f"mha_{name}", "mha_spec", "numpy", "jaxtyping"}
    assert at_once <= allowed
    assert lazily <= allowed | LAZY_IMPORTS.get((name, file), set())
