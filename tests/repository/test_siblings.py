"""Tests that the implementations agree: in files, names, order, parameters and summaries, in each
framework's terms.

They are compared as source code, because no environment has all three frameworks.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from helpers import ROOT

import mha_jax
import mha_torch

NAMES = ["jax", "torch", "tt"]
PACKAGES = {"jax": mha_jax, "torch": mha_torch}  # installed in one environment

# ---- Differences between the implementations: the complete list
# ------------------------------------------------------

FRAMEWORK = {"jax": {"jax", "flax"}, "torch": {"torch"}, "tt": {"ttnn", "ttnn_mock"}}
"""`lint-imports` limits ttnn_mock to one import."""

OTHER_IMPORTS = {
    ("tt", "plain.py"): {
        "torch"
    },  # the tutorial uploads tensors of torch, as ttnn's own documentation does
}

WORDS = {
    "jax": {"JAX": "the framework", "jnp.": "xp.", "jax.": "xp."},
    "torch": {"PyTorch": "the framework", "torch.": "xp."},
    "tt": {"TTNN": "the framework", "ttnn.": "xp."},
}

EXTRA_FILES = {  # and folders
    "jax": {
        "kernels/cpu/",  # fused CPU kernels, which the other frameworks provide
        # the framework's function in a few lines; ttnn's has a device's limits
        "kernels/plain_sdpa.py",
        "kernels/library.py",  # the framework's own kernel, for other devices,
        "kernels/splash.py",  # and the one for TPUs
        "compiled.py",  # compiles once for callers who do not
        "parallel/heads.py",  # heads sharded over the devices of a mesh, in the framework's terms
        "sharding.py",  # how arrays are sharded among devices, according to their types
        # tokens sharded over the devices of a mesh: heads are distributed for them,
        "parallel/tokens.py",
        "parallel/ring.py",  # or keys and values circulate
    },
    "torch": {
        # the framework's function in a few lines; ttnn's has a device's limits
        "kernels/plain_sdpa.py",
        "kernels/flex.py",  # a second kernel of the framework's own, for CUDA
        "kernels/sdpa.py",  # the first one, with the cheapest form of a mask,
        "kernels/windows.py",  # and a few queries at a time within windows
        "parallel/heads.py",  # heads sharded over processes, in the framework's terms
        "parallel/local.py",  # and the part that one of these holds
        "parallel/ring.py",  # tokens sharded over processes
    },
    "tt": {
        "device.py",  # opens it, and transfers arrays and weights to and from it
        "layout.py",  # how the features of heads are ordered and padded there
        "parallel/heads.py",  # heads sharded over the chips of a mesh, in the framework's terms
        "parallel/local.py",  # and the part that one of these holds
        "decode/",  # a step that runs without the host, and a paged cache
    },
}

EXTRA_PARAMETERS = {
    "jax": {
        "rngs",  # randomness is explicit,
        "rng",
        "dropout_rng",
        *("dtype", "param_dtype"),  # flax's names for the dtypes of computation and of weights;
        "find",  # where tokens are divided, the kernel finds padding
        "kv_b",  # of `cached_layer`: a weight, which is read as it is
    },
    "torch": {
        *("device", "dtype"),  # placement of tensors, and torch's name for a dtype
        "find",  # where tokens are divided, the kernel finds padding
        "kv_b",  # of `cached_layer`: a weight, which is read as it is
    },
    "tt": {
        "device",  # placement of tensors; there is no default device
        "dtype",  # of inputs and outputs, and of a module's cache,
        "weight_dtype",  # which differ: weights may be bfloat8_b if inputs are not
        "compute_kernel_config",  # the arithmetic of the device is chosen per operation
        "rng",  # of NumPy: draws weights and seeds,
        "seed",  # because the device draws from a seed
        "feature_indices",  # of `apply_norm`, and
        # of `apply_rope`: heads are padded to whole tiles, so their shape does not determine it
        "head_dim",
        "get_kv_b",  # of `cached_layer`: a weight is split by head, once for many calls
        *("page_size", "page_table"),  # of a paged cache and its kernel
    },
}

COMMON_PARAMETERS = {  # some of these words mean the same in all implementations
    "absorb_keys": {"kv_b"},
    "absorb_values": {"kv_b"},
    "init_cache": {"dtype", "head_dim"},
    "init_latent_cache": {"dtype"},
    "MultiHeadAttentionWithCache.init_cache": {"dtype"},
    "MultiHeadLatentAttention.init_cache": {"dtype"},
    "kv_cache_nbytes": {"dtype", "head_dim"},
}

OTHER_DEFAULTS = {  # accepted by the fused kernels; the others have float32
    ("tt", "init_cache", "dtype"): "xp.bfloat16",
    ("tt", "init_latent_cache", "dtype"): "xp.bfloat16",
}

OTHER_AXES = {
    # torch keeps weights as (out, in), the others as (in, out)
    "kv_rank N*(H-rope_dim+Hv)": "N*(H-rope_dim+Hv) kv_rank",
    "1 N 1 1": " N",  # on a Tenstorrent device sinks have the axes of scores
}

# arguments from a cache, whose lengths are known elsewhere: on the host, in a graph, or not
CACHE_PARTS = {
    "jax": {"append_unchecked", "num_added", "token_positions", "has_room"},
    "torch": {"append_unchecked", "has_room", "Mask.block", "Scores.block", "block_of"},
    "tt": {"append_unchecked", "num_added", "write_rows", "Scores.block", "block_of"},
}

WEIGHTS_OF_A_LAYER = {  # declared for type checkers; a device has them in one mapping
    *(
        f"AttentionLayer.{name}_proj"
        for name in ("q", "k", "v", "qkv", "q_a", "q_b", "kv_a", "kv_b", "gate", "out")
    ),
    *(f"AttentionLayer.{name}_norm" for name in ("q", "k", "v", "q_a", "kv_a", "context")),
}

WRITTEN_OVER = {  # a step writes into the cache that it receives; arrays of JAX never change
    *("mark_written_over", "Cache.is_written_over"),
}

EXTRA_NAMES = {
    "jax": {
        "to_scores_rank",  # strict rank promotion is kept, so ranks are aligned by hand
        # nnx.Linear rounds to the narrow dtype before it adds the bias, torch's after
        "Projection",
        "FusedAttention",  # the default kernel with custom block sizes
        "attend_without_weights",  # compiled by itself, an unused result would be stored
        "AttentionLayer.dropout_rng",  # torch draws from a global generator instead
        *("FunctionalLayer.dropout_rng", "Scores.dropout_rng"),
        "Scores.has_dropout",  # no kernel supports it
        "Mask.as_arrays",  # arguments of compiled functions
        "cast",  # torch has autocast
        "platform_of",  # arrays have one platform, or none yet while traced,
        "is_on_accelerator",  # whose values a call does not wait for,
        "lies_on_mesh",  # and only on a mesh can their types contain a sharding
        *("nonfinite_tokens", "attends_to_any"),  # a Tenstorrent device has its own operations
        "linear",  # sums in float32, also with a bias
        *("Contained.step", "Contained.find_padding"),  # methods that a kernel may have in JAX only
        "NormLayer",  # a module that holds the parameters of a norm
        "array_of",  # weights may be variables of nnx
        *WEIGHTS_OF_A_LAYER,
        *CACHE_PARTS["jax"],
    },
    "torch": {
        # torch's hook to redraw the weights; nnx builds a new module
        "AttentionLayer.reset_parameters",
        "AttentionLayer.extra_repr",  # torch's hook into its own `__repr__`, which documents it
        "NormLayer",  # a module that holds the parameters of a norm
        *("values_of", "values_at_hand", "is_graph"),  # known or not by more than a type
        "constant",  # a copy to a GPU waits for it
        "is_transformed",  # vmap and fake tensors have no values
        "sees_any_between",  # from prefix sums; JAX looks at blocks,
        *("nonfinite_tokens", "attends_to_any"),  # and a Tenstorrent device has its own operations
        "without_autocast",  # which would sum in half precision
        "is_autocast_on",  # and narrowed or not by more than their own dtype
        *(
            "Rotation",
            "rotation_of",
        ),  # JAX's compiler shares the common computations of queries and keys
        *("is_distributed", "replicate_like"),  # a tensor may be a DTensor,
        "needs_gradient",  # or require a gradient
        "apply_norm_by_mean",  # over all processes
        "hooks_of",  # a module may do more than its weights determine
        "check_device",  # tensors lie on several devices,
        "as_lengths",  # and lengths are moved to theirs
        "cache_dtype",  # under autocast it differs from the weights' dtype
        *WRITTEN_OVER,
        *WEIGHTS_OF_A_LAYER,
        *("check_attention", "Contained.check"),  # of the kernel over processes
        *CACHE_PARTS["torch"],
    },
    "tt": {
        *("Linear", "Dropout"),  # of the tutorial: torch and nnx have these modules
        "as_dtype",  # converts on the device
        "MASKED",  # stands for -inf, which the kernel turns into NaN,
        "LOWEST_BIAS",  # and the lower limit of a user's bias, to stay above it
        "DeviceMask",  # masks are built on the host, and uploaded once for many calls,
        "on_host",
        "on_device",  # or for one
        "zero_masked_rows",  # kernels return the mean of the values for a row without keys
        "bias_on_device",
        "CausalMask",
        # rotations are computed on the host, in float64, and uploaded once for many calls
        "Rotation",
        "rotation_of",
        "positions_and_rotation",  # for all projections in a call,
        *("rotated_head", "cos_and_sin"),  # or as a table that the device indexes
        *("HeadWeights", "weights_of_heads"),  # a weight is split once for many calls
        "project_absorbed",  # and queries are combined once
        "sinks_of_step",  # computed once for many steps
        "MOST_ROW_NBYTES",  # of the operation that combines heads, in a core's memory
        # bodies of several operations, without checks
        *("combine_unchecked", "attend_to_cache_unchecked"),
        "attend_to_cache",  # one new token per sequence has its own kernel
        # of the fused kernel, which has options for dividing its work
        *("LARGEST_CHUNK", "WIDE", "WIDEST"),
        *("CHUNKS_OF_STEP", "SIZE_OF_CALL", "SIZE_OF_FRAMEWORK", "SIZE_IN_PAGES"),
        *(
            "HALF_TILE",
            "STEP_FEATURES",
        ),  # limits of the step kernel: for its approximation, and for correct results
        *("FusedAttention", "attend"),  # a kernel is built for an arithmetic of the device,
        *("supports", "step_supports"),  # and the framework's do not support every call
        "may_zero_rows",  # True if the prompt kernel does so, at logits of tens of thousands
        "MOST_KV_HEADS",  # more would be written incorrectly, without an error
        "AttentionLayer.load_weights",  # torch's state dict and nnx's state do this,
        "AttentionLayer.train",  # and their modules have these two
        "AttentionLayer.eval",
        "check_is_device",  # every module and cache is made for an open device,
        "check_on_device",  # several operations crash on a tensor on the host,
        "check_tiles",  # or need whole tiles,
        # distinguishes the dtype of inputs from the dtype of weights, which differ here,
        "check_input_dtype",
        "check_dtype",  # only three dtypes are supported,
        "check_head_dim",  # padding of heads counts as features,
        *("check_heads_of_spec", "check_latent_heads"),  # in queries as in latents, in parts,
        "check_pair_order",  # whose order depends on the layer,
        "check_finite",  # weights are read before they are uploaded,
        # writing into a cache precedes any other sign that it belongs to another layer,
        "check_cache_holds",
        "check_new_cache",  # pages are a kind of cache
        "check_cached_step",  # and one new token per sequence has its own kernel
        "Cache.next_positions",  # counted on the device
        *WRITTEN_OVER,
        *("Cache.pages", "Cache.page_table", "Cache.is_within"),  # a cache may be paged
        "PagedKVCache",
        *(
            "KVCache.capacity",
            "LatentCache.capacity",
        ),  # the slots are padded: their shape does not determine it
        # an input has the dtype of the module; dropout is drawn in bfloat16 only,
        "AttentionLayer.check_input",
        "drop",  # for both attention weights and outputs,
        *("Scores.seed", "FunctionalLayer.seed"),  # from a seed
        "FunctionalLayer.compute_kernel_config",  # the arithmetic of the device is chosen per layer
        "FunctionalLayer.prepared",  # steps keep their results,
        *(
            "AttentionLayer.plain_weights",
            "FunctionalLayer.plain_weights",
        ),  # such as the unmodified weights
        "upload_weights",  # weights are padded during upload
        "download_weights",
        *CACHE_PARTS["tt"],
    },
}

OTHERWISE = {
    ("jax", "attend"),  # of `fused`, a kernel with the default block sizes
    ("jax", "Mask.check"),  # arrays are whole sequences on one mesh
    (
        "tt",
        "Cache.capacity",
    ),  # the slots are padded to whole tiles, so their shape does not determine it
    *(
        ("tt", "Mask.check"),
        ("tt", "Scores.check"),
    ),  # a mask is on the host, and a bias is converted
    ("tt", "Mask.to_bool"),  # returns a mask with its forms on the device
}

OTHER_SUMMARIES = {
    ("tt", "contained"),  # has no gradients
    ("tt", "AttentionLayer.project"),  # has no modules to replace
    *(
        ("jax", "check_features"),
        ("tt", "check_features"),
    ),  # features are never distributed over processes
    *(("jax", "check_heads"), ("tt", "check_heads")),  # nor are their devices checked
    *(("tt", "zero_where"), ("tt", "nan_where")),  # there are no gradients,
    ("tt", "zero_heads_in_padding"),  # and lengths are always known
}

CALL = {"__call__": "call", "forward": "call"}


# ---- Reading the source code ---------------------------------------------------------------------


def folder(name):
    return ROOT / f"mha_{name}"


@cache
def paths_of(name):
    """Return the paths of an implementation's files, including those in folders, relative to it."""
    paths = [
        path
        for path in sorted(folder(name).rglob("*"))
        if path.is_file() and path.parent.name != "__pycache__"
    ]
    return {path.relative_to(folder(name)).as_posix(): path for path in paths}


@cache
def parse(name, file):
    return ast.parse(paths_of(name)[file].read_text())


def files_of(name):
    return sorted(file for file in paths_of(name) if file.endswith(".py"))


def is_shared(name, file):
    """Return True if the others must also have the file, unlike listed files and the `__init__.py`
    of a folder.
    """
    return not file.endswith("/__init__.py") and not any(
        _is_in(file, extra) for extra in EXTRA_FILES[name]
    )


def _is_in(file, folder):
    """Return True if a path is a file, or a folder that contains it."""
    return file == folder or (folder.endswith("/") and file.startswith(folder))


def all_of(name):
    """Return the public names that a package lists."""
    return next(
        ast.literal_eval(node.value)
        for node in parse(name, "__init__.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )


def is_public(name):
    return not name.startswith("_") or name in ("__init__", "__call__")


def targets(node):
    """Return the names that a statement binds itself."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets_of = [*getattr(node, "targets", []), getattr(node, "target", None)]
    return [target.id for target in targets_of if isinstance(target, ast.Name)]


@cache
def definitions(name, file):
    """Return the public functions, classes, constants, methods and fields of a file by name, in
    order.

    Both `forward` and `__call__` are named `call`.
    """
    nodes = {}
    for node in parse(name, file).body:
        nodes |= {public: node for public in targets(node) if is_public(public)}
        for member in node.body if isinstance(node, ast.ClassDef) and is_public(node.name) else []:
            nodes |= {
                f"{node.name}.{CALL.get(own, own)}": member
                for own in targets(member)
                if is_public(own)
            }
    return nodes


def functions(name, file):
    return {
        public: node
        for public, node in definitions(name, file).items()
        if isinstance(node, ast.FunctionDef)
    }


def is_extra(name, public):
    """Return True if a name, its class or its file is in the list."""
    own = EXTRA_NAMES[name].union(
        *(definitions(name, file) for file in files_of(name) if not is_shared(name, file))
    )
    return not own.isdisjoint({public, public.partition(".")[0]})


def constructor(name, kind):
    """Return the constructor of a class, its own or inherited."""
    nodes = definitions(name, "mha.py") | definitions(name, "cache_mha.py")
    while f"{kind}.__init__" not in nodes:
        kind = nodes[kind].bases[0].id
    return nodes[f"{kind}.__init__"]


def parameters(name, public, function):
    """Return the common parameters in order, each as (kind, name, default, axes of its
    annotation).
    """
    arguments = function.args
    positional, keyword = [*arguments.posonlyargs, *arguments.args], arguments.kwonlyargs
    defaults = (
        [None] * (len(positional) - len(arguments.defaults))
        + arguments.defaults
        + arguments.kw_defaults
    )
    kinds = ["positional"] * len(positional) + ["keyword"] * len(keyword)
    extra = EXTRA_PARAMETERS[name] - COMMON_PARAMETERS.get(public, set())
    return [
        (
            kind,
            argument.arg,
            default and in_neutral_words(name, ast.unparse(default)),
            axes(argument.annotation),
        )
        for kind, argument, default in zip(kinds, [*positional, *keyword], defaults, strict=True)
        if argument.arg not in extra
    ]


def with_other_defaults(name, public, expected):
    """Return parameters with the implementation's own defaults."""
    others = {
        argument: default
        for (*where, argument), default in OTHER_DEFAULTS.items()
        if where == [name, public]
    }
    return [
        (kind, argument, others.get(argument, default), axes)
        for kind, argument, default, axes in expected
    ]


def axes(annotation):
    """Return the axis strings of an annotation, such as `B N T H`."""
    if annotation is None or isinstance(annotation, ast.Constant):  # a class in quotes has none
        return []
    strings = re.findall(r"'([^']*)'", ast.unparse(annotation))
    return [OTHER_AXES.get(named, named) for named in strings]


def in_neutral_words(name, text):
    for word, neutral in WORDS[name].items():
        text = text.replace(word, neutral)
    return text


def summary(name, node):
    """Return the first line of a docstring."""
    return in_neutral_words(name, (ast.get_docstring(node) or "").partition("\n")[0])


def imports(tree):
    """Return the packages that a file imports, at import time or later."""
    packages = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            packages.add(node.module.partition(".")[0])
    return packages - sys.stdlib_module_names


FILES = [file for file in files_of("torch") if is_shared("torch", file)]
OTHERS = [name for name in NAMES if name != "torch"]  # the others are compared with torch


def shared_definitions(name, file):
    """Return torch's functions and classes in a file that the implementation must also have, by
    name.
    """
    shared = {}
    for public, node in definitions("torch", file).items():
        is_definition = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if is_definition and not is_extra("torch", public) and (name, public) not in OTHERWISE:
            shared[public] = node
    return shared


def shared_functions(name, file):
    """Return those that are functions, without checks, which users do not call."""
    shared = shared_definitions(name, file)
    return {
        public: node
        for public, node in shared.items()
        if isinstance(node, ast.FunctionDef) and not public.startswith("check_")
    }


every_sibling = pytest.mark.parametrize("name", NAMES)
every_other = pytest.mark.parametrize("name", OTHERS)


def test_the_lists_of_files_are_long():
    """The tests below compare all of these files at once."""
    assert len(FILES) >= 20
    assert all(len(files_of(name)) > len(FILES) for name in NAMES)
    assert all(len(shared_functions(name, "mha.py")) >= 5 for name in OTHERS)


# ---- Files and names -----------------------------------------------------------------------------


@every_other
def test_implementations_have_same_files(name):
    """The packages have the files of mha_torch, apart from listed extra files, all of which
    exist.
    """
    shared = {
        sibling: {file for file in paths_of(sibling) if is_shared(sibling, file)}
        for sibling in NAMES
    }
    assert shared[name] == shared["torch"]
    assert [
        extra
        for extra in EXTRA_FILES[name]
        if not any(_is_in(file, extra) for file in paths_of(name))
    ] == []


@every_other
def test_packages_have_same_public_names(name):
    """The packages have the public names of mha_torch in the same order, apart from listed
    extra names.
    """
    assert shared_public_names(name) == shared_public_names("torch")


def shared_public_names(name):
    """Return the public names of a package that the others must also have."""
    own_files = {
        Path(file).stem
        for file in [*EXTRA_FILES[name], *files_of(name)]
        if not is_shared(name, file)
    }
    shared = []
    for public in all_of(name):
        is_type_of_kernels = (
            public == "Kernel"
        )  # in the `__init__.py` of a folder, which others need not have
        if is_type_of_kernels or not (public in own_files or is_extra(name, public)):
            shared.append(public)
    return shared


@every_sibling
def test_public_names_are_defined_in_modules(name):
    """The public names of a package are those that it imports, each from the module that
    defines it.
    """
    imported = set()
    for node in parse(name, "__init__.py").body:
        if isinstance(node, ast.ImportFrom):
            public = [alias for alias in node.names if not (alias.asname or "").startswith("_")]
            imported |= {alias.name for alias in public}
            path = "/".join(node.module.split(".")[1:])
            inside = folder(name) / path
            if inside.is_dir():
                there = {path.stem for path in inside.iterdir()} | set(
                    definitions(name, f"{path}/__init__.py")
                )
            else:
                there = set(definitions(name, f"{path}.py"))
            assert not [alias.name for alias in node.names if alias.name not in there]
    assert imported == set(all_of(name))


@every_other
def test_definitions_have_same_order(name):
    """The public definitions of a file have the names and order of mha_torch, apart from
    listed extra names.
    """
    for file in FILES:
        actual = [public for public in definitions(name, file) if not is_extra(name, public)]
        expected = [
            public for public in definitions("torch", file) if not is_extra("torch", public)
        ]
        assert actual == expected, file


@every_sibling
def test_listed_names_exist(name):
    """Every listed extra name and parameter exists in its package."""
    definitions_of_files = [definitions(name, file) for file in files_of(name)]
    arguments = {
        argument.arg
        for nodes in definitions_of_files
        for node in nodes.values()
        if isinstance(node, ast.FunctionDef)
        for argument in [*node.args.args, *node.args.kwonlyargs]
    }
    assert EXTRA_NAMES[name] <= set().union(*definitions_of_files)
    assert EXTRA_PARAMETERS[name] <= arguments


# ---- Parameters ----------------------------------------------------------------------------------


@every_other
def test_parameters_are_the_same(name):
    """The parameters of a function have the names, kinds, defaults and axes of mha_torch,
    apart from listed ones.
    """
    actual, expected = {}, {}
    for file in FILES:
        for public, node in shared_functions(name, file).items():
            actual[file, public] = parameters(name, public, functions(name, file)[public])
            expected[file, public] = with_other_defaults(
                name, public, parameters("torch", public, node)
            )
    assert actual == expected


@every_other
def test_results_have_same_axes(name):
    """The result of a function has the axes of mha_torch."""
    actual, expected = {}, {}
    for file in FILES:
        for public, node in shared_functions(name, file).items():
            actual[file, public] = axes(functions(name, file)[public].returns)
            expected[file, public] = axes(node.returns)
    assert actual == expected


# ---- Docstrings ----------------------------------------------------------------------------------


@every_other
def test_files_have_same_summary(name):
    """The first line of a file's docstring is the same as in mha_torch, in neutral words."""
    summaries = {file: summary(name, parse(name, file)) for file in FILES}
    assert summaries == {file: summary("torch", parse("torch", file)) for file in FILES}


@every_other
def test_definitions_have_same_summary(name):
    """The first line of a definition's docstring is the same as in mha_torch, in neutral words."""
    actual, expected = {}, {}
    for file in FILES:
        for public, node in shared_definitions(name, file).items():
            if (name, public) not in OTHER_SUMMARIES:
                actual[file, public] = summary(name, definitions(name, file)[public])
                expected[file, public] = summary("torch", node)
    assert actual == expected


@every_sibling
def test_public_definitions_have_docstrings(name):
    """Every public function, class and method has a docstring, except constructors and
    `extra_repr`.
    """
    bare = [
        (file, public)
        for file in files_of(name)
        for public, node in definitions(name, file).items()
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not public.endswith(
            ("__init__", "extra_repr")
        )  # the class documents its constructor, and torch the hook
        and not ast.get_docstring(node)
    ]
    assert not bare


# ---- Imports -------------------------------------------------------------------------------------


@every_sibling
def test_package_imports_only_its_framework(name):
    """A file imports only its framework, NumPy, jaxtyping, mha_spec and its own package, apart from
    listed imports.
    """
    allowed = FRAMEWORK[name] | {f"mha_{name}", "mha_spec", "numpy", "jaxtyping"}
    for file in files_of(name):
        assert imports(parse(name, file)) <= allowed | OTHER_IMPORTS.get((name, file), set()), file
