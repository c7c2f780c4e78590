"""Write the test of a written layer: against the float64 reference, or against a trace without this
package.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import mha_spec
from mha_spec import AttentionSpec, InputError
from parity.explain.writing.specialize import WIDTH
from parity.explain.writing.subject import CallForm
from parity.measure.core.case import Case
from parity.measure.core.compare import budget
from parity.measure.core.problem import Problem, make_problem
from parity.measure.core.reference import steps
from parity.measure.core.stages import run_steps

SEED = 0  # for the weights of a trace


class Check(NamedTuple):
    """The test of a written layer.

    Attributes:
        source: source of the test.
        trace: content of the npz file that it reads; None if the reference computes the values.
    """

    source: str
    trace: bytes | None = None


def case_of(name: str, spec: AttentionSpec, call: CallForm) -> Case:
    """Return the test case of a written layer; with a cache, a prompt followed by steps of one and
    two tokens.
    """
    options: dict[str, Any] = {}
    if call.has_positions:
        options["first_position"] = 3
    if call.cache is None:
        options["seq_len"] = 9
        options["is_causal"] = call.is_causal
        options["random_mask"] = call.has_mask
        options["bias"] = call.has_bias
        if call.is_cross:
            options["seq_len_k"] = 7
    else:
        options["chunks"] = (6, 1, 2)
        options["seq_len"] = 9
        options["capacity"] = 10
        if call.cache == "ragged":
            options["new_lengths"] = ((6, 4), (1, 1), (0, 2))
    return Case(name, spec, "a written layer", **options)


def check_of(
    module: str, spec: AttentionSpec, framework: str, call: CallForm, *, with_trace: bool = False
) -> Check:
    """Return the test of a written layer.

    Args:
        module: name of the module to test.
        spec, framework, call: arguments that it was written with.
        with_trace: compare with a trace, in a file next to the test, instead of the reference.

    Raises:
        ValueError: if the layer attends to the cache of another layer.
    """
    if spec.shared_kv and call.cache is not None:
        raise InputError(
            "cache",
            "be None in a test with shared_kv, because another layer fills it",
            cache=call.cache,
        )
    case = case_of(module, spec, call)
    written_test = _WrittenTest(module, FRAMEWORKS[framework], call, case)
    if with_trace:
        return Check("\n".join(written_test.by_trace()) + "\n", _trace_of(case))
    return Check("\n".join(written_test.by_reference()) + "\n")


# ---- The source ----------------------------------------------------------------------------------


class Framework(NamedTuple):
    """Parts of a test in a framework.

    Attributes:
        imports: modules, and the names that they are called by.
        entry: name of the written layer or function.
        fixture: argument of the test.
        layer: statements that make the layer, given its weights.
        weights: the argument before all others, if any.
        empty_cache: the function that makes an empty cache.
        input: an array of activations, from a NumPy array `{}`.
        setting: masks, lengths and positions, from a NumPy array `{}`.
        output: the NumPy array of an output.
    """

    imports: tuple[str, ...]
    entry: str
    fixture: str
    layer: tuple[str, ...]
    weights: tuple[str, ...]
    empty_cache: str
    input: str
    setting: str
    output: str


FRAMEWORKS = {
    "jax": Framework(
        imports=("import jax", "import jax.numpy as jnp"),
        entry="attention",
        fixture="",
        layer=("layer = jax.jit(attention)", "params = params_of(weights)"),
        weights=("params",),
        empty_cache="empty_cache",
        input="jnp.asarray({})",
        setting="jnp.asarray({})",
        output="np.asarray(output)",
    ),
    "torch": Framework(
        imports=("import torch",),
        entry="Attention",
        fixture="",
        layer=(
            "layer = Attention().eval()",
            "layer.load_state_dict("
            "{name: torch.tensor(weight) for name, weight in weights.items()})",
        ),
        weights=(),
        empty_cache="empty_cache",
        input="torch.tensor({})",
        setting="torch.tensor({})",
        output="output.detach().numpy()",
    ),
    "ttnn": Framework(
        imports=("import ttnn",),
        entry="Attention",
        fixture="request",
        layer=(
            "device = ttnn.open_device(device_id=0)",
            "request.addfinalizer(lambda: ttnn.close_device(device))",
            "layer = Attention(weights, device, ttnn.float32)",
        ),
        weights=(),
        empty_cache="layer.empty_cache",
        input="layer.upload({})",
        setting="{}",
        output="ttnn.to_torch(output).numpy()",
    ),
}

PARAMS_OF = '''def params_of(weights):
    """Return weights as nested mappings, kernels (in, out)."""
    params = {}
    for name, weight in weights.items():
        part, _, leaf = name.partition(".")
        if not leaf:
            params[part] = weight
        elif part.endswith("_proj") and leaf == "weight":
            params.setdefault(part, {})["kernel"] = weight.T
        else:
            params.setdefault(part, {})[leaf] = weight
    return params

'''
"""The function that JAX's tests need: `attention` takes nested mappings."""

DRAW_WEIGHTS = f'''def draw_weights():
    """Return the weights of the trace, which are drawn again because they are large."""
    rng = np.random.default_rng({SEED})
    return {{
        name: rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        for name, shape in SHAPES.items()
    }}

'''
"""The function that tests by a trace need: as `_weights_of` draws them."""


class _WrittenTest:
    """The test of a module, as lines."""

    def __init__(self, module: str, framework: Framework, call: CallForm, case: Case) -> None:
        self.module = module
        self.framework = framework
        self.call = call
        self.case = case

    def by_reference(self) -> Iterator[str]:
        """Yield the lines of a test that computes what it expects."""
        yield f'"""Test that {self.module} agrees with the float64 reference of mha-parity."""'
        yield ""
        yield from self._imports()
        yield ""
        yield "import parity"
        yield f"from mha_spec import {', '.join(_records_in(self.case.spec))}"
        yield ""
        yield from _wrapped(f"SPEC = {self.case.spec!r}")
        yield from _wrapped(f"CASE = parity.Case({_arguments(self.case)})")
        yield ""
        yield ""
        yield from self._params_of()
        yield f"def test_output({self.framework.fixture}):"
        yield '    problem = parity.make_problem(CASE, "float32")'
        yield "    weights, inputs = problem.weights, problem.inputs"
        yield from self._layer()
        if self.call.cache is None:
            yield from self._one_call("CASE.positions()")
        else:
            yield from self._steps(
                "problem.step_input(step)", "np.array(CASE.added(step))", "CASE.positions(step)"
            )
        yield "    parity.assert_parity(outputs, problem=problem)"

    def by_trace(self) -> Iterator[str]:
        """Yield the lines of a test that reads what it expects from a file next to it."""
        yield f'"""Test that {self.module} agrees with a trace of mha-parity."""'
        yield ""
        yield "from pathlib import Path"
        yield ""
        yield from self._imports()
        yield ""
        yield f'with np.load(Path(__file__).with_name("{self.module}_trace.npz")) as file:'
        yield "    TRACE = dict(file)"
        yield "SHAPES = {"
        for name, shape in self.case.spec.weight_shapes.items():
            yield f'    "{name}": {shape},'
        yield "}"
        yield ""
        yield ""
        yield DRAW_WEIGHTS
        yield from self._params_of()
        yield f"def test_output({self.framework.fixture}):"
        yield "    weights, inputs = draw_weights(), TRACE"
        yield from self._layer()
        if self.call.cache is None:
            yield from self._one_call('inputs["positions"]')
        else:
            yield from self._steps(
                'inputs[f"step{step}"]',
                'inputs[f"new_lengths{step}"]',
                'inputs[f"positions{step}"]',
            )
        yield "    for name, output in outputs.items():"
        yield f"        error = np.abs({self.framework.output} - TRACE[name]).max()"
        yield '        assert error <= TRACE[f"allowed.{name}"], f"{name} is off by {error}"'

    def _imports(self) -> Iterator[str]:
        yield "import numpy as np"
        yield from self.framework.imports
        names = self.framework.entry
        if self.call.cache is not None and self.framework.empty_cache == "empty_cache":
            names += ", empty_cache"
        yield f"from {self.module} import {names}"

    def _params_of(self) -> Iterator[str]:
        if self.framework.weights:
            yield PARAMS_OF

    def _layer(self) -> Iterator[str]:
        for statement in self.framework.layer:
            yield f"    {statement}"

    def _one_call(self, positions: str) -> Iterator[str]:
        """Yield the call of a layer without a cache."""
        arguments = [*self.framework.weights, self._input("query")]
        if self.call.is_cross:
            arguments.append(self._input("key"))
        elif self.case.spec.shared_kv:
            arguments += [self._input("k"), self._input("v")]
        if self.call.has_mask:
            arguments.append(self.framework.setting.format('inputs["mask"]'))
        if self.call.has_bias:
            arguments.append(self.framework.setting.format('inputs["bias"]'))
        if self.call.has_positions:
            arguments.append(self.framework.setting.format(positions))
        yield f'    outputs = {{"output": layer({", ".join(arguments)})}}'

    def _input(self, name: str) -> str:
        return self.framework.input.format(f'inputs["{name}"]')

    def _steps(self, tokens: str, new_lengths: str, positions: str) -> Iterator[str]:
        """Yield the calls of a layer with a cache, one for each step."""
        empty_cache = self.framework.empty_cache
        yield f"    cache = {empty_cache}({self.case.batch}, {self.case.capacity})"
        yield "    outputs = {}"
        arguments = [*self.framework.weights, self.framework.input.format(tokens), "cache"]
        if self.call.cache == "ragged":
            arguments.append(self.framework.setting.format(new_lengths))
        if self.call.has_positions:
            arguments.append(self.framework.setting.format(positions))
        yield f"    for step in range({len(self.case.chunks)}):"
        yield f"        output, cache = layer({', '.join(arguments)})"
        yield '        outputs[f"step{step}.module.output"] = output'


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def _records_in(spec: AttentionSpec) -> list[str]:
    """Return the names of `mha_spec` in the representation of a layer."""
    words = set(re.findall(r"[A-Z]\w+", repr(spec)))
    return sorted(word for word in words if hasattr(mha_spec, word))


def _arguments(case: Case) -> str:
    """Return the arguments that make a case, with `SPEC` for its layer."""
    default = Case(case.name, case.spec, case.about)
    arguments = [repr(case.name), "SPEC", repr(case.about)]
    for name, value in vars(case).items():
        if value != getattr(default, name):
            arguments.append(f"{name}={value!r}")
    return ", ".join(arguments)


# ---- The trace -----------------------------------------------------------------------------------


def _trace_of(case: Case) -> bytes:
    """Return an npz file of the inputs of a case, its outputs in float64, and the allowed error of
    each.
    """
    problem = make_problem(case, "float32", _weights_of(case.spec))
    exact = run_steps(steps(problem, "float64"))
    same_precision = run_steps(steps(problem, "float32"))
    trace: dict[str, Any] = {name: x for name, x in problem.inputs.items() if name != "cotangent"}
    if case.is_cached:
        trace |= _inputs_of_steps(problem)
    else:
        trace["positions"] = case.positions()
    for name, expected in exact.items():
        if name == "output" or name.endswith(".module.output"):
            allowed = budget(expected, same_precision[name], "float32")
            trace[name] = expected
            trace[f"allowed.{name}"] = np.array(allowed["max"])
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **trace)
    return file.getvalue()


def _weights_of(spec: AttentionSpec) -> dict[str, np.ndarray]:
    """Return random weights of a layer, as the written test draws them."""
    rng = np.random.default_rng(SEED)
    return {
        name: rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        for name, shape in spec.weight_shapes.items()
    }


def _inputs_of_steps(problem: Problem) -> dict[str, np.ndarray]:
    case = problem.case
    inputs = {}
    for step in range(len(case.chunks)):
        inputs[f"step{step}"] = problem.step_input(step)
        inputs[f"new_lengths{step}"] = np.array(case.added(step))
        inputs[f"positions{step}"] = case.positions(step)
    return inputs
