"""Patterns of parts of a layer: wrong weights, inputs, masks, heads and positions; random errors
have none.
"""

import json
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from helpers.samples import sample

import parity.explain.diagnosis.trial
from mha_spec import Alibi, AttentionSpec, Norm, Rope
from parity import Case, make_problem
from parity.explain.diagnosis.bugs import edited_layer
from parity.explain.diagnosis.changed_layer import ChangedLayer
from parity.explain.diagnosis.fits.blocks import blocks
from parity.explain.diagnosis.fits.cache_parts import cache_parts
from parity.explain.diagnosis.fits.distance_parts import alibi_parts
from parity.explain.diagnosis.fits.norm_parts import norm_parts
from parity.explain.diagnosis.fits.rope_parts import rope_parts
from parity.explain.diagnosis.trial import Trial
from parity.measure.core.reference import Arithmetic, Layer
from parity.measure.core.stages import run_steps
from parity.measure.core.weights import dtype_named

PLAIN = Case("parts", AttentionSpec(24, 3), "", batch=2, seq_len=6, key_padding_lengths=(6, 4))
WITH_BIAS = replace(PLAIN, bias=True)
CROSS = Case("parts-cross", AttentionSpec(24, 3), "", batch=2, seq_len=6, seq_len_k=6)
SQUARE = Case("parts-square", AttentionSpec(24, 4), "", batch=2, seq_len=6)
GROUPED = Case(
    "parts-grouped",
    AttentionSpec(48, 6, num_kv_heads=3, rope=Rope()),
    "",
    batch=2,
    seq_len=9,
    is_causal=True,
)
NORMED = replace(GROUPED, spec=replace(GROUPED.spec, qk_norm=Norm(weight="1+w"), sinks=True))
CAPPED = replace(GROUPED, spec=replace(GROUPED.spec, soft_cap=1.0))


def run(problem, change=lambda layer: None):
    """Return every stage of a float32 layer with a change."""
    layer = ChangedLayer(problem, Arithmetic(dtype_named("float32")))
    change(layer)
    return run_steps(layer.steps())


def abouts_of(problem, observed, stage):
    """Return the patterns of a stage, based on the observed stages before it."""
    findings = Trial(problem, observed, "ieee").describe(stage, ())
    assert findings is not None
    json.dumps(findings.to_dict(), allow_nan=False)
    return findings.abouts


def with_weights(case, change):
    """Return a problem, and the same problem with changed weights."""
    problem = make_problem(case, "float32")
    weights = {name: np.array(w) for name, w in problem.weights.items()}
    weights |= change(weights)
    return problem, replace(problem, weights=weights)


def overriding(**methods):
    """Return a change that overrides methods of a layer: each argument maps the original to the new
    one.
    """
    return lambda layer: layer.override(
        **{name: made(getattr(layer, name)) for name, made in methods.items()}
    )


# ---- Weights -------------------------------------------------------------------------------------


def rows_inside(w):
    return w.reshape(3, 8, *w.shape[1:]).swapaxes(0, 1).reshape(w.shape)


WEIGHTS = {
    "another's": (
        PLAIN,
        lambda w: {"q_proj.weight": w["k_proj.weight"]},
        "q",
        "k_proj.weight is used instead of q_proj.weight",
    ),
    "another projection": (
        PLAIN,
        lambda w: {"v_proj.weight": w["k_proj.weight"], "v_proj.bias": w["k_proj.bias"]},
        "output",
        "k_proj is used instead of v_proj",
    ),
    "another bias": (
        PLAIN,
        lambda w: {"q_proj.bias": w["k_proj.bias"]},
        "q",
        "k_proj.bias is used instead of q_proj.bias",
    ),
    "exchanged": (
        PLAIN,
        lambda w: {"q_proj.bias": w["v_proj.bias"], "v_proj.bias": w["q_proj.bias"]},
        "output",
        "q_proj.bias and v_proj.bias are exchanged",
    ),
    "all transposed": (
        PLAIN,
        lambda w: {f"{name}_proj.weight": w[f"{name}_proj.weight"].T for name in "qkv"},
        "output",
        "q_proj.weight, k_proj.weight and v_proj.weight are transposed",
    ),
    "heads inside": (
        PLAIN,
        lambda w: {"v_proj.weight": rows_inside(w["v_proj.weight"])},
        "v",
        "v_proj.weight is read with rows (H, N) instead of (N, H)",
    ),
    "heads exchanged": (
        GROUPED,
        lambda w: (
            {
                "q_proj.weight": w["q_proj.weight"]
                .reshape(6, 8, 48)[[0, 4, 2, 3, 1, 5]]
                .reshape(48, 48)
            }
            | {"q_proj.bias": w["q_proj.bias"].reshape(6, 8)[[0, 4, 2, 3, 1, 5]].reshape(48)}
        ),
        "output",
        "heads 1 and 4 of q_proj are exchanged",
    ),
    "columns by heads": (
        GROUPED,
        lambda w: {
            "out_proj.weight": w["out_proj.weight"]
            .reshape(48, 6, 8)[:, [2, 0, 1, 5, 4, 3]]
            .reshape(48, 48)
        },
        "output",
        "the columns of out_proj are permuted by heads: they are in the order 2 0 1 5 4 3",
    ),
    "rows by heads": (
        replace(PLAIN, spec=AttentionSpec(24, 4)),
        lambda w: {
            "out_proj.weight": w["out_proj.weight"].reshape(4, 6, 24)[[3, 0, 1, 2]].reshape(24, 24)
        },
        "output",
        "the rows of out_proj are permuted by heads: they are in the order 3 0 1 2",
    ),
    "rows and biases by heads": (
        replace(PLAIN, spec=AttentionSpec(24, 4)),
        lambda w: {
            "out_proj.weight": w["out_proj.weight"].reshape(4, 6, 24)[[1, 3, 0, 2]].reshape(24, 24),
            "out_proj.bias": w["out_proj.bias"].reshape(4, 6)[[1, 3, 0, 2]].reshape(24),
        },
        "output",
        "the rows of out_proj are permuted by heads: they are in the order 1 3 0 2",
    ),
    "a multiple": (
        PLAIN,
        lambda w: {"out_proj.weight": np.float32(1.01) * w["out_proj.weight"]},
        "output",
        "out_proj.weight is multiplied by 1.01",
    ),
    "subtracted": (
        replace(GROUPED, spec=replace(GROUPED.spec, out_bias=True)),
        lambda w: {"out_proj.bias": -w["out_proj.bias"]},
        "output",
        "out_proj.bias is multiplied by -1",
    ),
    "a new layer's": (
        NORMED,
        lambda w: {"q_norm.weight": np.zeros_like(w["q_norm.weight"])},
        "q",
        "q_norm.weight is multiplied by 0",
    ),
    "1": (
        replace(NORMED, spec=replace(NORMED.spec, qk_norm=Norm())),
        lambda w: {"k_norm.weight": np.ones_like(w["k_norm.weight"])},
        "output",
        "k_norm.weight is 1 throughout",
    ),
    "sinks": (
        NORMED,
        lambda w: {"sinks": np.exp(w["sinks"])},
        "output",
        "sinks is its exponential",
    ),
}


@sample(6)
@pytest.mark.parametrize(("case", "change", "stage", "words"), WEIGHTS.values(), ids=[*WEIGHTS])
def test_changed_weight_has_a_pattern(case, change, stage, words):
    """Each change of the weights has a pattern with its words, from one wrong stage."""
    right, wrong = with_weights(case, change)
    assert words in abouts_of(right, {stage: run(wrong)[stage]}, stage)


# ---- Inputs, masks, products ---------------------------------------------------------------------


def test_exchanged_inputs_have_a_pattern():
    """An exchanged query and key have a pattern, and so has v made of the query."""
    problem = make_problem(CROSS, "float32")
    query, key = problem.inputs["query"], problem.inputs["key"]
    wrong = run(replace(problem, inputs={**problem.inputs, "query": key, "key": query}))
    assert abouts_of(problem, {"output": wrong["output"]}, "output") == (
        "the query and the key are exchanged",
    )
    assert "q is made of the key" in abouts_of(problem, wrong, "q")
    of_query = run(replace(problem, inputs={**problem.inputs, "key": query}))
    values = {**run(problem), "v": of_query["v"]}
    values["context"] = np.float32(0) + values["attn_weights"] @ values["v"]
    assert "v is made of the query" in abouts_of(problem, {"context": values["context"]}, "context")


def test_shifted_value_tokens_have_a_pattern():
    """Values made of the token or the sequence before have a pattern at the context."""
    problem = make_problem(SQUARE, "float32")
    for change, words in (
        (lambda x: np.roll(x, 1, axis=1), "the token before"),
        (lambda x: x[::-1], "the sequence before"),
    ):
        wrong = run(
            replace(problem, inputs={**problem.inputs, "query": change(problem.inputs["query"])})
        )
        values = {"attn_weights": run(problem)["attn_weights"], "v": wrong["v"]}
        context = values["attn_weights"] @ values["v"]
        assert f"v is made of {words}" in abouts_of(problem, {"context": context}, "context")


@sample(2)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: -b, "subtracted"),
        (lambda b: b.swapaxes(2, 3), "transposed"),
        (lambda b: np.broadcast_to(b[:, :1], b.shape), "the first head's"),
        (
            lambda b: np.ascontiguousarray(b.swapaxes(0, 1)).reshape(b.shape),
            "read as (B, N) instead of (N, B)",
        ),
    ],
)
def test_changed_score_bias_has_a_pattern(change, words):
    """A negated, transposed, shared or reshaped score bias has a pattern at scores and output."""
    problem = make_problem(WITH_BIAS, "float32")
    wrong = run(replace(problem, inputs={**problem.inputs, "bias": change(problem.inputs["bias"])}))
    assert f"the bias of the scores is {words}" in abouts_of(
        problem, {"output": wrong["output"]}, "output"
    )
    assert f"the bias of the scores is {words}" in abouts_of(problem, wrong, "scores")


def test_mask_of_first_head_has_a_pattern():
    """Using the first head's mask for all heads has a pattern, from the output alone."""
    problem = make_problem(replace(PLAIN, key_padding_lengths=None, random_mask=True), "float32")
    mask = np.broadcast_to(problem.inputs["mask"], (2, 3, 6, 6))
    wrong = run(
        replace(problem, inputs={**problem.inputs, "mask": np.repeat(mask[:, :1], 3, axis=1)})
    )
    assert "the mask is the first head's" in abouts_of(
        problem, {"output": wrong["output"]}, "output"
    )


def test_intersected_masks_have_a_pattern():
    """Hiding only keys that all parts of the mask hide has a pattern, from the output alone."""
    problem = make_problem(replace(PLAIN, is_causal=True), "float32")
    causal, padding = (
        np.triu(np.ones((6, 6), bool), 1),
        np.arange(6) >= np.array([6, 4])[:, None, None, None],
    )
    both = np.broadcast_to(causal & padding, (2, 3, 6, 6))
    wrong = run(problem, overriding(mask=lambda _: lambda values: {"mask": both}))
    (pattern,) = abouts_of(problem, {"output": wrong["output"]}, "output")
    assert pattern.startswith("a key is hidden only if all parts of the mask hide it")


PRODUCTS = {
    "keys as they are": (
        SQUARE,
        "scores",
        {"products": lambda _: lambda values: values["q"] @ values["k"] / np.float32(6.0) ** 0.5},
        "the keys are not transposed in the product",
    ),
    "weights transposed": (
        SQUARE,
        "context",
        {
            "weighed": lambda _: (
                lambda values: {"context": values["attn_weights"].swapaxes(2, 3) @ values["v"]}
            )
        },
        "the attention weights are transposed in their product with the values",
    ),
    "capped twice": (
        CAPPED,
        "scores",
        {"capped": lambda _: lambda x: np.tanh(np.tanh(x))},
        "scores are capped twice",
    ),
    "clipped": (
        CAPPED,
        "scores",
        {"capped": lambda _: lambda x: np.clip(x, -1.0, 1.0)},
        "scores are clipped instead of softly capped",
    ),
    "values of others": (
        GROUPED,
        "context",
        {
            "weighed": lambda _: (
                lambda v: {"context": v["attn_weights"] @ v["v"][:, [1, 1, 2, 2, 0, 0]]}
            )
        },
        "the values used are the next group's",
    ),
    "values of any": (
        GROUPED,
        "context",
        {
            "weighed": lambda _: (
                lambda v: {"context": v["attn_weights"] @ v["v"][:, [1, 0, 2, 2, 0, 1]]}
            )
        },
        "query heads 0 … 5 use the values of key/value heads 1, 0, 2, 2, 0, 1",
    ),
}


@pytest.mark.parametrize(("case", "stage", "methods", "words"), PRODUCTS.values(), ids=[*PRODUCTS])
def test_wrong_product_has_a_pattern(case, stage, methods, words):
    """Each wrong product, cap or choice of value heads has a pattern with its words."""
    problem = make_problem(case, "float32")
    assert words in abouts_of(problem, run(problem, overriding(**methods)), stage)


# ---- Before RoPE ---------------------------------------------------------------------------------


def test_error_before_rope_has_a_pattern():
    """A wrong bias or norm weight before RoPE has a pattern at q or k that says so."""
    problem, wrong = with_weights(
        GROUPED, lambda w: {"q_proj.bias": w["q_proj.bias"] + np.float32(0.5)}
    )
    patterns = abouts_of(problem, run(wrong), "q")
    assert patterns == ("before RoPE: 0.5 is added to all values there",)
    problem, wrong = with_weights(
        NORMED, lambda w: {"k_norm.weight": w["k_norm.weight"] + np.float32(1.0)}
    )
    patterns = abouts_of(problem, run(wrong), "k")
    assert "k_norm.weight is 1 + its value" in patterns
    assert any(
        pattern.startswith("before RoPE: each feature there is multiplied by a different number")
        for pattern in patterns
    )


def test_norm_by_largest_has_a_pattern():
    """A norm that divides by the largest feature is recognized."""

    def by_largest(_):
        return lambda name, x, norm: (
            x / (np.max(np.abs(x), axis=-1, keepdims=True) + np.float32(norm.eps))
        )

    problem = make_problem(NORMED, "float32")
    pattern, *_ = abouts_of(problem, run(problem, overriding(standardised=by_largest)), "q")
    assert pattern == "queries and keys are divided by their largest feature"


def test_norm_over_tokens_has_a_pattern():
    """A norm over tokens is recognized; by a different mean, it has a pattern before RoPE, of a
    number per token and feature.
    """
    problem = make_problem(NORMED, "float32")

    def over_tokens(_):
        return lambda name, x, norm: (
            x / np.sqrt(np.mean(x * x, axis=-2, keepdims=True) + np.float32(norm.eps))
        )

    def centered_over_tokens(_):
        return lambda name, x, norm: over_tokens(_)(
            name, x - np.mean(x, axis=-2, keepdims=True), norm
        )

    def by_sizes_of_tokens(_):
        return lambda name, x, norm: x / np.mean(np.abs(x), axis=2, keepdims=True)

    pattern, *_ = abouts_of(problem, run(problem, overriding(standardised=over_tokens)), "q")
    assert pattern == "queries and keys are normalized over the tokens"
    spec = replace(NORMED.spec, qk_norm=Norm("layer", over="width"))
    of_width = make_problem(replace(NORMED, spec=spec), "float32")
    observed = run(of_width, overriding(standardised=centered_over_tokens))
    pattern, *_ = abouts_of(of_width, observed, "q")
    assert pattern == "queries and keys are normalized over the tokens"
    (pattern,) = abouts_of(problem, run(problem, overriding(standardised=by_sizes_of_tokens)), "q")
    assert pattern.startswith(
        "before RoPE: each token and each feature of a head is multiplied by a number"
    )


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        (
            lambda n, t: (t + 8) % 9,
            "tokens are rotated as at the positions 8, 0, 1, 2, 3, 4, 5, 6, 7",
        ),
        (
            lambda n, t: n + 0 * t,
            "heads are rotated by one position each, instead of tokens: 0, 1, 2, 3, 4, 5",
        ),
        (
            lambda n, t: np.where(n == 2, (2 * t + 1) % 9, t),
            "tokens are rotated by other positions:",
        ),
    ],
)
def test_wrong_positions_have_a_pattern(positions, words):
    """Shifted positions, positions by head and wrong positions of one head have a pattern at q."""
    problem = make_problem(GROUPED, "float32")
    right = replace(problem, case=replace(problem.case, spec=replace(GROUPED.spec, rope=None)))
    layer, q = Layer(problem, Arithmetic(np.dtype(np.float32))), run(right)["q"]
    of_heads = [
        layer.rotate(q[:, n : n + 1], np.asarray(positions(n, np.arange(9)))[None].astype(np.int64))
        for n in range(6)
    ]
    wrong = {**run(problem), "q": np.concatenate(of_heads, axis=1).astype(np.float32)}
    assert any(pattern.startswith(words) for pattern in abouts_of(problem, wrong, "q"))


# ---- Dropout, heads of the output, narrow formats ------------------------------------------------


@pytest.mark.parametrize("stage", ["attn_weights", "context", "output"])
def test_dropout_has_a_pattern(stage):
    """Dropout with p = 0.2 has a pattern at the attention weights, the context and the output."""
    problem = make_problem(PLAIN, "float32")
    keeps = np.random.default_rng(0).random((2, 3, 6, 6)) >= 0.2

    def dropping(original):
        return lambda values: {
            "attn_weights": original(values)["attn_weights"] * keeps / np.float32(0.8)
        }

    wrong = run(problem, overriding(attn_weights=dropping))
    if stage != "attn_weights":  # recorded before dropout
        wrong = {**run(problem), stage: wrong[stage]}
        wrong = {"output": wrong["output"]} if stage == "output" else wrong
    (pattern,) = abouts_of(problem, wrong, stage)
    assert pattern.endswith(
        "are 0, and the others 1.25 times what they should be: dropout is active, with p = 0.2"
    )


def test_unscaled_zeros_are_not_dropout():
    """Zeros without a matching factor of 1 / (1 - p) are not reported as dropout."""
    problem = make_problem(PLAIN, "float32")
    keeps = np.random.default_rng(0).random((2, 3, 6, 6)) >= 0.2
    for factor in (1.0, 4.0):
        wrong = run(problem)
        wrong["attn_weights"] = wrong["attn_weights"] * keeps * np.float32(factor)
        assert not any(
            "dropout is active" in pattern for pattern in abouts_of(problem, wrong, "attn_weights")
        )


def test_mixed_output_heads_have_a_pattern():
    """Mixed heads have a pattern with each combination, from the output alone."""
    problem = make_problem(SQUARE, "float32")

    def mixing(original):
        return lambda x: original(np.stack([x[:, 0] / 2, x.mean(axis=1), x[:, 3], x[:, 2]], axis=1))

    wrong = run(problem, overriding(combine_heads=mixing))
    (pattern,) = abouts_of(problem, {"output": wrong["output"]}, "output")
    assert pattern == (
        "the output uses other heads: head 0 is 0.5 * head 0, head 1 is 0.25 * head 0 + 0.25 * "
        "head 1 "
        "+ 0.25 * head 2 + 0.25 * head 3, head 2 is 1 * head 3 and head 3 is 1 * head 2"
    )


def test_few_tokens_reject_most_mixtures(monkeypatch):
    """A few tokens of an output show that it is not a mixture of heads: a mixture of all tokens of
    a wide layer takes seconds.
    """
    sizes = []
    lstsq = np.linalg.lstsq

    def counted(a, *arguments, **keywords):
        sizes.append(a.shape)
        return lstsq(a, *arguments, **keywords)

    spec = AttentionSpec(64, 4)
    problem = make_problem(Case("many tokens", spec, "", seq_len=64), "float32")
    wrong = run(problem)
    rng = np.random.default_rng(0)
    wrong["output"] = wrong["output"] + rng.normal(size=wrong["output"].shape).astype("float32")
    monkeypatch.setattr(np.linalg, "lstsq", counted)
    assert not abouts_of(problem, {"output": wrong["output"]}, "output")
    of_mixtures = [rows for rows, columns in sizes if columns == 4**2]
    assert of_mixtures
    assert max(of_mixtures) < 64 * 64


def test_narrow_format_is_not_a_pattern():
    """Scores off by 0.4% have no pattern, although bfloat16 can represent them."""
    problem = make_problem(GROUPED, "float32")

    def narrow(x):
        return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)

    wrong = run(problem)
    wrong["scores"] = narrow(narrow(wrong["scores"]) * np.float32(1.004))
    assert abouts_of(problem, wrong, "scores") == ()


# ---- No pattern ----------------------------------------------------------------------------------


@sample(case=[CROSS], size=[1e-5])
@pytest.mark.parametrize("case", [WITH_BIAS, CROSS, NORMED, CAPPED], ids=lambda case: case.name)
@pytest.mark.parametrize("size", [1e-5, 1e-2])
def test_random_errors_have_no_pattern(case, size):
    """Random errors of q, v, weights or output have no pattern, with other stages or without."""
    problem = make_problem(case, "float32")
    right, rng = run(problem), np.random.default_rng(0)
    for stage in ("q", "v", "attn_weights", "output"):
        error = (
            size * np.abs(right[stage]).max() * rng.standard_normal(right[stage].shape)
        ).astype(np.float32)
        assert abouts_of(problem, {**right, stage: right[stage] + error}, stage) == ()
        assert abouts_of(problem, {stage: right[stage] + error}, stage) == ()


def test_recomputations_are_bounded(monkeypatch):
    """The search for patterns of an unexplained output computes the layer at most 2,000 times."""
    problem, calls = make_problem(NORMED, "float32"), []
    output = run(problem)["output"]
    made = parity.explain.diagnosis.trial.edited_layer
    monkeypatch.setattr(
        parity.explain.diagnosis.trial,
        "edited_layer",
        lambda *arguments: calls.append(1) or made(*arguments),
    )
    assert abouts_of(problem, {"output": output + np.float32(0.1) * output**2}, "output") == ()
    assert len(calls) <= 2000


# ---- Parts of kernels, norms, distances and caches -----------------------------------------------

CAUSAL = Case("parts-causal", AttentionSpec(24, 3), "", batch=2, seq_len=7, is_causal=True)
DISTANT = replace(CAUSAL, spec=AttentionSpec(48, 6, alibi=Alibi()))
CACHED = Case(
    "parts-cached",
    AttentionSpec(32, 4, num_kv_heads=2, rope=Rope()),
    "",
    batch=2,
    seq_len=7,
    chunks=(4, 1, 2),
    new_lengths=((4, 2), (1, 1), (2, 2)),
    capacity=9,
)

GENERATED = {
    # Blocks nearly as long as the sequence are also explained by the order of its tokens.
    "blocks": (PLAIN, lambda problem: blocks(problem, "context"), 7),
    "norms": (NORMED, norm_parts, 5),
    "rotations": (GROUPED, rope_parts, 5),
    "distances": (DISTANT, alibi_parts, 5),
    "caches": (CACHED, lambda problem: cache_parts(problem, "cache.keys"), 7),
}


@sample(3)
@pytest.mark.parametrize("name", GENERATED)
def test_part_is_found_with_its_page(name):
    """A layer with a part of each kind has a pattern with the page of that part, at its first wrong
    stage.
    """
    case, parts_of, step = GENERATED[name]
    problem = make_problem(case, "float32")
    right, count = run(problem), 0
    for edit in list(parts_of(problem))[::step]:
        with np.errstate(all="ignore"):
            try:
                wrong = run_steps(edited_layer(problem, "float32", [edit]).steps())
            except ValueError:  # blocks in which the bug does not show
                continue
        differ = [stage for stage in right if not np.array_equal(wrong[stage], right[stage])]
        if differ:
            count += 1
            pages = {edit.page}
            if "with their features exchanged" in edit.about:
                pages.add("rope-positions")  # the same as a rotation in the opposite direction
            findings = Trial(problem, wrong, "ieee").describe(differ[0], ())
            assert any(pages & {*pattern.pages} for pattern in findings.patterns), edit.about
    assert count > 2


@pytest.mark.parametrize(
    ("change", "words", "page"),
    [
        (
            lambda s, hidden: np.where(hidden, -2.5, s),
            "the scores of hidden keys are -2.5",
            "mask-as-number",
        ),
        (
            lambda s, hidden: s - 1.5 * hidden,
            "-1.5 is added to the scores of hidden keys",
            "mask-as-number",
        ),
        (
            lambda s, hidden: np.where(hidden, -np.inf, np.clip(s, -0.5, 0.5)),
            "scores are limited to 0.5 and -0.5",
            "softmax-function",
        ),
    ],
)
def test_number_in_softmax_is_fitted(change, words, page):
    """A finite score of hidden keys and a limit of scores are fitted, from the context alone."""
    problem = make_problem(CAUSAL, "float32")
    right = run(problem)
    scores = change(right["scores"].astype(np.float64), right["mask"])
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = exponentials / exponentials.sum(axis=-1, keepdims=True)
    context = (weights @ right["v"]).astype(np.float32)
    findings = Trial(problem, {"context": context}, "ieee").describe("context", ())
    assert (words, (page,)) in [(pattern.about, pattern.pages) for pattern in findings.patterns]


def test_summand_of_softmax_is_fitted():
    """A number that is added to the sum of the softmax is fitted."""
    problem = make_problem(CAUSAL, "float32")
    right = run(problem)
    scores = np.where(right["mask"], -np.inf, right["scores"].astype(np.float64))
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = exponentials / (0.02 + exponentials.sum(axis=-1, keepdims=True))
    findings = Trial(problem, {"attn_weights": weights.astype(np.float32)}, "ieee").describe(
        "attn_weights", ()
    )
    patterns = [pattern for pattern in findings.patterns if pattern.pages == ("softmax-function",)]
    assert patterns[0].about.startswith("0.02 is added to the sum of the softmax")


def test_part_of_one_head_has_a_pattern():
    """Values of the token before, used by one head alone, have a pattern at context and output."""
    problem = make_problem(CAUSAL, "float32")
    right = run(problem)
    values = right["v"].copy()
    values[:, 1] = np.roll(values[:, 1], 1, axis=1)
    context = right["attn_weights"] @ values
    patterns = abouts_of(problem, {**right, "context": context}, "context")
    assert patterns[0] == "the values used by head 1 alone are of the token before"
    output = run(problem, overriding(context=lambda _: lambda __: {"context": context}))["output"]
    words = "the values used by head 1 alone are of the token before"
    assert words in abouts_of(problem, {"output": output}, "output")
