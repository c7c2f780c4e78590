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
    options: dict[str, Any] = {"first_position": 3} if call.has_positions else {}
    if call.cache is not None:
        options |= {"chunks": (6, 1, 2), "seq_len": 9, "capacity": 10}
        options |= {"new_lengths": ((6, 4), (1, 1), (0, 2))} if call.cache == "ragged" else {}
    else:
        options |= {
            "seq_len": 9,
            "is_causal": call.is_causal,
            "random_mask": call.has_mask,
            "bias": call.has_bias,
        }
        options |= {"seq_len_k": 7} if call.is_cross else {}
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
    source = "\n".join(_lines(module, spec, framework, call, case, with_trace)) + "\n"
    return Check(source, _trace_of(case) if with_trace else None)


# ---- The source ----------------------------------------------------------------------------------


def _lines(
    module: str, spec: AttentionSpec, framework: str, call: CallForm, case: Case, with_trace: bool
) -> Iterator[str]:
    against = "a trace of mha-parity" if with_trace else "the float64 reference of mha-parity"
    yield f'"""Test that {module} agrees with {against}."""'
    yield ""
    if with_trace:
        yield from ["from pathlib import Path", ""]
    yield "import numpy as np"
    yield from {
        "jax": ["import jax", "import jax.numpy as jnp"],
        "torch": ["import torch"],
        "ttnn": ["import ttnn"],
    }[framework]
    entry = "attention" if framework == "jax" else "Attention"
    names = f"{entry}, empty_cache" if call.cache is not None and framework != "ttnn" else entry
    yield f"from {module} import {names}"
    if not with_trace:
        words = sorted(
            {word for word in re.findall(r"[A-Z]\w+", repr(spec)) if hasattr(mha_spec, word)}
        )
        yield from [
            "",
            "import parity",
            f"from mha_spec import {', '.join(words)}",
            "",
            *_wrapped(f"SPEC = {spec!r}"),
        ]
        yield from _wrapped(f"CASE = parity.Case({_arguments(case)})")
    else:
        yield from ["", f'with np.load(Path(__file__).with_name("{module}_trace.npz")) as file:']
        yield from ["    TRACE = dict(file)", "SHAPES = {"]
        yield from (f'    "{name}": {shape},' for name, shape in spec.weight_shapes.items())
        yield "}"
    yield from ["", ""]
    if with_trace:
        yield "def draw_weights():"
        yield (
            '    """Return the weights of the trace, which are drawn again because they are '
            'large."""'
        )
        yield f"    rng = np.random.default_rng({SEED})"
        yield "    return {"
        yield "        name: rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)"
        yield "        for name, shape in SHAPES.items()"
        yield "    }"
        yield from ["", ""]
    if framework == "jax":
        yield _PARAMS_OF
    yield f"def test_output({'request' if framework == 'ttnn' else ''}):"
    if with_trace:
        yield "    weights, inputs = draw_weights(), TRACE"
    else:
        yield '    problem = parity.make_problem(CASE, "float32")'
        yield "    weights, inputs = problem.weights, problem.inputs"
    yield from (f"    {line}" if line else "" for line in _LAYER[framework])
    if call.cache is None:
        yield from _one_call(framework, call, case, with_trace)
    else:
        yield from _steps(framework, call, case, with_trace)
    if not with_trace:
        yield "    parity.assert_parity(outputs, problem=problem)"
    else:
        yield "    for name, output in outputs.items():"
        yield f"        error = np.abs({_to_numpy(framework)} - TRACE[name]).max()"
        yield '        assert error <= TRACE[f"allowed.{name}"], f"{name} is off by {error}"'


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


_PARAMS_OF = '''def params_of(weights):
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

_LAYER = {
    "torch": [
        "layer = Attention().eval()",
        "layer.load_state_dict({name: torch.tensor(weight) for name, weight in weights.items()})",
    ],
    "jax": ["layer = jax.jit(attention)", "params = params_of(weights)"],
    "ttnn": [
        "device = ttnn.open_device(device_id=0)",
        "request.addfinalizer(lambda: ttnn.close_device(device))",
        "layer = Attention(weights, device, ttnn.float32)",
    ],
}


def _one_call(framework: str, call: CallForm, case: Case, with_trace: bool) -> Iterator[str]:
    names = ("query", *(("key",) if call.is_cross else ("k", "v") if case.spec.shared_kv else ()))
    arguments = [_array(framework, f'inputs["{name}"]') for name in names]
    arguments += [
        _beside(framework, f'inputs["{name}"]')
        for name in ("mask", "bias")
        if name in _passed(call)
    ]
    arguments += [_beside(framework, _positions("", with_trace))] * call.has_positions
    params = ["params"] if framework == "jax" else []
    yield f'    outputs = {{"output": layer({", ".join(params + arguments)})}}'


def _steps(framework: str, call: CallForm, case: Case, with_trace: bool) -> Iterator[str]:
    empty = "layer.empty_cache" if framework == "ttnn" else "empty_cache"
    yield f"    cache, outputs = {empty}({case.batch}, {case.capacity}), {{}}"
    step = 'inputs[f"step{step}"]' if with_trace else "problem.step_input(step)"
    new = 'inputs[f"new_lengths{step}"]' if with_trace else "np.array(CASE.added(step))"
    arguments = ["params"] * (framework == "jax") + [_array(framework, step), "cache"]
    arguments += [_beside(framework, new)] * (call.cache == "ragged")
    arguments += [_beside(framework, _positions("step", with_trace))] * call.has_positions
    yield f"    for step in range({len(case.chunks)}):"
    yield f"        output, cache = layer({', '.join(arguments)})"
    yield '        outputs[f"step{step}.module.output"] = output'


def _positions(step: str, with_trace: bool) -> str:
    if with_trace:
        return 'inputs[f"positions{step}"]' if step else 'inputs["positions"]'
    return f"CASE.positions({step})"


def _passed(call: CallForm) -> list[str]:
    return ["mask"] * call.has_mask + ["bias"] * call.has_bias


def _array(framework: str, text: str) -> str:
    return {
        "torch": f"torch.tensor({text})",
        "jax": f"jnp.asarray({text})",
        "ttnn": f"layer.upload({text})",
    }[framework]


def _beside(framework: str, text: str) -> str:
    return text if framework == "ttnn" else _array(framework, text)


def _to_numpy(framework: str) -> str:
    return {
        "torch": "output.detach().numpy()",
        "jax": "np.asarray(output)",
        "ttnn": "ttnn.to_torch(output).numpy()",
    }[framework]


def _arguments(case: Case) -> str:
    plain = Case(case.name, case.spec, case.about)
    given = {name: value for name, value in vars(case).items() if getattr(plain, name) != value}
    return ", ".join(
        [
            repr(case.name),
            "SPEC",
            repr(case.about),
            *(f"{name}={value!r}" for name, value in given.items()),
        ]
    )


# ---- The trace -----------------------------------------------------------------------------------


def _trace_of(case: Case) -> bytes:
    """Return an npz file of the inputs of a case, its outputs in float64, and the allowed error of
    each.
    """
    rng = np.random.default_rng(SEED)
    weights = {
        name: rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
        for name, shape in case.spec.weight_shapes.items()
    }
    problem = make_problem(case, "float32", weights)
    exact, same_precision = (run_steps(steps(problem, dtype)) for dtype in ("float64", "float32"))
    trace: dict[str, Any] = {name: x for name, x in problem.inputs.items() if name != "cotangent"}
    trace |= _of_steps(problem) if case.is_cached else {"positions": case.positions()}
    for name, expected in exact.items():
        if name == "output" or name.endswith(".module.output"):
            allowed = budget(expected, same_precision[name], "float32")
            trace |= {name: expected, f"allowed.{name}": np.array(allowed["max"])}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **trace)
    return file.getvalue()


def _of_steps(problem: Problem) -> dict[str, np.ndarray]:
    case, found = problem.case, {}
    for step in range(len(case.chunks)):
        found[f"step{step}"] = problem.step_input(step)
        found[f"new_lengths{step}"] = np.array(case.added(step))
        found[f"positions{step}"] = case.positions(step)
    return found
