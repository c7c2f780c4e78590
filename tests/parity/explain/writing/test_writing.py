"""Layers written out as plain code: every case of the run, in JAX and torch, and the loaders, tests
and command.
"""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers.checkpoints import open_layers
from helpers.input_errors import rejects
from helpers.samples import sample
from helpers.written import (
    LENGTH_DEPENDENT,
    NOT_FINITE,
    WRITTEN,
    Writing,
    call_of,
    case_named,
    garbage_at_padding,
    module_of,
    nested,
    problem_of,
)
from safetensors.numpy import load_file

import mha_jax
import mha_torch
import parity
from mha_spec import AttentionSpec, Gate, Latent, Llama3Scaling, Norm, Rope
from parity.explain.writing import source_of, written
from parity.explain.writing.check import check_of
from parity.explain.writing.specialize import Decision, specialize
from parity.explain.writing.subject import CallForm
from parity.measure.core.arrays import to_numpy, to_torch
from parity.measure.core.cases import CASES, cases_of_other_records
from parity.measure.core.problem import Problem, make_problem
from parity.port.conversion.layouts import LAYOUTS

LLAMA = AttentionSpec(
    4096,
    32,
    num_kv_heads=8,
    qkv_bias=False,
    out_bias=False,
    rope=Rope(500000.0, scaling=Llama3Scaling(8.0, 8192)),
)


def sizes_of(problem: Problem) -> tuple[int, int]:
    """Return the batch and the capacity of a case's cache."""
    return problem.case.batch, problem.case.capacity


def torch_layer(module: Any, problem: Problem) -> Any:
    layer = module.Attention().to(getattr(torch, problem.dtype)).eval()
    layer.load_state_dict({name: to_torch(weight) for name, weight in problem.weights.items()})
    return torch.no_grad()(layer)


def with_jax_defaults(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with the promotion of ranks and dtypes that JAX allows by default."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*arguments, **keywords)

    return call


def jax_layer(module: Any, problem: Problem) -> Any:
    params = nested(problem.weights, problem.spec)
    return with_jax_defaults(functools.partial(jax.jit(module.attention), params))


TORCH = Writing(
    mha_torch,
    torch_layer,
    lambda module, _, problem: module.empty_cache(
        *sizes_of(problem), getattr(torch, problem.dtype)
    ),
    lambda _, x: to_torch(np.ascontiguousarray(x)),
    lambda x: to_torch(np.ascontiguousarray(x)),
)
JAX = Writing(
    mha_jax,
    jax_layer,
    lambda module, _, problem: module.empty_cache(*sizes_of(problem), problem.dtype),
    lambda _, x: jnp.asarray(x),
    jnp.asarray,
)


# ---- Every case ----------------------------------------------------------------------------------


@functools.cache
def written_case(name: str, framework: str) -> tuple[str, frozenset[Decision]]:
    """Return the source of a case, and the conditions of the template with their outcomes."""
    case, decided = case_named(name), set[Decision]()
    source = written(case.spec, framework, CallForm(**call_of(case)), decided=decided)
    return source, frozenset(decided)


FORMS = (
    *(
        "textbook",
        "random-4",
        "chunk",
        "alibi-both-ways",
        "value-head-dim",
        "norm-after-rope",
        "dropout",
    ),
    *(
        "rope-linear",
        "rope-llama3",
        "rope-dynamic",
        "rope-longrope",
        "rope-partial",
        "rope-proportional",
        "rope-sections-own",
    ),
    *(
        "rope-yarn-last",
        "ragged-positions-sections",
        "grid-bias",
        "grid-bias-class-token",
        "relative-bias",
    ),
    *(
        "relative-bias-padded",
        "relative-products",
        "relative-products-both-sides",
        "relative-products-of-keys",
    ),
    *(
        "latent",
        "latent-factors",
        "decode-latent-yarn",
        "shared-kv-window",
        "decode-shared-kv",
    ),
    *("norms-rms-head-none", "norms-rms-head-w", "norms-rms-head-w-bias", "norms-rms-head-1+w"),
    *("norms-layer-head-none", "norms-layer-head-w", "norms-layer-width-1+w-bias"),
)
OTHER_RECORDS = cases_of_other_records(case_named(name) for name in FORMS)
EACH_BRANCH = (*FORMS, *(case.name for case in OTHER_RECORDS))
"""Cases in which each condition of each template holds once, and once not."""


@sample(where=lambda dtype, name: dtype == "float32" and name in EACH_BRANCH)
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("framework", ["jax", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written_case_matches_reference(dtype, framework, name):
    """The written layer of a case has the output of the reference."""
    problem = problem_of(name, dtype)
    module = module_of(written_case(name, framework)[0])
    outputs = {"jax": JAX, "torch": TORCH}[framework].outputs(module, problem)
    parity.assert_parity(outputs, problem=problem, diagnose=False)


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_written_layer_with_shared_cache(framework):
    """A written layer that shares keys matches the
    reference with the static cache of another layer.
    """
    case = replace(CASES["decode-shared-kv"], name="static", new_lengths=())
    problem = parity.make_problem(case, "float32")
    module = module_of(source_of(problem.spec, framework, **call_of(case)))
    assert module.Cache._fields == ("keys", "values", "length")
    outputs = {"jax": JAX, "torch": TORCH}[framework].outputs(module, problem)
    parity.assert_parity(outputs, problem=problem, diagnose=False)


def steps_of(
    layer: Any, cache: Any, as_array: Any, case: parity.Case
) -> tuple[list[np.ndarray], Any]:
    """Return the outputs of a layer with a ragged cache, with garbage as the positions of padding,
    and the cache.
    """
    outputs = []
    rng = np.random.default_rng(0)
    for step, num_tokens in enumerate(case.chunks):
        x = as_array(rng.standard_normal((case.batch, num_tokens, case.spec.d_model), np.float32))
        new_lengths = as_array(np.array(case.added(step)))
        positions = as_array(garbage_at_padding(case, step))
        output, cache = layer(x, cache, new_lengths=new_lengths, positions=positions)
        outputs.append(to_numpy(output))
    return outputs, cache


@pytest.mark.costly("JAX compiles a written layer")
@sample(3)
@pytest.mark.parametrize(
    ("framework", "name"),
    [
        *(("torch", name) for name in LENGTH_DEPENDENT if name != "latent"),
        ("jax", "sections"),
        ("jax", "temperature"),
    ],
)
def test_positions_of_padding_change_nothing(framework, name):
    """The written layer, the layer and its cache of keys agree, whatever the positions of padding
    are.
    """
    case = case_named(f"ragged-positions-{name}")
    problem = make_problem(case, "float32")
    module = module_of(source_of(case.spec, framework, **call_of(case)))
    sizes = sizes_of(problem)
    cache_sizes = (case.batch, case.spec.num_kv_heads, case.capacity, case.spec.head_dim)
    if framework == "torch":
        weights = {name: torch.tensor(weight) for name, weight in problem.weights.items()}
        written_layer, as_array = module.Attention().eval(), torch.as_tensor
        written_layer.load_state_dict(weights)
        written_layer = torch.no_grad()(written_layer)
        attend = functools.partial(
            mha_torch.multi_head_attention_with_cache, weights=weights, spec=case.spec
        )
        cache = mha_torch.init_cache(*cache_sizes)
    else:
        params, as_array = nested(problem.weights, case.spec), jnp.asarray
        written_layer = with_jax_defaults(functools.partial(jax.jit(module.attention), params))
        attend = functools.partial(
            mha_jax.multi_head_attention_with_cache, weights=params, spec=case.spec
        )
        cache = mha_jax.init_cache(*cache_sizes)

    def layer(x: Any, cache: Any, **keywords: Any) -> Any:
        return attend(x, cache=cache, **keywords)

    outputs, written_cache = steps_of(written_layer, module.empty_cache(*sizes), as_array, case)
    expected, own_cache = steps_of(layer, cache, as_array, case)
    for one, other in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    np.testing.assert_allclose(to_numpy(written_cache.keys), to_numpy(own_cache.keys), atol=2e-6)
    np.testing.assert_array_equal(to_numpy(written_cache.lengths), to_numpy(own_cache.lengths))


def test_only_cases_of_nan_are_not_written():
    """Only cases that are not finite are left out, fewer than a tenth of all."""
    assert {name for name, case in CASES.items() if case.not_finite} == NOT_FINITE
    assert len(NOT_FINITE) < len(CASES) / 10


# ---- The text ------------------------------------------------------------------------------------


FRAMEWORKS = ("jax", "torch", "ttnn")


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """Return the sources of cases that cover every part of every template, by file name."""
    source_of_file = {}
    for name in EACH_BRANCH:
        for framework in FRAMEWORKS:
            file_name = f"{name.replace('-', '_')}_{framework}"
            source_of_file[file_name] = written_case(name, framework)[0]
    return source_of_file


@pytest.mark.costly("writes and runs a layer for each branch of the templates")
@sample(framework=["jax", "torch"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_cases_cover_both_branches(framework):
    """Both outcomes of each condition of a template occur in EACH_BRANCH, so that no part may be
    wrong unseen. These cases run in each framework; the cases of ttnn in `tests/siblings/mha_tt`.
    """
    outcomes: dict[str, set[bool]] = {}
    for name in EACH_BRANCH:
        for condition, holds in written_case(name, framework)[1]:
            outcomes.setdefault(condition, set()).add(holds)
    only_one = {condition: holds for condition, holds in outcomes.items() if len(holds) == 1}
    assert only_one == {}


def test_written_code_is_self_contained(sources):
    """Written code imports only frameworks and the standard library, and has no `if` statement."""
    allowed = {
        "collections.abc",
        "jax",
        "jax.numpy",
        "math",
        "numpy",
        "torch",
        "torch.nn.functional",
        "ttnn",
        "typing",
    }
    for name, source in sources.items():
        nodes = list(ast.walk(ast.parse(source)))
        imported = {
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        }
        imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        assert imported <= allowed, name
        assert not any(isinstance(node, ast.If) for node in nodes), name


@pytest.mark.costly("ruff is a program")
def test_written_code_passes_ruff(sources, tmp_path):
    """Written code passes `ruff format --check` and `ruff check`."""
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    options = ["--isolated", "--line-length", "120"]
    for command in (
        ["format", "--check", *options],
        ["check", "--select", "F,E,W,I,UP,B,PIE", *options],
    ):
        process = subprocess.run(
            [sys.executable, "-m", "ruff", *command, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stdout[-2000:]


@pytest.mark.parametrize("framework", ["jax", "torch", "ttnn"])
def test_llama_layer_has_at_most_150_lines(framework):
    """A written LLaMA layer with a static cache has at most 150 lines, and cites its paper."""
    source = source_of(LLAMA, framework, cache="static")
    assert len(source.splitlines()) <= 150
    assert "arXiv:2407.21783" in source


def test_dropout_is_written_in_torch_alone():
    """A written layer of torch has dropout in training only; one of JAX names it as left out."""
    spec = AttentionSpec(32, 4, dropout=0.5)
    x = torch.ones(1, 4, 32)
    layer = module_of(source_of(spec, "torch")).Attention()
    assert not torch.equal(layer.train()(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))
    assert "in training only: dropout" in " ".join(source_of(spec, "jax").split())


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        ({"cache": "paged"}, "cache"),
        ({"cache": "static", "has_mask": True}, "has_mask"),
        ({"cache": "static", "is_causal": False}, "is_causal"),
        ({"is_cross": True}, "is_cross"),
    ],
)
def test_impossible_call_raises(call, argument):
    """An unknown cache, and a mask, bidirectional or cross-
    attention with one or with RoPE, raise an error.
    """
    with rejects(argument, ""):
        source_of(LLAMA, "torch", **call)


def test_layer_that_cannot_be_written_raises():
    """An unknown framework, and layers that do not fit their
    call, raise errors that name the argument.
    """
    with rejects("framework", {"framework": "tensorflow"}):
        source_of(LLAMA, "tensorflow")
    with rejects("is_cross", {"d_in": 20, "d_kv": 24}):
        source_of(AttentionSpec(32, 4, d_in=20, d_kv=24), "torch")
    with rejects("has_positions", {"has_positions": True}):
        source_of(AttentionSpec(32, 4), "torch", has_positions=True)
    with rejects("is_cross", {"is_cross": True}):
        source_of(AttentionSpec(32, 4, shared_kv=True), "torch", is_cross=True)
    for with_trace in (False, True):
        with rejects("cache", {"cache": "static"}):
            check_of(
                "written",
                AttentionSpec(32, 4, shared_kv=True),
                "torch",
                CallForm(cache="static"),
                with_trace=with_trace,
            )


@pytest.mark.parametrize("with_trace", [False, True])
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_written_test_of_shared_keys_passes(framework, with_trace, tmp_path, monkeypatch):
    """The written test of a layer with shared keys passes, by reference and by trace."""
    spec = AttentionSpec(
        32, 4, num_kv_heads=2, shared_kv=True, qk_norm=Norm(), rope=Rope(), window_size=4
    )
    check = check_of("written", spec, framework, CallForm(), with_trace=with_trace)
    (tmp_path / "written_trace.npz").write_bytes(check.trace or b"")
    monkeypatch.setitem(sys.modules, "written", module_of(source_of(spec, framework)))
    namespace = {"__file__": str(tmp_path / "test_written.py")}
    exec(compile(check.source, "test_written.py", "exec"), namespace)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        namespace["test_output"]()


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_sections_without_positions(framework):
    """A written layer with sections and no positions equals one with plain RoPE. It has as many
    tokens as heads and sequences, so that a confused axis shows.
    """
    spec = AttentionSpec(32, 4, rope=Rope(sections=(2, 1, 1)))
    plain = spec.replace(rope=Rope())
    case = parity.Case("sections", plain, "one axis", batch=4, seq_len=4, is_causal=True)
    problem = make_problem(case, "float32")
    module = module_of(source_of(spec, framework))
    parity.assert_parity(
        {"jax": JAX, "torch": TORCH}[framework].outputs(module, problem), problem=problem
    )


def test_full_written_cache_raises():
    """A step beyond the capacity of a written static cache raises a `RuntimeError`."""
    for spec in (AttentionSpec(32, 4), AttentionSpec(32, 4, latent=Latent(16, 4))):
        module = module_of(source_of(spec, "torch", cache="static"))
        layer, x = module.Attention().eval(), torch.ones(1, 4, 32)
        _, cache = layer(x, module.empty_cache(1, 4))
        with pytest.raises(RuntimeError, match="exceeds dimension size"):
            layer(x[:, :1], cache)


# ---- Templates -----------------------------------------------------------------------------------

TEMPLATE = '''"""A module."""

import math
import os
from typing import Any, NamedTuple

from parity.explain.writing.subject import ABSENT, spec

width = spec["width"]
has_bias = "bias" in spec

WIDTH = spec["width"]
DEPTH = WIDTH if spec["depth"] == spec["width"] else spec["depth"]
UNUSED = 3  # nothing refers to it


if has_bias:

    def shifted(x: float, bias: float) -> float:
        """Add the bias."""
        return x + bias


def scaled(x: float, bias: float, power: int) -> float:
    """Scale.

    Args:
        x: a number.
        bias: another number,
            which is added.
    """
    # It is the factor of the width.
    factor = math.sqrt(WIDTH * DEPTH) * spec["factor"]
    if has_bias and spec["width"] > 2:
        x = shifted(x, bias)
    elif spec["width"] == 2:
        x = 2 * x  # doubled
    else:
        x = -x
    return pow(
        factor * x,
        power,
        mod=ABSENT,
    )
'''

UNUSED_PARAMETERS = '''import library

UNIT = 1


class Layer:
    def apply(self, name: str, first: float, second: float) -> float:
        """Apply it.

        Args:
            first: is used.
            second: is not.
        """
        scale = library.linear(first, second)
        return self.linear("unused", scaled(second, first), scale, apply=ABSENT)

    def linear(self, name: str, x: float, y: float) -> float:
        return library.linear(x, y, option=option)


def scaled(number: float, factor: float) -> float:
    return factor * UNIT
'''


def test_template_keeps_needed_parts():
    """A template specialized for a layer is exactly the expected text: needed parts with values
    inserted, and without unused parameters and arguments.
    """
    known = {"spec": {"width": 2, "depth": 2, "factor": 0.5}, "ABSENT": None}
    assert specialize(TEMPLATE, known, ["scaled"]) == (
        '"""A module."""\n\nimport math\n\nWIDTH = 2\n\n\n'
        "def scaled(x: float, power: int) -> float:\n"
        '    """Scale.\n\n    Args:\n        x: a number.\n    """\n'
        "    # It is the factor of the width.\n    factor = math.sqrt(WIDTH * WIDTH) * 0.5\n"
        "    x = 2 * x  # doubled\n    return pow(factor * x, power)\n"
    )
    absent = object()
    known = {"ABSENT": absent, "option": absent}
    source = specialize(UNUSED_PARAMETERS, known, ["Layer"], {"second": "first"})
    assert "    def apply(self, first: float) -> float:\n" in source
    assert '            first: is used.\n        """\n' in source
    # A function of a library keeps its arguments, whatever its name is.
    assert "        scale = library.linear(first, first)\n" in source
    assert "        return self.linear(scaled(first), scale)\n" in source
    assert "        return library.linear(x, y)\n" in source
    assert "def scaled(factor: float) -> float:\n    return factor * UNIT\n" in source


def test_template_branches_follow_the_layer():
    """A template specialized for a layer with a bias keeps the function and the branch that need
    it; a long tuple has a line for each element.
    """
    known = {"spec": {"width": 4, "depth": 3, "factor": 1.0, "bias": True}, "ABSENT": None}
    source = specialize(TEMPLATE, known, ["scaled"])
    assert "WIDTH = 4\nDEPTH = 3\n" in source
    assert "def shifted(x: float, bias: float) -> float:" in source
    assert "    x = shifted(x, bias)\n" in source
    long = {"spec": {"numbers": tuple(range(1000, 1020))}}
    source = specialize('def listed() -> tuple:\n    return spec["numbers"]\n', long, ["listed"])
    assert source.startswith("def listed() -> tuple:\n    return (\n        1000,\n        1001,\n")
    assert source.endswith("        1019,\n    )\n")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("if spec and x:\n    y = 1\n", r"no known name, got \['spec'\]"),
        ("if x:\n    y = 1\nelse:\n    y = 2\n", "else .* in line 4"),
        ("y = spec.missing + x\n", "able to compute spec.missing"),
    ],
)
def test_invalid_template_raises(body, words):
    """A condition or expression that a template cannot decide raises an error."""
    with pytest.raises(ValueError, match=words):
        specialize(f"{body}print(y)\n", {"spec": object()})


# ---- Loaders -------------------------------------------------------------------------------------

LATENTS = {"latent": Latent(16, 4, 24), "head_dim": 12, "value_head_dim": 8}
NO_BIAS = {"qkv_bias": False, "out_bias": False}
LAYERS = (
    AttentionSpec(64, 8, rope=Rope()),
    AttentionSpec(64, 8),
    AttentionSpec(64, 8, num_kv_heads=4, rope=Rope(), qk_norm=Norm(), **NO_BIAS),
    AttentionSpec(64, 8, num_kv_heads=4, rope=Rope(), **NO_BIAS),
    AttentionSpec(64, 8, num_kv_heads=1, **NO_BIAS),
    AttentionSpec(64, 8, **NO_BIAS),
    AttentionSpec(64, 8, out_proj=False, **NO_BIAS),
    AttentionSpec(64, 8, qkv_bias=False),
    AttentionSpec(64, 8, scale=1.0, **NO_BIAS),
    AttentionSpec(
        64, 8, rope=Rope(rotary_dim=4, rotated="last", pairs="interleaved"), **LATENTS, **NO_BIAS
    ),
    AttentionSpec(
        64,
        8,
        rope=Rope(rotary_dim=4, rotated="last", pairs="interleaved"),
        **LATENTS | {"latent": Latent(16, 4, 24, q_factor=(64 / 24) ** 0.5, kv_factor=2.0)},
        **NO_BIAS,
    ),
    AttentionSpec(
        64,
        8,
        num_kv_heads=2,
        qk_norm=Norm(weight="1+w"),
        rope=Rope(),
        gate=Gate(),
        **NO_BIAS,
    ),
    AttentionSpec(64, 8, num_kv_heads=2, qk_norm=Norm(), rope=Rope(), gate=Gate(), **NO_BIAS),
)


def written_in(layout: str, path: Path) -> AttentionSpec:
    """Write the first of the layers that a layout holds to a file, and return it."""
    for spec in LAYERS:
        try:
            parity.save(path, parity.random_weights(spec), spec, layout, prefix="layers.3")
        except ValueError:
            continue
        return spec
    raise AssertionError(f"no layer of these fits {layout}")


@sample(24)
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_loader_reads_each_layout(layout, tmp_path):
    """Written loaders of all frameworks read the weights of a layer in each layout, bit for bit."""
    path = tmp_path / "layer.safetensors"
    spec = written_in(layout, path)
    with open_layers(path, layout, prefix="layers.3", spec=spec) as (layer,):
        modules = {
            framework: module_of(loader_module(layer, framework)) for framework in FRAMEWORKS
        }
    tensors: dict[str, Any] = {name: np.asarray(x) for name, x in load_file(path).items()}
    expected = parity.random_weights(spec)
    loaded = {
        "jax": modules["jax"].params_from(tensors),
        "torch": modules["torch"].weights_from(
            {name: torch.tensor(x) for name, x in tensors.items()}
        ),
        "ttnn": modules["ttnn"].weights_from(tensors),
    }
    for framework, weights in loaded.items():
        wanted = nested(expected, spec) if framework == "jax" else expected
        jax.tree.map(
            lambda one, other: np.testing.assert_array_equal(np.asarray(one), np.asarray(other)),
            weights,
            wanted,
        )


def loader_module(layer: Any, framework: str) -> str:
    """Return a module with the loader of a layer alone."""
    from parity.explain.writing.loader import loader_of

    names = (
        "import numpy as np\nimport torch\nfrom collections.abc import Mapping\nfrom torch "
        "import Tensor\n"
    )
    return f"{names}Params = Mapping\n{loader_of(layer, framework).source}"


# ---- The command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    """A folder with a small model: four layers, grouped heads, RoPE scaled as in Llama 3."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    scaling = {
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=32,
        num_hidden_layers=4,
        vocab_size=32,
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling},
        max_position_embeddings=512,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run_command(*arguments: object) -> int:
    from parity.use.cli.main import main

    return main(["write", *map(str, arguments)])


def run_pytest(pytester: pytest.Pytester) -> str:
    """Return what pytest prints about the tests in its folder, with the defaults of JAX."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        result = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider")
    return result.stdout.str()


@pytest.mark.parametrize(
    ("framework", "cache"),
    [
        ("torch", "static"),  # without a cache: the test below
        *(pytest.param("jax", cache, marks=pytest.mark.thorough) for cache in ("static", None)),
    ],
)
def test_command_writes_passing_tests(llama, pytester, framework, cache):
    """The command writes a layer with tests by reference and by trace,
    which pass; the latter need no `parity`.
    """
    options = ["--layer", 3, "--to", framework, *(["--cache", cache] if cache else [])]
    for kind in ("reference", "trace"):
        assert (
            run_command(
                llama, *options, "--output", pytester.path / f"by_{kind}.py", "--test", kind
            )
            == 0
        )
    assert "parity" not in (pytester.path / "test_by_trace.py").read_text().replace(
        "mha-parity", ""
    )
    printed = run_pytest(pytester)
    assert "2 passed" in printed
    assert "failed" not in printed


def test_written_tests_detect_reversed_rope(llama, pytester):
    """A written layer with reversed RoPE fails both of its tests,
    and the reference names the bug.
    """
    for kind in ("reference", "trace"):
        path = pytester.path / f"by_{kind}.py"
        run_command(llama, "--to", "torch", "--output", path, "--test", kind)
        text = path.read_text()
        assert "first * cos - second * sin" in text
        backwards = text.replace("first * cos - second * sin", "first * cos + second * sin")
        path.write_text(
            backwards.replace("second * cos + first * sin", "second * cos - first * sin")
        )
    printed = run_pytest(pytester)
    assert "2 failed" in printed
    assert "rope-reversed" in printed  # the reference names what is wrong


def test_written_layer_matches_model(llama, tmp_path):
    """A written layer with weights from the model's state dict has
    the output of the model's layer.
    """
    from transformers import LlamaForCausalLM

    path = tmp_path / "written_llama.py"
    run_command(llama, "--layer", 2, "--to", "torch", "--output", path)
    sys.path.insert(0, str(tmp_path))
    try:
        module = importlib.import_module("written_llama")
    finally:
        sys.path.remove(str(tmp_path))
    model = LlamaForCausalLM.from_pretrained(llama, attn_implementation="eager").eval()
    attention = model.model.layers[2].self_attn
    layer = module.Attention().eval()
    layer.load_state_dict(module.weights_from(model.state_dict()))
    x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(1))
    rotation = model.model.rotary_emb(x, torch.arange(9)[None])
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        expected = attention(x, position_embeddings=rotation, attention_mask=mask)[0]
        parity.assert_parity(layer(x), expected)


def test_standard_output_has_the_source(llama, capsys):
    """Without `--output`, the source is printed, with the names of the selected layer's tensors."""
    assert run_command(llama, "--layer", 1, "--to", "jax") == 0
    source = capsys.readouterr().out
    assert "def attention(params: Params, x: Array) -> Array:" in source
    assert 'tensors["model.layers.1.self_attn.q_proj.weight"].T' in source


@pytest.mark.parametrize(
    ("options", "begin"),
    [
        (["--to", "torch", "--layer", "7"], "--layer"),
        (["--to", "torch", "--layer", "1,2"], "--layer"),
        (["--to", "torch", "--test", "trace"], "--test"),
        (["--to", "torch", "--output", "attention.txt"], "--output"),
        (["--to", "torch", "--output", "torch.py"], "--output"),
        (["--to", "torch", "--output", "class.py"], "--output"),
        *(
            (["--to", "torch", "--output", f"{name}.py"], "--output")
            for name in (
                *(
                    "pathlib",
                    "collections",
                    "ast",
                    "math",
                    "numpy",
                    "pytest",
                    "conftest",
                    "__init__",
                    "__main__",
                ),
                *(
                    "test_a",
                    "a_test",
                    "ﬁle",
                    "\uff54orch",
                ),  # Python imports the last two as file and torch
            )
        ),
        (["--to", "torch", "--output", "nowhere/attention.py"], "--output"),
        (["--to", "torch", "--mask", "--cache", "static"], "--mask"),
        (["--to", "torch", "--output", "{there}"], "{there}"),
    ],
)
def test_impossible_options_print_one_line(llama, tmp_path, capsys, options, begin):
    """Impossible options exit with 2 and one line of error that
    begins with the option, and overwrite no file.
    """
    there = tmp_path / "attention.py"
    there.write_text("precious")
    assert run_command(llama, *(option.format(there=there) for option in options)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mha-parity: error: {begin.format(there=there)} ")
    assert error.count("\n") == 1
    assert there.read_text() == "precious"


def test_cache_of_bidirectional_layer_raises(tmp_path, capsys):
    """A cache for a layer that is not causal exits with 2 and one line, and writes nothing."""
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertModel(BertConfig(num_hidden_layers=1, vocab_size=16, **sizes))
    model.save_pretrained(tmp_path / "model")
    capsys.readouterr()  # its bar of progress
    written = tmp_path / "attention.py"
    options = ["--layer", 0, "--to", "torch", "--cache", "static", "--output", written]
    assert run_command(tmp_path / "model", *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("mha-parity: error: --cache ")
    assert error.count("\n") == 1
    assert not written.exists()
