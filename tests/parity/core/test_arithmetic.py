"""Tenstorrent's arithmetic, emulated on torch: what the card may do passes, and what it should not do is reported."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import DATA
from helpers.diagnoses import named_bugs
from helpers.refusals import refuses
from helpers.samples import sample
from torch.utils._python_dispatch import TorchDispatchMode

import mha_torch
from parity import CASES, diagnose, first_difference, make_problem
from parity.backends.record import record
from parity.core import reference
from parity.core.cases import QUICK
from parity.core.compare import budget, floor
from parity.core.reference import Arithmetic
from parity.core.stages import run_steps
from parity.core.trace import Reference, judge
from parity.core.weights import dtype_named

ATEN = torch.ops.aten
FUSED = ATEN._scaled_dot_product_flash_attention_for_cpu.default


def cut(x, bits):
    """x with so many significant bits, the rest cut off."""
    return (x.float().contiguous().view(torch.int32) & -(1 << (24 - bits))).view(torch.float32).to(x.dtype)


class Card(TorchDispatchMode):
    """Cuts off the operands of every matrix product and softmax: to the 11 bits of TF32, or more at a low fidelity."""

    def __init__(self, bits_in0=11, bits_in1=11):
        super().__init__()
        self.bits = (bits_in0, bits_in1)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # Where the first and the second operand are.
        places = {ATEN.mm.default: (0, 1), ATEN.bmm.default: (0, 1), ATEN.addmm.default: (1, 2), FUSED: (0, 1)}
        args = list(args)
        for place, bits in zip(places.get(function, ()), self.bits, strict=False):
            args[place] = cut(args[place], bits)
        if function is FUSED:
            args[2] = cut(args[2], self.bits[1])
        if function is ATEN._softmax.default:
            args[0] = cut(args[0], 11)
        return function(*args, **(kwargs or {}))


def difference_on(card, case, dtype, arithmetic="tensix"):
    expected = Reference(make_problem(CASES[case], dtype))
    with card:
        trace = record("torch", expected)
    where = {"backends": {"torch": {"numerics": {"arithmetic": arithmetic}}}}
    return first_difference(judge(replace(trace, environment=where), expected))


NAMES = [name for name, case in CASES.items() if case.dtype is None]


# Each case in one of the dtypes; layers that were trained, whose numbers are of very different sizes, in both.
@sample(where=lambda case: case in QUICK and "trained" not in case)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (name, dtype)
        for place, name in enumerate(NAMES)
        for turn, dtype in enumerate(("float32", "bfloat16"))
        if "trained" in name or place % 2 == turn
    ],
)
def test_what_the_card_does_passes(case, dtype):
    difference = difference_on(Card(), case, dtype)
    assert difference is None, str(difference)


@pytest.mark.parametrize("case", ["textbook", "wide", "trained-rxnmapper-self"])
def test_the_same_is_a_failure_by_ieee_arithmetic(case):
    difference = difference_on(Card(), case, "float32", arithmetic="ieee")
    assert difference is not None
    assert difference.stage == "q"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["textbook", "wide", "trained-rxnmapper-self"])
def test_a_low_fidelity_is_reported_at_the_first_product(case, dtype):
    """LoFi: 7 significant bits of the first operand, 5 of the second. Its correlation would pass it."""
    difference = difference_on(Card(7, 5), case, dtype)
    assert difference is not None
    assert difference.stage == "q"
    assert difference.pcc > 0.999


@pytest.mark.parametrize("case", ["textbook", "wide", "trained-rxnmapper-self"])
def test_a_middling_fidelity_is_reported_in_float32(case):
    """HiFi2: 7 bits of the first operand, of the 11 that TF32 has."""
    difference = difference_on(Card(bits_in0=7), case, "float32")
    assert difference is not None
    assert difference.stage == "q"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["textbook", "wide", "trained-rxnmapper-self"])
def test_scores_3_percent_too_large_are_reported_on_a_card(monkeypatch, case, dtype):
    original = mha_torch.attention_scores
    for holder in (mha_torch, mha_torch.stages):
        monkeypatch.setattr(holder, "attention_scores", lambda *arguments: original(*arguments) * 1.03)
    difference = difference_on(Card(), case, dtype)
    assert difference is not None
    assert difference.stage == "scores"


def test_float32_enters_as_tf32_cut_off_and_not_rounded():
    tensix = Arithmetic(np.dtype(np.float32), "tensix")
    values = np.array([1 + 2**-10, 1 + 2**-11, -(1 + 2**-10 - 2**-23), 2.0**-130, np.inf], np.float32)
    np.testing.assert_array_equal(tensix.enter(values), np.float32([1 + 2**-10, 1.0, -1.0, 2.0**-130, np.inf]))


@pytest.mark.parametrize(
    ("dtype", "measured"),
    [("float32", [1.19e-3, 1.15e-3]), ("bfloat16", [3.1e-4, 3.1e-4])],
    ids=["float32", "bfloat16"],
)
def test_products_lose_what_those_of_the_real_kernels_do(dtype, measured):
    """Relative L2 of products of 64 and 512 terms, in ttsim: HiFi4, float32 sums, Blackhole."""
    rng, arithmetic = np.random.default_rng(0), Arithmetic(dtype_named(dtype), "tensix")
    for num_terms, expected in zip((64, 512), measured, strict=True):
        a, b = (arithmetic.widen(rng.standard_normal(shape)) for shape in ((64, num_terms), (num_terms, 64)))
        exact = a.astype(np.float64) @ b.astype(np.float64)
        error = np.linalg.norm(arithmetic.matmul(a, b) - exact) / np.linalg.norm(exact)
        assert error == pytest.approx(expected, rel=0.25)  # a quarter: of which term is cut where, less is known


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrower_operands_are_exact(dtype):
    problem = make_problem(CASES["wide"], dtype)
    query = Arithmetic(problem.inputs["query"].dtype).widen(problem.inputs["query"])
    np.testing.assert_array_equal(Arithmetic(query.dtype, "tensix").enter(query), query)


def test_masks_and_lengths_are_exact_on_a_card():
    problem = make_problem(CASES["ragged"], "float32")
    exact, card = (run_steps(reference.steps(problem, "float32", kind)) for kind in ("ieee", "tensix"))
    assert not np.array_equal(exact["step0.q"], card["step0.q"])
    for stage in ("step3.mask", "step3.cache.lengths", "step3.module.cache.lengths"):
        np.testing.assert_array_equal(exact[stage], card[stage])


def test_an_exact_reference_leaves_a_card_what_one_value_loses(rng):
    expected = rng.standard_normal((2, 3, 4, 5))
    allowed = budget(expected, expected, "float32", arithmetic="tensix")
    assert allowed["max"] == pytest.approx(2**-9 * np.abs(expected).max())
    assert floor("bfloat16", "tensix") == 2**-8


def test_an_unknown_arithmetic_is_refused():
    with refuses("arithmetic", arithmetic="abacus"):
        reference.steps(make_problem(CASES["textbook"], "float32"), "float32", "abacus")


@pytest.mark.parametrize("kind", reference.UNFUSED)
def test_operations_that_round_change_narrow_dtypes_alone(kind):
    case = CASES["rope-gqa"]
    plain, rounded = (run_steps(reference.steps(make_problem(case, "float32"), "float32", k)) for k in ("ieee", kind))
    for stage, values in plain.items():
        np.testing.assert_array_equal(values, rounded[stage])
    plain, rounded = (run_steps(reference.steps(make_problem(case, "bfloat16"), "bfloat16", k)) for k in ("ieee", kind))
    assert not np.array_equal(plain["q"], rounded["q"])
    is_narrow = np.array_equal(rounded["scores"], rounded["scores"].astype(rounded["q"].dtype).astype(np.float32))
    assert is_narrow == (kind == "unfused-scores")


# ---- Settings that lose more -----------------------------------------------------------------------------------------

PRODUCTS = {
    # (kind, dtype): relative L2 of products of 64 and 512 terms in ttsim, float32 sums, Blackhole
    ("tensix-hifi2", "bfloat16"): (4.1e-3, 4.0e-3),
    ("tensix-hifi2", "float32"): (7.2e-3, 7.2e-3),
    ("tensix-lofi", "bfloat16"): (2.7e-2, 2.7e-2),
    ("tensix-lofi", "float32"): (3.1e-2, 3.1e-2),
    ("tensix-bfloat8_b", "bfloat16"): (7.7e-3, 7.6e-3),
    ("tensix-hifi2-bfloat8_b", "bfloat16"): (8.6e-3, 8.7e-3),
}


@pytest.mark.parametrize(("kind", "dtype"), PRODUCTS, ids="-".join)
def test_settings_lose_what_the_real_kernels_lose_with_them(kind, dtype):
    rng, arithmetic = np.random.default_rng(0), Arithmetic(dtype_named(dtype), kind)
    for num_terms, expected in zip((64, 512), PRODUCTS[kind, dtype], strict=True):
        x, weight = (arithmetic.widen(rng.standard_normal((64, num_terms))) for _ in range(2))
        exact = x.astype(np.float64) @ weight.T.astype(np.float64)
        error = np.linalg.norm(arithmetic.matmul(x, arithmetic.weight(weight).T) - exact) / np.linalg.norm(exact)
        assert error == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("case", ["textbook", "wide", "trained-rxnmapper-self"])
def test_a_middling_fidelity_passes_by_its_own_arithmetic_and_a_low_one_does_not(case):
    assert difference_on(Card(7, 10), case, "float32", "tensix-hifi2") is None
    assert difference_on(Card(7, 5), case, "float32", "tensix-hifi2") is not None


def test_neighbours_share_an_exponent():
    arithmetic = Arithmetic(dtype_named("bfloat16"), "tensix-bfloat8_b")
    x = np.array([[64.0, 1.0, 0.5, 0.25, -3.6] + [0.0] * 11 + [1.0, 1 + 2**-6, 1 + 2**-7]], np.float32)
    expected = np.array([[64.0, 1.0, 0.0, 0.0, -4.0] + [0.0] * 11 + [1.0, 1 + 2**-6, 1.0]], np.float32)
    np.testing.assert_array_equal(arithmetic.cached(x.astype(dtype_named("bfloat16"))).astype(np.float32), expected)
    np.testing.assert_array_equal(arithmetic.weight(x.T), expected.T)


def test_no_trace_is_judged_by_a_low_fidelity():
    assert "tensix-lofi" not in reference.ARITHMETICS


# ---- What is named ---------------------------------------------------------------------------------------------------


def stages_on(card, problem):
    with card:
        return record("torch", Reference(problem)).accumulated


@sample(case=["gqa"])
@pytest.mark.parametrize(
    ("card", "dtype", "name"),
    [
        (Card(7, 5), "float32", "precision-lofi"),
        (Card(7, 5), "bfloat16", "precision-lofi"),
        (Card(7, 10), "float32", "precision-hifi2"),
    ],
    ids=["lofi-float32", "lofi-bfloat16", "hifi2-float32"],
)
@pytest.mark.parametrize("case", ["causal", "gqa"])
def test_a_fidelity_is_named(case, card, dtype, name):
    problem = make_problem(CASES[case], dtype)
    diagnosis = diagnose(stages_on(card, problem), problem, arithmetic="tensix")
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("precision", [name])


RECORDED = dict(np.load(DATA / "fidelities.npz"))
"""Outputs of mha_tt at each math fidelity, by the real kernels in a simulator (ttsim 1.10.0, Blackhole): bfloat16."""


@pytest.mark.parametrize("path", ["plain", "fused"])
@pytest.mark.parametrize(("fidelity", "names"), [("HiFi4", []), ("HiFi2", []), ("LoFi", ["precision-lofi"])])
@pytest.mark.parametrize("case", ["full", "gqa-causal"])
def test_a_fidelity_is_named_from_the_output_of_real_kernels_alone(case, fidelity, names, path):
    output = RECORDED[f"{case}/{fidelity}/{path}"].view(dtype_named("bfloat16"))
    diagnosis = diagnose({"output": output}, make_problem(CASES[case], "bfloat16"), arithmetic="tensix")
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("precision" if names else "none", names)


def test_a_fidelity_is_not_named_where_the_error_is_another(rng):
    problem = make_problem(CASES["full"], "bfloat16")
    right = np.asarray(Reference(problem).accumulated["output"], np.float64)
    lofi = RECORDED["full/LoFi/plain"].view(dtype_named("bfloat16")).astype(np.float64)
    error = rng.permuted(lofi - right)  # as large, and elsewhere
    diagnosis = diagnose({"output": (right + error).astype(lofi.dtype)}, problem, arithmetic="tensix")
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("unknown", [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_card_does_is_no_bug(dtype):
    problem = make_problem(CASES["causal"], dtype)
    assert diagnose(stages_on(Card(), problem), problem, arithmetic="tensix").kind == "none"


def approximated(x):
    """The exponential of many vector units: a float32 whose exponent and mantissa are a multiple of x, cut off."""
    bits = np.maximum(x.astype(np.float64) / np.log(2.0) + 127.0 - 0.043, 0.0) * 2.0**23
    return bits.astype(np.int32).view(np.float32)


@pytest.mark.parametrize("case", ["causal", "gqa"])
def test_approximated_exponentials_are_named(case):
    problem = make_problem(CASES[case], "bfloat16")
    stages = dict(Reference(problem).same_precision(local=False, arithmetic="tensix"))
    scores = np.where(stages["mask"], -np.inf, stages["scores"].astype(np.float32))
    lines = approximated(scores - scores.max(axis=-1, keepdims=True))
    lines[np.broadcast_to(stages["mask"], lines.shape)] = 0.0
    weights = lines / lines.sum(axis=-1, keepdims=True)
    given = {name: stages[name] for name in ("mask", "q", "k", "v", "scores")}
    given["attn_weights"] = weights.astype(stages["attn_weights"].dtype)
    diagnosis = diagnose(given, problem, arithmetic="tensix")
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("precision", ["exponentials-approximated"])


@pytest.mark.parametrize("only", [False, True], ids=["stages", "output"])
@pytest.mark.parametrize("case", ["large-logits", "causal", "gqa-causal"])
def test_rows_that_a_kernel_lost_are_told_as_such_and_no_bug_is_named(case, only):
    problem = make_problem(CASES[case], "bfloat16")
    stages = Reference(problem).same_precision(local=False, arithmetic="tensix")
    context = stages["context"].astype(np.float32)
    lost = np.random.default_rng(0).random(context.shape[:3]) < 0.25
    context[lost] = 0.0
    merged = context.swapaxes(1, 2).reshape(*stages["output"].shape[:2], -1)
    weight, bias = (problem.weights[f"out_proj.{name}"].astype(np.float32) for name in ("weight", "bias"))
    given = {"output": (merged @ weight.T + bias).astype(stages["output"].dtype)}
    if not only:
        given |= {name: stages[name] for name in ("mask", "q", "k", "v")}
        given["context"] = context.astype(stages["context"].dtype)
    diagnosis = diagnose(given, problem, arithmetic="tensix")
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("law", [])
    assert diagnosis.unknowns[0].findings is not None
    law = diagnosis.unknowns[0].findings.found[0]
    if only:
        assert law.words.startswith(f"the context of {lost.sum()} of {lost.size} rows of heads is 0 there")
    else:
        assert law.words == "all values there are 0"


def test_heads_that_are_halved_are_no_lost_rows():
    problem = make_problem(CASES["causal"], "bfloat16")
    output = Reference(problem).accumulated["output"] * 0.4
    told = str(diagnose({"output": output.astype(dtype_named("bfloat16"))}, problem, arithmetic="tensix"))
    assert "a kernel lost rows" not in told
