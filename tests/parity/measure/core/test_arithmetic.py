"""Tenstorrent's arithmetic, emulated in torch: losses of the card itself pass, and larger ones are
reported.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import DATA
from helpers.diagnoses import named_bugs
from helpers.input_errors import rejects
from helpers.samples import sample
from torch.utils._python_dispatch import TorchDispatchMode

import mha_torch
from parity import CASES, diagnose, make_problem
from parity.measure.backends.record import record
from parity.measure.core import reference
from parity.measure.core.cases import QUICK
from parity.measure.core.compare import budget, first_difference, floor
from parity.measure.core.reference import Arithmetic
from parity.measure.core.stages import run_steps
from parity.measure.core.trace import Reference, compare_trace
from parity.measure.core.weights import dtype_named

ATEN = torch.ops.aten
FUSED = ATEN._scaled_dot_product_flash_attention_for_cpu.default


def cut(x, bits):
    """Return x cut off to a number of significant bits."""
    return (
        (x.float().contiguous().view(torch.int32) & -(1 << (24 - bits)))
        .view(torch.float32)
        .to(x.dtype)
    )


class Card(TorchDispatchMode):
    """Cuts off the operands of every matrix product and softmax: to the 11 bits of TF32, or fewer
    at a low fidelity.
    """

    def __init__(self, bits_in0=11, bits_in1=11):
        super().__init__()
        self.bits = (bits_in0, bits_in1)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        # Positions of the first and the second operand.
        indices_by_function = {
            ATEN.mm.default: (0, 1),
            ATEN.bmm.default: (0, 1),
            ATEN.addmm.default: (1, 2),
            FUSED: (0, 1),
        }
        args = list(args)
        for index, bits in zip(indices_by_function.get(function, ()), self.bits, strict=False):
            args[index] = cut(args[index], bits)
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
    return first_difference(compare_trace(replace(trace, environment=where), expected))


NAMES = [name for name, case in CASES.items() if case.dtype is None]


# Each case in one of the dtypes; trained layers, whose values have very different sizes, in both.
@sample(16, where=lambda case: case in QUICK and "trained" not in case)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (name, dtype)
        for index, name in enumerate(NAMES)
        for turn, dtype in enumerate(("float32", "bfloat16"))
        if "trained" in name or index % 2 == turn
    ],
)
def test_card_arithmetic_passes(case, dtype):
    """Operands cut off to TF32 pass with the card's arithmetic."""
    difference = difference_on(Card(), case, dtype)
    assert difference is None, str(difference)


@pytest.mark.parametrize("case", ["textbook", "wide", "trained-rxnmapper-self"])
def test_card_arithmetic_fails_as_ieee(case):
    """Operands cut off to TF32 fail at q with IEEE arithmetic."""
    difference = difference_on(Card(), case, "float32", arithmetic="ieee")
    assert difference is not None
    assert difference.stage == "q"


@sample(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["textbook", "wide", "trained-rxnmapper-self"])
def test_lofi_fails_at_first_product(case, dtype):
    """LoFi (7 and 5 significant bits) fails at q, despite a correlation of more than 0.999."""
    difference = difference_on(Card(7, 5), case, dtype)
    assert difference is not None
    assert difference.stage == "q"
    assert difference.pcc > 0.999


@sample(case=["textbook"])
@pytest.mark.parametrize("case", ["textbook", "wide", "trained-rxnmapper-self"])
def test_hifi2_fails_in_float32(case):
    """HiFi2, with 7 of TF32's 11 bits in the first operand, fails at q in float32."""
    difference = difference_on(Card(bits_in0=7), case, "float32")
    assert difference is not None
    assert difference.stage == "q"


@sample(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["textbook", "wide", "trained-rxnmapper-self"])
def test_scores_3_percent_off_fail_on_card(monkeypatch, case, dtype):
    """Scores 3% too large fail at the scores, even with the card's arithmetic."""
    original = mha_torch.attention_scores
    for holder in (mha_torch, mha_torch.stages):
        monkeypatch.setattr(
            holder, "attention_scores", lambda *arguments: original(*arguments) * 1.03
        )
    difference = difference_on(Card(), case, dtype)
    assert difference is not None
    assert difference.stage == "scores"


def test_float32_is_cut_off_to_tf32():
    """float32 operands are cut off to TF32, not rounded; tiny and infinite values stay."""
    tensix = Arithmetic(np.dtype(np.float32), "tensix")
    values = np.array(
        [1 + 2**-10, 1 + 2**-11, -(1 + 2**-10 - 2**-23), 2.0**-130, np.inf], np.float32
    )
    np.testing.assert_array_equal(
        tensix.enter(values), np.float32([1 + 2**-10, 1.0, -1.0, 2.0**-130, np.inf])
    )


@pytest.mark.parametrize(
    ("dtype", "measured"),
    [("float32", [1.19e-3, 1.15e-3]), ("bfloat16", [3.1e-4, 3.1e-4])],
    ids=["float32", "bfloat16"],
)
def test_product_loss_matches_kernels(dtype, measured):
    """Products lose as much as real HiFi4 kernels, within 25%.

    Relative L2 of 64 and 512 terms in ttsim, float32 sums, Blackhole.
    """
    rng, arithmetic = np.random.default_rng(0), Arithmetic(dtype_named(dtype), "tensix")
    for num_terms, expected in zip((64, 512), measured, strict=True):
        a, b = (
            arithmetic.widen(rng.standard_normal(shape))
            for shape in ((64, num_terms), (num_terms, 64))
        )
        exact = a.astype(np.float64) @ b.astype(np.float64)
        error = np.linalg.norm(arithmetic.matmul(a, b) - exact) / np.linalg.norm(exact)
        # A quarter, since it is not known exactly which term is cut off where.
        assert error == pytest.approx(expected, rel=0.25)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrower_operands_are_exact(dtype):
    """bfloat16 and float16 operands are unchanged by the card's arithmetic."""
    problem = make_problem(CASES["wide"], dtype)
    query = Arithmetic(problem.inputs["query"].dtype).widen(problem.inputs["query"])
    np.testing.assert_array_equal(Arithmetic(query.dtype, "tensix").enter(query), query)


def test_card_masks_and_lengths_are_exact():
    """The card's arithmetic changes q, but no mask and no length of the cache."""
    problem = make_problem(CASES["ragged"], "float32")
    exact, card = (
        run_steps(reference.steps(problem, "float32", kind)) for kind in ("ieee", "tensix")
    )
    assert not np.array_equal(exact["step0.q"], card["step0.q"])
    for stage in ("step3.mask", "step3.cache.lengths", "step3.module.cache.lengths"):
        np.testing.assert_array_equal(exact[stage], card[stage])


def test_card_budget_of_exact_reference(rng):
    """With an exact reference, the card may lose 2^-9 of the largest value in float32."""
    expected = rng.standard_normal((2, 3, 4, 5))
    allowed = budget(expected, expected, "float32", arithmetic="tensix")
    assert allowed["max"] == pytest.approx(2**-9 * np.abs(expected).max())
    assert floor("bfloat16", "tensix") == 2**-8


def test_unknown_arithmetic_raises():
    """An unknown arithmetic raises an error with its name."""
    with rejects("arithmetic", arithmetic="abacus"):
        reference.steps(make_problem(CASES["textbook"], "float32"), "float32", "abacus")


@pytest.mark.parametrize("kind", reference.UNFUSED)
def test_unfused_rounding_is_for_16_bits(kind):
    """Unfused operations change bfloat16 but not float32; only `unfused-scores` rounds scores."""
    case = CASES["rope-gqa"]
    plain, rounded = (
        run_steps(reference.steps(make_problem(case, "float32"), "float32", k))
        for k in ("ieee", kind)
    )
    for stage, values in plain.items():
        np.testing.assert_array_equal(values, rounded[stage])
    plain, rounded = (
        run_steps(reference.steps(make_problem(case, "bfloat16"), "bfloat16", k))
        for k in ("ieee", kind)
    )
    assert not np.array_equal(plain["q"], rounded["q"])
    is_narrow = np.array_equal(
        rounded["scores"], rounded["scores"].astype(rounded["q"].dtype).astype(np.float32)
    )
    assert is_narrow == (kind == "unfused-scores")


# ---- Settings that lose more ---------------------------------------------------------------------

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
def test_setting_loss_matches_kernels(kind, dtype):
    """With each setting, products lose as much as real kernels in ttsim, within 10%."""
    rng, arithmetic = np.random.default_rng(0), Arithmetic(dtype_named(dtype), kind)
    for num_terms, expected in zip((64, 512), PRODUCTS[kind, dtype], strict=True):
        x, weight = (arithmetic.widen(rng.standard_normal((64, num_terms))) for _ in range(2))
        exact = x.astype(np.float64) @ weight.T.astype(np.float64)
        error = np.linalg.norm(
            arithmetic.matmul(x, arithmetic.weight(weight).T) - exact
        ) / np.linalg.norm(exact)
        assert error == pytest.approx(expected, rel=0.1)


@sample(case=["textbook"])
@pytest.mark.parametrize("case", ["textbook", "wide", "trained-rxnmapper-self"])
def test_hifi2_arithmetic_rejects_lofi(case):
    """With HiFi2's arithmetic, HiFi2 passes and LoFi fails."""
    assert difference_on(Card(7, 10), case, "float32", "tensix-hifi2") is None
    assert difference_on(Card(7, 5), case, "float32", "tensix-hifi2") is not None


def test_block_shares_an_exponent():
    """bfloat8_b rounds each block of 16 values to the exponent of its largest one."""
    arithmetic = Arithmetic(dtype_named("bfloat16"), "tensix-bfloat8_b")
    x = np.array(
        [[64.0, 1.0, 0.5, 0.25, -3.6] + [0.0] * 11 + [1.0, 1 + 2**-6, 1 + 2**-7]], np.float32
    )
    expected = np.array(
        [[64.0, 1.0, 0.0, 0.0, -4.0] + [0.0] * 11 + [1.0, 1 + 2**-6, 1.0]], np.float32
    )
    np.testing.assert_array_equal(
        arithmetic.cached(x.astype(dtype_named("bfloat16"))).astype(np.float32), expected
    )
    np.testing.assert_array_equal(arithmetic.weight(x.T), expected.T)


def test_empty_call_is_cached_in_blocks():
    """A call of a cache that adds no token stores no block of bfloat8_b."""
    arithmetic = Arithmetic(dtype_named("bfloat16"), "tensix-bfloat8_b")
    no_tokens = np.zeros((2, 0, 24), dtype_named("bfloat16"))
    assert arithmetic.cached(no_tokens).shape == (2, 0, 24)


def test_lofi_is_not_an_arithmetic():
    """LoFi is not one of the arithmetics that a trace is compared with."""
    assert "tensix-lofi" not in reference.ARITHMETICS


# ---- Named losses --------------------------------------------------------------------------------


def stages_on(card, problem):
    with card:
        return record("torch", Reference(problem)).accumulated


@sample(2, case=["gqa"])
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
def test_math_fidelity_is_named(case, card, dtype, name):
    """LoFi and HiFi2 are named from all stages with the card's arithmetic."""
    problem = make_problem(CASES[case], dtype)
    diagnosis = diagnose(stages_on(card, problem), problem, arithmetic="tensix")
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("precision", [name])


RECORDED = dict(np.load(DATA / "fidelities.npz"))
"""Outputs of mha_tt at each math fidelity, by the real kernels in a simulator (ttsim 1.10.0,
Blackhole): bfloat16.
"""


@sample(6)
@pytest.mark.parametrize("path", ["plain", "fused"])
@pytest.mark.parametrize(
    ("fidelity", "names"), [("HiFi4", []), ("HiFi2", []), ("LoFi", ["precision-lofi"])]
)
@pytest.mark.parametrize("case", ["full", "gqa-causal"])
def test_fidelity_is_named_from_kernels(case, fidelity, names, path):
    """From recorded outputs of real kernels, LoFi is named, and HiFi4 and HiFi2 are right."""
    output = RECORDED[f"{case}/{fidelity}/{path}"].view(dtype_named("bfloat16"))
    diagnosis = diagnose(
        {"output": output}, make_problem(CASES[case], "bfloat16"), arithmetic="tensix"
    )
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("precision" if names else "none", names)


def test_shuffled_lofi_error_is_unknown(rng):
    """The errors of LoFi at shuffled positions are unknown: no fidelity is named."""
    problem = make_problem(CASES["full"], "bfloat16")
    right = np.asarray(Reference(problem).accumulated["output"], np.float64)
    lofi = RECORDED["full/LoFi/plain"].view(dtype_named("bfloat16")).astype(np.float64)
    error = rng.permuted(lofi - right)  # as large, but elsewhere
    diagnosis = diagnose(
        {"output": (right + error).astype(lofi.dtype)}, problem, arithmetic="tensix"
    )
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("unknown", [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_card_arithmetic_is_not_a_bug(dtype):
    """Operands cut off to TF32 are not a bug with the card's arithmetic."""
    problem = make_problem(CASES["causal"], dtype)
    assert diagnose(stages_on(Card(), problem), problem, arithmetic="tensix").kind == "none"


def approximated(x):
    """Return the exponential as many vector units approximate it: float32 bits that are a multiple
    of x, cut off.
    """
    bits = np.maximum(x.astype(np.float64) / np.log(2.0) + 127.0 - 0.043, 0.0) * 2.0**23
    return bits.astype(np.int32).view(np.float32)


@pytest.mark.parametrize("case", ["causal", "gqa"])
def test_approximated_exponentials_are_named(case):
    """Attention weights of approximated exponentials are named as lost precision."""
    problem = make_problem(CASES[case], "bfloat16")
    stages = dict(Reference(problem).same_precision(local=False, arithmetic="tensix"))
    scores = np.where(stages["mask"], -np.inf, stages["scores"].astype(np.float32))
    lines = approximated(scores - scores.max(axis=-1, keepdims=True))
    lines[np.broadcast_to(stages["mask"], lines.shape)] = 0.0
    weights = lines / lines.sum(axis=-1, keepdims=True)
    observed = {name: stages[name] for name in ("mask", "q", "k", "v", "scores")}
    observed["attn_weights"] = weights.astype(stages["attn_weights"].dtype)
    diagnosis = diagnose(observed, problem, arithmetic="tensix")
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("precision", ["exponentials-approximated"])


@sample(3)
@pytest.mark.parametrize("only", [False, True], ids=["stages", "output"])
@pytest.mark.parametrize("case", ["large-logits", "causal", "gqa-causal"])
def test_rows_lost_by_kernel_are_named(case, only):
    """Rows of the context that are 0 are lost values, from all stages or the output."""
    problem = make_problem(CASES[case], "bfloat16")
    stages = Reference(problem).same_precision(local=False, arithmetic="tensix")
    context = stages["context"].astype(np.float32)
    lost = np.random.default_rng(0).random(context.shape[:3]) < 0.25
    context[lost] = 0.0
    merged = context.swapaxes(1, 2).reshape(*stages["output"].shape[:2], -1)
    weight, bias = (
        problem.weights[f"out_proj.{name}"].astype(np.float32) for name in ("weight", "bias")
    )
    observed = {"output": (merged @ weight.T + bias).astype(stages["output"].dtype)}
    if not only:
        observed |= {name: stages[name] for name in ("mask", "q", "k", "v")}
        observed["context"] = context.astype(stages["context"].dtype)
    diagnosis = diagnose(observed, problem, arithmetic="tensix")
    assert (diagnosis.kind, named_bugs(diagnosis)) == ("structure", ["lost-values"])
    pattern = diagnosis.findings[0].description.patterns[0]
    if only:
        assert pattern.about.startswith(
            f"the context of {lost.sum()} of {lost.size} rows of heads is 0 there"
        )
    else:
        assert pattern.about == "all values there are 0"


def test_scaled_output_is_not_lost_rows():
    """An output times 0.4 is not reported as rows that a kernel lost."""
    problem = make_problem(CASES["causal"], "bfloat16")
    output = Reference(problem).accumulated["output"] * 0.4
    text = str(
        diagnose({"output": output.astype(dtype_named("bfloat16"))}, problem, arithmetic="tensix")
    )
    assert "a kernel lost rows" not in text
