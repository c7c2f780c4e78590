"""Layouts: round trips are exact; ambiguous tensors raise errors that say how to decide."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from helpers.input_errors import rejects, rejects_type
from helpers.samples import sample
from helpers.tensors import bits_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mha_spec import (
    Alibi,
    Gate,
    GridBias,
    InputError,
    Latent,
    LinearScaling,
    Norm,
    RelativeBias,
    Rope,
    Temperature,
)
from parity import AttentionSpec, random_weights
from parity.measure.core.weights import check_weights, dtype_named, weight_shapes
from parity.port.conversion.layouts.canonical import from_canonical, to_canonical
from parity.port.conversion.layouts.detection import placements
from parity.port.conversion.layouts.layout import (
    RULES,
    SHARING,
    Layout,
    Tensor,
    with_dropped,
    without,
)
from parity.port.conversion.layouts.losses import Written, check_losses
from parity.port.conversion.layouts.tables import LAYOUTS

SHOWN = {name: layout for name, layout in LAYOUTS.items() if not layout.needs_spec}
every_layout = pytest.mark.parametrize("layout", SHOWN.values(), ids=list(SHOWN))

MHA = AttentionSpec(12, 4, head_dim=3)
GQA = AttentionSpec(10, 6, num_kv_heads=2, head_dim=4, d_in=7)


# ---- Layers, and arrays of any values ------------------------------------------------------------


@st.composite
def layers(draw, layout):
    """A layer that the layout can hold according to its rules."""
    rules = set(layout.rules)
    sizes = st.integers(1, 6)
    num_kv_heads = draw(st.integers(1, 3)) * (4 if "four blocks" in rules else 1)
    num_heads = num_kv_heads * (1 if "no groups" in rules else draw(st.integers(1, 3)))
    rope = draw(st.sampled_from([None, Rope(500.0)]))
    head_dim = draw(sizes) * (2 if rope or "even" in rules else 1)
    d_model, d_in = [num_heads * head_dim] * 2 if "square" in rules else (draw(sizes), draw(sizes))
    qkv_bias, out_bias = (
        (True, True) if "biases" in rules else (draw(st.booleans()), draw(st.booleans()))
    )
    qkv_bias &= "no biases" not in rules
    out_bias &= not rules & {"no biases", "no out bias"}
    spec = AttentionSpec(
        d_model,
        num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        d_in=d_in,
        d_kv=d_in if rope or "one width" in rules else draw(sizes),
        qkv_bias=qkv_bias,
        out_bias=qkv_bias if "biases or none" in rules else out_bias or "out bias" in rules,
        out_proj=draw(st.booleans())
        if not rules & {"out_proj", "no out_proj"}
        else "out_proj" in rules,
        rope=rope,
    )
    assume(all(RULES[rule].holds(spec) for rule in rules))
    return spec


HEADS = ("num_heads", "num_kv_heads", "head_dim")
dtypes = st.sampled_from(["float32", "float16", "bfloat16"])
seeds = st.integers(0, 2**32 - 1)
orders = st.sampled_from(["C", "F", "strided"])


def any_values(shape, dtype, rng):
    """Finite values of all sizes, including -0 and subnormal ones."""
    dtype = dtype_named(dtype)
    values = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8).view(dtype)[..., 0]
    with np.errstate(invalid="ignore"):  # NumPy warns when some NaNs are inspected
        return np.where(np.isfinite(values), values, dtype.type(-0.0))


def in_memory(x, order):
    """The same values in a different order in memory."""
    if order == "F":
        return np.asfortranarray(x)
    return np.repeat(x, 2, axis=-1)[..., ::2] if order == "strided" else x


def hints_of(spec):
    """Arguments that a layout's tensors may not determine."""
    return {name: getattr(spec, name) for name in (*HEADS, "rope")}


def tensors_of(layout, spec=None):
    """Tensors of a layer in a layout, and its specification."""
    spec = example(layout) if spec is None else spec
    return from_canonical(random_weights(spec), spec, layout), spec


def example(layout):
    """A layer that the layout can hold, with all biases that it allows.

    It has four heads in two groups, or as many as the rules require.
    """
    rules = set(layout.rules)
    square, groups = (
        "square" in rules,
        max([2, *(int(rule[0]) for rule in rules if rule.endswith(" parts"))]),
    )
    return AttentionSpec(
        16 if square else 10,
        2 * groups,
        num_kv_heads=4 if "no groups" in rules else groups,
        head_dim=4,
        d_in=16 if square else 10,
        qkv_bias="no biases" not in rules,
        out_bias=not rules & {"no biases", "no out bias"},
        out_proj="no out_proj" not in rules,
        scale=1.0 if "scale set" in rules else None,
    )


PACKED = ("qkv", "q kv", "qk v", "k qv", "q vk")


def packed_layout(holds, *, grouped, **options):
    """A layout of one tensor for each word of `holds`, and one for the output."""
    tensors = [
        Tensor(f"{word}.{kind}", word, kind, axes)
        for word in (*holds.split(), "out")
        for kind, axes in (
            ("weight", "e (n h)" if word == "out" else "(n h) d"),
            ("bias", "e" if word == "out" else "(n h)"),
        )
    ]
    options = {"rules": ("out_proj",), **options}
    return Layout(holds, "a layout of a test", "", (tuple(tensors),), grouped=grouped, **options)


# ---- Round trips ---------------------------------------------------------------------------------


@sample(6, seed=1)
@every_layout
@settings(max_examples=20, deadline=None)
@given(data=st.data(), dtype=dtypes, seed=seeds, order=orders, tell=st.sets(st.sampled_from(HEADS)))
def test_layout_round_trip_is_exact(layout, data, dtype, seed, order, tell):
    """Round trips of weights and tensors are exact; with fewer hints they are exact or raise.

    Drawing a layer takes longer than converting it, so one test checks all of this.
    """
    spec = data.draw(layers(layout))
    rng = np.random.default_rng(seed)
    weights = {name: any_values(shape, dtype, rng) for name, shape in weight_shapes(spec).items()}

    laid_out = from_canonical(
        {name: in_memory(x, order) for name, x in weights.items()}, spec, layout
    )
    back, read_spec = to_canonical(laid_out, layout, **hints_of(spec))

    assert bits_of(back) == bits_of(weights)
    assert weight_shapes(read_spec) == weight_shapes(spec)
    assert hints_of(read_spec) == hints_of(spec)

    hints = {
        name: value for name, value in hints_of(spec).items() if name in tell or name == "rope"
    }
    try:
        back, _ = to_canonical(laid_out, layout, **hints)
    except InputError:
        pass  # there may be more than one reading; the next test shows when there is one
    else:
        assert bits_of(back) == bits_of(weights)

    ones = {name: np.ones(shape, dtype_named(dtype)) for name, shape in weight_shapes(spec).items()}
    tensors = {  # of any values, but 0 where heads are padded
        name: np.where(x == 0, x, any_values(x.shape, dtype, rng))
        for name, x in from_canonical(ones, spec, layout).items()
    }

    weights, read_spec = to_canonical(
        {name: in_memory(x, order) for name, x in tensors.items()}, layout, **hints_of(spec)
    )

    assert bits_of(from_canonical(weights, read_spec, layout)) == bits_of(tensors)


ASK_FOR_HEAD_DIM = {
    "megatron": rejects(
        "head_dim", num_heads=4, head_dim=4, d_model=10
    ),  # or it is a rank's share of more heads
    "meta.LLaMA": rejects("head_dim", num_heads=4, head_dim=4, d_model=10),
    "ttnn": rejects("the heads"),  # which are padded
}


@sample(48, seed=21)
@every_layout
@pytest.mark.parametrize("name", HEADS)
def test_one_head_size_is_enough(layout, name):
    """One head size determines the others; three layouts, such as ttnn, require head_dim."""
    tensors, spec = tensors_of(layout)
    hint = {"rope": spec.rope, name: getattr(spec, name)}
    if name != "head_dim" and layout.name in ASK_FOR_HEAD_DIM:
        with ASK_FOR_HEAD_DIM[layout.name]:
            to_canonical(tensors, layout, **hint)
        return
    weights, read_spec = to_canonical(tensors, layout, **hint)
    assert bits_of(weights) == bits_of(random_weights(spec))
    assert hints_of(read_spec) == hints_of(spec)


@pytest.mark.parametrize("grouped", [False, True], ids=["by projection", "by group"])
@pytest.mark.parametrize("holds", PACKED)
@settings(max_examples=50, deadline=None)
@given(
    data=st.data(), rope=st.sampled_from(["half", "interleaved"]), padded=st.booleans(), seed=seeds
)
def test_packed_round_trip_is_exact(holds, grouped, data, rope, padded, seed):
    """Any packed projections convert and return bit for bit, padded and rotated or not."""
    rules = () if "kv" in holds.split() else ("one width",)
    layout = packed_layout(holds, grouped=grouped, rope=rope, padded=padded)
    spec = data.draw(layers(replace(layout, rules=(*layout.rules, "even", *rules))))
    rng = np.random.default_rng(seed)
    weights = {
        name: any_values(shape, "float32", rng) for name, shape in weight_shapes(spec).items()
    }

    laid_out = from_canonical(weights, spec, layout)
    back, read_spec = to_canonical(laid_out, layout, **hints_of(spec))

    assert bits_of(back) == bits_of(weights)
    assert bits_of(from_canonical(back, read_spec, layout)) == bits_of(laid_out)


@pytest.mark.parametrize(
    ("grouped", "expected"),
    [(False, [10, 11, 20, 21]), (True, [10, 20, 11, 21])],
    ids=["by projection", "by group"],
)
def test_packed_keys_follow_grouping(grouped, expected):
    """Packed keys and values of two groups are in the order of projections or of groups."""
    spec = AttentionSpec(6, 6, num_kv_heads=2)
    weights = {name: np.zeros(shape, np.float32) for name, shape in weight_shapes(spec).items()}
    weights |= {
        "k_proj.bias": np.array([10, 11], np.float32),
        "v_proj.bias": np.array([20, 21], np.float32),
    }
    laid_out = from_canonical(weights, spec, packed_layout("q kv", grouped=grouped))
    assert laid_out["kv.bias"].tolist() == expected


@pytest.mark.parametrize("holds", ["q k v", "q kv", "qk v", "qkv"])
def test_wrong_head_count_lists_others(holds):
    """num_heads=5 raises an error that lists key/value heads of the head counts that fit."""
    layout = packed_layout(holds, grouped=False)
    tensors, _ = tensors_of(layout, AttentionSpec(12, 4, num_kv_heads=2))
    with rejects("the heads", num_heads=5) as input_error:
        to_canonical(tensors, layout, num_heads=5)
    assert "(key/value " in input_error.value.rule


@pytest.mark.parametrize("holds", ["", "x", "qo", "qq", "outq"])
def test_invalid_projections_raise(holds):
    """A tensor with empty, unknown or repeated projections, or with out among others, raises."""
    with rejects("holds", holds=holds):
        Tensor("x", holds, "weight", "(n h) d")


def test_head_tensor_holds_one_projection():
    """A tensor of one head that holds both keys and values raises an error."""
    with rejects("a tensor of one head", holds="kv"):
        Tensor("heads.{n}.kv", "kv", "weight", "h d")


@sample(6, seed=2)
@every_layout
def test_layout_arrays_are_contiguous(layout):
    """Every array of a layout is C-contiguous."""
    tensors, _ = tensors_of(layout)
    assert all(x.flags.c_contiguous for x in tensors.values())


@sample(6, seed=3)
@every_layout
def test_converted_arrays_are_copies(layout):
    """Converted arrays share no memory with their inputs in either direction."""
    spec = example(layout)
    weights = random_weights(spec)
    laid_out = from_canonical(weights, spec, layout)
    back, _ = to_canonical(laid_out, layout, **hints_of(spec))
    assert not [
        name
        for name, x in laid_out.items()
        if any(np.shares_memory(x, y) for y in weights.values())
    ]
    assert not [
        name for name, x in back.items() if any(np.shares_memory(x, y) for y in laid_out.values())
    ]


# ---- On paper ------------------------------------------------------------------------------------

ONE_HEAD = AttentionSpec(4, 1, qkv_bias=False, out_bias=False)


def numbered(spec):
    """Weights whose rows of features, and out_proj's columns, are numbered: 0, 1, …"""
    weights = {name: np.zeros(shape, np.float32) for name, shape in weight_shapes(spec).items()}
    for name, x in weights.items():
        rows = x.T if name == "out_proj.weight" else x
        if name != "out_proj.bias":
            rows += np.arange(len(rows)).reshape(-1, *[1] * (rows.ndim - 1))
    return weights


@pytest.mark.parametrize("name", ["meta.LLaMA", "gguf.LLaMA", "torchtitan.LLaMA"])
@pytest.mark.parametrize("leaf", ["weight", "bias"])
def test_interleaved_pairs_reorder_rows(name, leaf):
    """Rows i and i + half of a head become neighbors in q and k; rows of v keep their order."""
    spec = AttentionSpec(12, 2, head_dim=6, rope=Rope(500.0))
    laid_out = from_canonical(numbered(spec), spec, LAYOUTS[name])
    layers = {tensor.holds: tensor.name for tensor in LAYOUTS[name].tensors if tensor.kind == leaf}
    first = {p: laid_out[layers[p]].reshape(12, -1)[:, 0].tolist() for p in "qkv"}
    assert first["q"] == first["k"] == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert first["v"] == list(range(12))


def test_head_stack_splits_rows():
    """With one tensor per head, head n has rows 2n and 2n + 1 of the keys' weight."""
    spec = AttentionSpec(6, 3, d_in=5, out_proj=False)
    laid_out = from_canonical(numbered(spec), spec, LAYOUTS["heads.W_query"])
    rows = {n: laid_out[f"heads.{n}.W_key.weight"][:, 0].tolist() for n in range(3)}
    assert rows == {0: [0, 1], 1: [2, 3], 2: [4, 5]}
    assert laid_out["heads.2.W_value.bias"].tolist() == [4, 5]


def test_heads_beyond_nine_keep_their_order():
    """Twelve heads are read in the order of their numbers, not of their names."""
    spec = AttentionSpec(12, 12, out_proj=False)
    laid_out = from_canonical(numbered(spec), spec, LAYOUTS["heads.W_query"])
    back, _ = to_canonical(dict(sorted(laid_out.items())), LAYOUTS["heads.W_query"])
    assert back["q_proj.bias"].tolist() == list(range(12))


def test_ttnn_heads_are_padded_to_tiles():
    """Heads of 3 features are padded with zeros to 32 features in ttnn's layout."""
    spec = AttentionSpec(4, 2, head_dim=3)
    weights = {name: x + 1 for name, x in numbered(spec).items()}
    laid_out = from_canonical(weights, spec, LAYOUTS["ttnn"])
    assert {name: x.shape for name, x in laid_out.items()} == {
        "qkv_proj.weight": (4, 6 * 32),
        "qkv_proj.bias": (1, 6 * 32),
        "out_proj.weight": (2 * 32, 4),
        "out_proj.bias": (1, 4),
    }
    assert features(laid_out["qkv_proj.bias"][0]) == {
        index + 64 * projection: value
        for projection in range(3)
        for index, value in {0: 1, 1: 2, 2: 3, 32: 4, 33: 5, 34: 6}.items()
    }
    assert features(laid_out["out_proj.weight"][:, 0]) == {0: 1, 1: 2, 2: 3, 32: 4, 33: 5, 34: 6}


def test_ttnn_rope_halves_are_padded():
    """With RoPE, each half of a head of 4 features is padded with zeros to 32 features."""
    spec = AttentionSpec(4, 2, head_dim=4, rope=Rope(500.0))
    weights = {name: x + 1 for name, x in numbered(spec).items()}
    laid_out = from_canonical(weights, spec, LAYOUTS["ttnn"])
    assert laid_out["qkv_proj.weight"].shape == (4, 6 * 64)
    assert features(laid_out["out_proj.weight"][:, 0]) == {
        0: 1,
        1: 2,
        32: 3,
        33: 4,
        64: 5,
        65: 6,
        96: 7,
        97: 8,
    }


def features(x):
    """Indices and values of nonzero elements."""
    return {int(index): float(x[index]) for index in np.flatnonzero(x)}


# ---- Layers that a layout cannot hold ------------------------------------------------------------

# Names of rules; after the colon, how a layer breaks them.
GROUPS, OUT, NO_OUT, WIDTHS, SQUARE = "no groups", "out_proj", "no out_proj", "one width", "square"
BIASES, ALL_BIASES, OUT_BIAS = "biases or none", "biases", "out bias"
NO_BIASES, NO_OUT_BIAS = "no biases", "no out bias"
VALUES, SCALE, EVEN, FACTORS = "one head_dim", "scale set", "even", "factors of widths"
HALVES, HALVES_OF_WHOLE = "whole halves: interleaved", "whole halves: a part"
NORMS, NORMS_1W, NO_LAYER_NORMS = "rms norms, w: 1+w", "rms norms, 1+w: w", "rms norms, w: layer"
NOT_HELD = {
    "torch.nn.MultiheadAttention": [GROUPS, OUT, SQUARE, BIASES],
    "qkv_proj": [WIDTHS],
    "heads.W_query": [GROUPS, NO_OUT],
    "flax.nnx": [OUT, BIASES],
    "flax.linen": [GROUPS, OUT, BIASES],
    "keras.MultiHeadAttention": [GROUPS, OUT, BIASES],
    "keras.GroupQueryAttention": [OUT, BIASES],
    "equinox.nn.MultiheadAttention": [GROUPS, OUT],
    "transformers.BERT": [GROUPS, OUT, WIDTHS, SQUARE, ALL_BIASES],
    "transformers.ViT": [GROUPS, OUT, WIDTHS, SQUARE, OUT_BIAS],
    "transformers.ViT-5": [GROUPS, OUT, WIDTHS, SQUARE, OUT_BIAS],
    "transformers.GPT2": [GROUPS, OUT, WIDTHS, SQUARE, ALL_BIASES],
    "transformers.GPT-NeoX": [GROUPS, OUT, WIDTHS, SQUARE, BIASES],
    "transformers.Falcon": [OUT, WIDTHS, SQUARE, BIASES],
    "transformers.LLaMA": [OUT],
    "transformers.LongCat": [FACTORS],
    "meta.LLaMA": [OUT, EVEN, HALVES, HALVES_OF_WHOLE],
    "gguf.LLaMA": [OUT, EVEN, HALVES, HALVES_OF_WHOLE],
    "gguf.Qwen2": [OUT, NORMS, NO_LAYER_NORMS],
    "maxtext": [OUT, VALUES, NORMS, NO_LAYER_NORMS, SCALE],
    "maxtext.qkv_proj": [OUT, WIDTHS, VALUES, NORMS, NO_LAYER_NORMS, SCALE],
    **{f"maxtext.qkv_proj.{parts}": [WIDTHS, f"{parts} parts"] for parts in (2, 4, 8)},
    "maxtext.GPT-3": [GROUPS, OUT, WIDTHS, VALUES, ALL_BIASES],
    "maxtext.MLA": [OUT],
    "maxtext.LLaMA-3.1": [OUT, VALUES, NORMS, SCALE, EVEN, HALVES, HALVES_OF_WHOLE],
    "tunix.LLaMA": [OUT, VALUES, NORMS, NO_OUT_BIAS],
    "tunix.Gemma": [OUT, VALUES, NORMS_1W, WIDTHS, NO_BIASES],
    "keras_hub.LLaMA": [OUT, VALUES, NORMS, NO_LAYER_NORMS],
    "keras_hub.Gemma": [OUT, VALUES, NORMS_1W, NO_BIASES],
    "keras_hub.BLOOM": [GROUPS, OUT, VALUES, ALL_BIASES],
    "torchtitan.LLaMA": [OUT, EVEN, HALVES, HALVES_OF_WHOLE],
    "torchtitan.Qwen3": [OUT, NORMS, NO_LAYER_NORMS],
    "megatron": [OUT, WIDTHS, VALUES],
    "megatron.gate": [OUT, WIDTHS, VALUES],
    "ttnn": [WIDTHS, HALVES, HALVES_OF_WHOLE],
}
CHANGES = {
    **{f"{parts} parts": {"num_kv_heads": 1} for parts in (2, 4, 8)},
    GROUPS: {"num_kv_heads": 2},
    OUT: {"out_proj": False},
    NO_OUT: {"out_proj": True},
    SQUARE: {"d_model": 18},
    BIASES: {"out_bias": False},
    ALL_BIASES: {"qkv_bias": False, "out_bias": False},
    OUT_BIAS: {"out_bias": False},
    WIDTHS: {"d_kv": 9},
    NO_BIASES: {"qkv_bias": True},
    NO_OUT_BIAS: {"out_bias": True},
    VALUES: {"value_head_dim": 2},
    SCALE: {"scale": None},
    FACTORS: {"latent": Latent(4, 2, 3, kv_factor=(10 / 4) ** 0.5), "num_kv_heads": 4},
    NORMS: {"qk_norm": Norm(weight="1+w")},
    NORMS_1W: {"qk_norm": Norm()},
    NO_LAYER_NORMS: {"qk_norm": Norm("layer")},
    EVEN: {"head_dim": 3},
    HALVES: {"rope": Rope(pairs="interleaved"), "head_dim": 4},
    HALVES_OF_WHOLE: {"rope": Rope(rotary_dim=2), "head_dim": 4},
}


def words_of(rule):
    return RULES[rule.partition(":")[0]].words


@sample(6, seed=4)
@pytest.mark.parametrize(
    ("name", "rule"),
    [(name, rule) for name, rules in NOT_HELD.items() for rule in rules],
)
def test_unsupported_layer_raises_with_rule(name, rule):
    """A layer that breaks a rule of a layout raises an error with the rule and the value."""
    spec = replace(example(LAYOUTS[name]), **CHANGES[rule])
    field = next(iter(CHANGES[rule]))
    with rejects("the layer", {field: getattr(spec, field)}) as input_error:
        from_canonical(random_weights(spec), spec, LAYOUTS[name])
    assert name in input_error.value.rule
    assert words_of(rule) in input_error.value.rule
    assert "\n" not in str(input_error.value)


@sample(6, seed=5)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_shared_kv_is_held_or_rejected(layout):
    """Layouts of modules that share keys and values round-trip such a layer; others raise."""
    spec = replace(example(layout), shared_kv=True)
    weights = random_weights(spec)
    if layout.name not in SHARING:
        with rejects("the layer", {"shared_kv": True}):
            from_canonical(weights, spec, layout)
        return
    tensors = from_canonical(weights, spec, layout)
    weights_read, read = to_canonical(tensors, layout, spec=spec)
    assert read == spec
    assert all((weights_read[name] == weight).all() for name, weight in weights.items())


NAMELESS = {
    "gate_proj": {"gate": Gate()},
    "relative_bias": {"relative_bias": RelativeBias()},
    "sinks": {"sinks": True},
    "q_norm": {"qk_norm": Norm()},
    "kv_a_proj": {"latent": Latent(4, 2)},
}
LOST = {
    "rope": Rope(),
    "clip_qkv": 8.0,
    "soft_cap": 30.0,
    "window_size": 3,
    "chunk_size": 3,
    "scale": 0.3,
    "alibi": Alibi(),
    "temperature": Temperature(4, 0.1),
    "v_norm": Norm(weight=None),
}


@pytest.mark.parametrize("weight", NAMELESS)
def test_unnamed_weights_are_rejected(weight):
    """Gates, biases, sinks, norms and latents raise in each layout that has no name for them."""
    for name in LAYOUTS:
        check_held_or_rejected(name, weight)


def check_held_or_rejected(name, weight):
    layout, spec = LAYOUTS[name], example(LAYOUTS[name])
    groups = spec.num_heads if weight == "kv_a_proj" else spec.num_kv_heads
    spec = replace(spec, **NAMELESS[weight], num_kv_heads=groups)
    if any(
        part.startswith(weight)
        for tensor in (*layout.tensors, *layout.others)
        for part in tensor.parts
    ):
        return  # the layout holds it, as the tests of released layers show
    with rejects("the layer"):
        from_canonical(random_weights(spec), spec, layout)


@pytest.mark.parametrize("field", LOST)
def test_weightless_options_are_not_lost(field):
    """Each layout either carries an option that no weight shows or raises an error for it."""
    for name in LAYOUTS:
        check_carried_or_rejected(name, field)


def check_carried_or_rejected(name, field):
    layout = LAYOUTS[name]
    spec = SPECS.get(name, example(layout))
    if spec.latent is not None and field in ("rope", "clip_qkv", "v_norm"):
        return  # latents have their own RoPE, and neither of the others
    spec = replace(spec, **{field: LOST[field]})
    weights = random_weights(spec)
    if field in layout.carries:
        back, _ = to_canonical(from_canonical(weights, spec, layout), layout, spec=spec)
        assert bits_of(back) == bits_of(weights)
        return
    if field == "rope":  # it may be applied outside, but raises an error if a configuration has it
        check_losses([Written(spec)], layout)
        with rejects("the layer", rope=...):
            check_losses([Written(spec, but_for=())], layout)
        return
    with rejects("the layer", {field: ...}):
        from_canonical(weights, spec, layout)
    from_canonical(weights, without(spec, [field]), layout)


@pytest.mark.parametrize("name", ["canonical", "transformers.DeepSeek", "maxtext.MLA"])
def test_latent_factors_are_not_lost(name):
    """A layout carries factors of latents or raises; they can be dropped and restored."""
    layout, spec = LAYOUTS[name], replace(LONGCAT, qkv_bias=False)
    weights = random_weights(spec)
    if "latent.factors" in layout.carries:
        back, _ = to_canonical(from_canonical(weights, spec, layout), layout, spec=spec)
        assert bits_of(back) == bits_of(weights)
        return
    with rejects("the layer", {"latent.factors": (2.0, 1.5491933384829668)}):
        from_canonical(weights, spec, layout)
    dropped = without(spec, ["latent.factors"])
    assert dropped == replace(LATENTS, qkv_bias=False)
    assert with_dropped(dropped, spec, ["latent.factors"]) == spec
    from_canonical(weights, dropped, layout)


def test_rope_scaling_drops_separately():
    """RoPE scaling raises in Meta's layout, and can be dropped without the rest of RoPE."""
    spec = replace(GQA, d_kv=7, rope=Rope(500.0, scaling=LinearScaling(2.0)))
    with rejects("the layer", {"rope.scaling": ...}):
        from_canonical(random_weights(spec), spec, LAYOUTS["meta.LLaMA"])
    assert without(spec, ["rope.scaling"]).rope == Rope(500.0)
    assert without(spec, ["rope", "rope.scaling"]).rope is None


# ---- Layers that require a specification ---------------------------------------------------------

NORMED = replace(MHA, d_in=12, qk_norm=Norm("layer", bias=True))
LATENTS = AttentionSpec(
    12,
    2,
    head_dim=6,
    value_head_dim=4,
    latent=Latent(5, 2, 3),
    rope=Rope(rotary_dim=2, rotated="last"),
)
FACTORS_OF_WIDTHS = {"q_factor": (12 / 3) ** 0.5, "kv_factor": (12 / 5) ** 0.5}
LONGCAT = replace(LATENTS, latent=replace(LATENTS.latent, **FACTORS_OF_WIDTHS))
OF_ONE_WIDTH = replace(GQA, d_kv=7)
PLAIN = replace(OF_ONE_WIDTH, qkv_bias=False, out_bias=False)
SPECS = {
    "transformers.Qwen3-Next": replace(GQA, d_kv=7, qkv_bias=False, gate=Gate()),
    "transformers.DeepSeek": LATENTS,
    "transformers.LongCat": LONGCAT,
    "megatron.gate": replace(OF_ONE_WIDTH, gate=Gate(bias=True)),
    "maxtext.MLA": replace(LATENTS, qkv_bias=False),
}
OF_IMAGES = ("BERT", "ViT", "ViT-5")
TOLD = {
    "canonical, everything": (
        "canonical",
        replace(GQA, gate=Gate(bias=True), qk_norm=Norm(), sinks=True),
    ),
    "canonical, relative bias": (
        "canonical",
        replace(MHA, relative_bias=RelativeBias(), qkv_bias=(True, False, True)),
    ),
    **{
        f"{name}, grid": (f"transformers.{name}", replace(MHA, relative_bias=GridBias(2, 3)))
        for name in OF_IMAGES
    },
    "canonical, latents": ("canonical", LATENTS),
    "mha_jax, latents": ("mha_jax", LATENTS),
    "mha_jax, gate": ("mha_jax", replace(GQA, gate=Gate(per_head=True), value_head_dim=3)),
    "mha_jax.qkv_proj": ("mha_jax.qkv_proj", replace(NORMED, gate=Gate())),
    "LLaMA": (
        "transformers.LLaMA",
        replace(GQA, qk_norm=Norm(per_head=True), sinks=True, gate=Gate()),
    ),
    "LLaMA, Whisper's biases": (
        "transformers.LLaMA",
        replace(MHA, qkv_bias=(True, False, True), value_head_dim=2),
    ),
    "Phi": ("transformers.Phi", NORMED),
    "Persimmon": ("transformers.GPT-NeoX", NORMED),
    "HunYuan": (
        "transformers.HunYuan",
        replace(GQA, qk_norm=Norm(after_rope=True), d_kv=7, rope=Rope()),
    ),
    "StableLM": ("transformers.StableLM", replace(GQA, qk_norm=Norm("layer", per_head=True))),
    "Qwen3-Next": (
        "transformers.Qwen3-Next",
        replace(SPECS["transformers.Qwen3-Next"], qk_norm=Norm(weight="1+w")),
    ),
    "Qwen3-Next, biases": ("transformers.Qwen3-Next", replace(GQA, gate=Gate(bias=True))),
    "DeepSeek": ("transformers.DeepSeek", LATENTS),
    "LongCat": ("transformers.LongCat", LONGCAT),
    "canonical, factors": ("canonical", LONGCAT),
    "DeepSeek, whole queries": ("transformers.DeepSeek", replace(LATENTS, latent=Latent(5, 2))),
    "ViT, BEiT's biases": ("transformers.ViT", replace(MHA, qkv_bias=(True, False, True))),
    "ViT-5, BEiT's biases": ("transformers.ViT-5", replace(MHA, qkv_bias=(True, False, True))),
    "maxtext": ("maxtext", replace(GQA, scale=1.0)),
    "maxtext.qkv_proj.2": ("maxtext.qkv_proj.2", replace(OF_ONE_WIDTH, scale=1.0)),
    "maxtext.qkv_proj.8": (
        "maxtext.qkv_proj.8",
        replace(PLAIN, num_heads=16, num_kv_heads=8, scale=1.0),
    ),
    "maxtext.GPT-3": ("maxtext.GPT-3", replace(MHA, d_in=12)),
    "maxtext.MLA": ("maxtext.MLA", SPECS["maxtext.MLA"]),
    "maxtext.MLA, whole queries": (
        "maxtext.MLA",
        replace(LATENTS, latent=Latent(5, 2), qkv_bias=False),
    ),
    "maxtext, everything": (
        "maxtext",
        replace(
            PLAIN,
            scale=0.5,
            qk_norm=Norm(),
            v_norm=Norm(),
            sinks=True,
            soft_cap=30.0,
            window_size=3,
            rope=Rope(),
        ),
    ),
    "maxtext.qkv_proj": ("maxtext.qkv_proj", replace(OF_ONE_WIDTH, scale=1.0, qk_norm=Norm())),
    "maxtext.LLaMA-3.1": ("maxtext.LLaMA-3.1", replace(PLAIN, scale=1.0, rope=Rope(500.0))),
    "tunix, Qwen3": ("tunix.LLaMA", replace(PLAIN, qk_norm=Norm(), rope=Rope())),
    "tunix, Gemma 3": (
        "tunix.Gemma",
        replace(PLAIN, qk_norm=Norm(weight="1+w"), rope=Rope(), scale=0.3, window_size=3),
    ),
    "tunix, Gemma 3 without groups": (
        "tunix.Gemma",
        replace(MHA, qkv_bias=False, out_bias=False, qk_norm=Norm(weight="1+w")),
    ),
    "keras_hub, Qwen3": ("keras_hub.LLaMA", replace(PLAIN, qk_norm=Norm(), rope=Rope())),
    "keras_hub, gpt-oss": ("keras_hub.LLaMA", replace(OF_ONE_WIDTH, sinks=True, rope=Rope())),
    "keras_hub, Gemma 3": (
        "keras_hub.Gemma",
        replace(PLAIN, qk_norm=Norm(weight="1+w"), soft_cap=30.0, rope=Rope()),
    ),
    "torchtitan, Qwen3": ("torchtitan.Qwen3", replace(PLAIN, qk_norm=Norm(), rope=Rope())),
    "torchtitan, gpt-oss": (
        "torchtitan.Qwen3",
        replace(OF_ONE_WIDTH, sinks=True, window_size=3, rope=Rope()),
    ),
    "megatron, norms": (
        "megatron",
        replace(OF_ONE_WIDTH, qk_norm=Norm("layer", bias=True), sinks=True),
    ),
    "megatron.gate": ("megatron.gate", replace(PLAIN, gate=Gate(), qk_norm=Norm(weight="1+w"))),
    "megatron.gate, biases": ("megatron.gate", SPECS["megatron.gate"]),
}


@sample(6, seed=6)
@pytest.mark.parametrize("case", TOLD)
def test_specified_round_trip_is_exact(case):
    """With its spec a layer returns bit for bit; missing, unknown or doubled tensors raise."""
    name, spec = TOLD[case]
    weights = random_weights(spec)
    laid_out = from_canonical(weights, spec, LAYOUTS[name])
    back, read_spec = to_canonical(laid_out, LAYOUTS[name], spec=spec)
    assert read_spec == spec
    assert bits_of(back) == bits_of(weights)
    assert sum(x.size for x in laid_out.values()) == sum(x.size for x in weights.values())
    for gone in laid_out:
        with rejects("tensors", "missing"):
            to_canonical(
                {name_: x for name_, x in laid_out.items() if name_ != gone},
                LAYOUTS[name],
                spec=spec,
            )
    with rejects("tensors", "unknown names ['extra']"):
        to_canonical({**laid_out, "extra": np.zeros(3, np.float32)}, LAYOUTS[name], spec=spec)
    with rejects("tensors"):
        to_canonical(
            {name_: np.concatenate([x, x]) for name_, x in laid_out.items()},
            LAYOUTS[name],
            spec=spec,
        )


@sample(6, seed=7)
@pytest.mark.parametrize(
    "case", [case for case, (_, spec) in TOLD.items() if "Whisper" not in case]
)
def test_hidden_features_require_a_spec(case):
    """Layers with features that shapes do not show raise an error without a specification."""
    name, spec = TOLD[case]
    laid_out = from_canonical(random_weights(spec), spec, LAYOUTS[name])
    with pytest.raises(InputError):
        to_canonical(laid_out, LAYOUTS[name], num_heads=spec.num_heads)


def test_gate_follows_queries_of_its_head():
    """In Qwen3-Next's q_proj, the gate rows of each head follow its query rows."""
    spec = AttentionSpec(4, 2, head_dim=2, qkv_bias=False, out_bias=False, gate=Gate())
    weights = {name: np.zeros(shape, np.float32) for name, shape in weight_shapes(spec).items()}
    weights["q_proj.weight"] += np.arange(4)[:, None]
    weights["gate_proj.weight"] += 10 + np.arange(4)[:, None]
    laid_out = from_canonical(weights, spec, LAYOUTS["transformers.Qwen3-Next"])
    assert laid_out["q_proj.weight"][:, 0].tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


@pytest.mark.parametrize("name", ["transformers.Qwen3-Next", "megatron.gate"])
def test_scalar_gate_per_head_is_rejected(name):
    """A gate with one value per head raises in layouts that pack gates with queries."""
    spec = replace(PLAIN, gate=Gate(per_head=True))
    with rejects("the layer"):
        from_canonical(random_weights(spec), spec, LAYOUTS[name])


@pytest.mark.parametrize("name", ["canonical", "W_q", "W_Q", "w_q", "W_query"])
@pytest.mark.parametrize(
    "spec", [replace(GQA, d_kv=9), replace(GQA, out_proj=False), replace(GQA, out_bias=False)]
)
def test_four_linear_layouts_hold_any_layer(name, spec):
    """Layouts of four linear layers hold any d_kv, and layers without out_proj or its bias."""
    weights = random_weights(spec)
    back, _ = to_canonical(
        from_canonical(weights, spec, LAYOUTS[name]), LAYOUTS[name], **hints_of(spec)
    )
    assert bits_of(back) == bits_of(weights)


def test_all_broken_rules_are_reported():
    """A layer that is grouped and not square raises an error with the values of both rules."""
    with rejects(
        "the layer", num_heads=GQA.num_heads, num_kv_heads=GQA.num_kv_heads, d_model=GQA.d_model
    ):
        from_canonical(random_weights(GQA), GQA, LAYOUTS["torch.nn.MultiheadAttention"])


SEEN = {
    GROUPS,
    SQUARE,
    BIASES,
    ALL_BIASES,
    OUT_BIAS,
}  # visible in the tensors themselves, but tensors of a stack of heads would be missing
NOT_SEEN = {"heads.W_query", "maxtext.GPT-3"}  # they require a specification


@sample(6, seed=8)
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (name, rule)
        for name, rules in NOT_HELD.items()
        for rule in rules
        if rule in SEEN and name not in NOT_SEEN
    ],
)
def test_unsupported_tensors_raise_with_rule(name, rule):
    """Tensors of a layer that breaks a rule of a layout raise an error with the rule."""
    spec = replace(example(LAYOUTS[name]), **CHANGES[rule])
    tensors, _ = tensors_of(replace(LAYOUTS[name], rules=()), spec)
    with rejects("shapes") as input_error:
        to_canonical(tensors, LAYOUTS[name], **hints_of(spec))
    assert words_of(rule) in input_error.value.rule


@pytest.mark.parametrize("name", ["meta.LLaMA", "gguf.LLaMA", "torchtitan.LLaMA"])
def test_odd_head_dim_has_no_pairs(name):
    """head_dim=3 raises in layouts of interleaved pairs; the true heads are read."""
    tensors, spec = tensors_of(LAYOUTS[name], replace(GQA, head_dim=6, value_head_dim=6))
    with rejects("shapes"):
        to_canonical(tensors, LAYOUTS[name], num_heads=12, num_kv_heads=4, head_dim=3)
    to_canonical(tensors, LAYOUTS[name], **hints_of(spec))


# ---- Names ---------------------------------------------------------------------------------------


def every(kind, *projections):
    """Layouts, and the names of their tensors of a kind that hold one of the projections, or
    any.
    """
    return [
        pytest.param(layout, tensor.name.format(n=1), id=f"{name}-{tensor.name}")
        for name, layout in SHOWN.items()
        for tensor in placements(example(layout), layout)[0].tensors
        if tensor.kind == kind
        and (not projections or (tensor.holds in projections and not tensor.is_per_head))
    ]


@sample(12, seed=9)
@pytest.mark.parametrize(("layout", "name"), every("weight"))
def test_missing_weight_is_named(layout, name):
    """A missing weight raises an error that names its layer."""
    tensors, spec = tensors_of(layout)
    del tensors[name]
    layer = (
        name.rpartition(".")[0] or name
    )  # without out_proj.weight, the error names out_proj.bias
    with rejects("tensors", layer):
        to_canonical(tensors, layout, **hints_of(spec))


@sample(6, seed=10)
@every_layout
def test_empty_tensors_are_rejected(layout):
    """An empty dictionary of tensors raises an error in every layout."""
    with rejects("tensors"):
        to_canonical({}, layout)


@sample(6, seed=11)
@every_layout
@pytest.mark.parametrize("name", ["qk_norm.weight", "extra", "query.weight.more"])
def test_unknown_tensor_name_raises(layout, name):
    """A tensor with an unknown name raises an error in every layout."""
    tensors, spec = tensors_of(layout)
    with rejects("tensors"):
        to_canonical({**tensors, name: np.zeros(4, np.float32)}, layout, **hints_of(spec))


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("W_query", "mask"),
        ("heads.W_query", "heads.1.mask"),
        ("transformers.BERT", "output.LayerNorm.weight"),
        ("transformers.GPT2", "bias"),
        ("transformers.GPT2", "masked_bias"),
        ("transformers.GPT-NeoX", "rotary_emb.inv_freq"),
        ("transformers.LLaMA", "rotary_emb.inv_freq"),
        ("meta.LLaMA", "inner_attention.rope.freqs"),
        ("gguf.LLaMA", "ffn_up.weight"),
        ("megatron", "linear_qkv.layer_norm_weight"),
        ("megatron", "linear_proj._extra_state"),
    ],
)
def test_known_extra_tensors_are_ignored(layout, name):
    """Masks, buffers and norms next to the weights of a layer do not change its weights."""
    tensors, spec = tensors_of(LAYOUTS[layout])
    expected, _ = to_canonical(tensors, LAYOUTS[layout], **hints_of(spec))
    weights_read, _ = to_canonical(
        {**tensors, name: np.zeros(4, np.float32)}, LAYOUTS[layout], **hints_of(spec)
    )
    assert bits_of(weights_read) == bits_of(expected)


def test_packed_plus_split_weights_raise():
    """torch.nn.MultiheadAttention with both packed and split weights raises an error."""
    layout = LAYOUTS["torch.nn.MultiheadAttention"]
    packed, _ = tensors_of(layout, MHA)
    split, _ = tensors_of(layout, replace(MHA, d_kv=5))
    with rejects("tensors"):
        to_canonical(packed | split, layout, num_heads=4)


def test_packed_plus_one_split_weight_raises():
    """A split q_proj_weight in addition to the packed weight raises an error with its name."""
    layout = LAYOUTS["torch.nn.MultiheadAttention"]
    packed, _ = tensors_of(layout, MHA)
    with rejects("tensors", "unknown names ['q_proj_weight']"):
        to_canonical(
            {**packed, "q_proj_weight": np.zeros((12, 12), np.float32)}, layout, num_heads=4
        )


def test_absent_in_proj_weight_raises():
    """Neither packed nor split weights raise an error that names in_proj_weight."""
    layout = LAYOUTS["torch.nn.MultiheadAttention"]
    packed, _ = tensors_of(layout, MHA)
    del packed["in_proj_weight"]
    with rejects("tensors", "in_proj_weight"):
        to_canonical(packed, layout, num_heads=4)


def test_incomplete_split_weights_raise():
    """A missing k_proj_weight among split weights raises an error with its name."""
    layout = LAYOUTS["torch.nn.MultiheadAttention"]
    split, _ = tensors_of(layout, replace(MHA, d_kv=5))
    del split["k_proj_weight"]
    with rejects("tensors", "k_proj_weight"):
        to_canonical(split, layout, num_heads=4)


@sample(6, seed=12)
@pytest.mark.parametrize(("layout", "name"), every("bias", "q", "k", "v"))
def test_partial_qkv_biases_raise(layout, name):
    """Biases of only two of q, k and v raise an error."""
    tensors, spec = tensors_of(layout)
    del tensors[name]
    with rejects("q_proj, k_proj and v_proj"):
        to_canonical(tensors, layout, **hints_of(spec))


@sample(6, seed=13)
@pytest.mark.parametrize(("layout", "name"), every("bias", "qkv", "out"))
def test_qkv_or_output_bias_may_be_absent(layout, name):
    """A layer with biases of only the output, or of all but the output, is read."""
    layout = replace(
        layout, rules=tuple(set(layout.rules) - {"biases or none", "biases", "out bias"})
    )
    tensors, spec = tensors_of(layout)
    del tensors[name]
    weights, read_spec = to_canonical(tensors, layout, **hints_of(spec))
    assert read_spec.qkv_bias != read_spec.out_bias
    check_weights(weights, read_spec)


# ---- Heads with separate tensors -----------------------------------------------------------------

STACK = LAYOUTS["heads.W_query"]
STACKED = AttentionSpec(6, 3, d_in=5, qkv_bias=False, out_proj=False)


def test_duplicate_head_raises():
    """A head under both heads.0 and heads.00 raises an error with the second name."""
    tensors, _ = tensors_of(STACK, STACKED)
    twice = {
        name.replace("heads.0.", "heads.00."): x
        for name, x in tensors.items()
        if name.startswith("heads.0.")
    }
    with rejects("tensors", "heads.00.W_key.weight"):
        to_canonical(tensors | twice, STACK)


def test_missing_head_is_named():
    """A missing head among three raises an error with its name."""
    tensors, _ = tensors_of(STACK, STACKED)
    tensors = {name: x for name, x in tensors.items() if not name.startswith("heads.1.")}
    with rejects("tensors", "heads.1.W_query.weight"):
        to_canonical(tensors, STACK)


def test_head_of_other_width_raises():
    """A key weight with 3 rows among heads of 2 features raises an error."""
    tensors, _ = tensors_of(STACK, STACKED)
    tensors["heads.1.W_key.weight"] = np.zeros((3, 5), np.float32)
    with rejects("shapes"):
        to_canonical(tensors, STACK)


def test_bias_of_one_head_raises():
    """Biases of only the first head raise an error that names the second head's."""
    tensors, _ = tensors_of(STACK, STACKED)
    biases = {
        f"heads.0.W_{name}.bias": np.zeros(2, np.float32) for name in ("query", "key", "value")
    }
    with rejects("tensors", "heads.1.W_query.bias"):
        to_canonical(tensors | biases, STACK)


def test_query_biases_alone_raise():
    """Biases of only the queries, in every head, raise an error."""
    tensors, _ = tensors_of(STACK, STACKED)
    biases = {f"heads.{n}.W_query.bias": np.zeros(2, np.float32) for n in range(3)}
    with rejects("q_proj, k_proj and v_proj", "['q_proj.bias']"):
        to_canonical(tensors | biases, STACK)


def test_head_stack_shows_head_count():
    """A layout with one tensor per head needs no hints: 3 heads of 2 features are found."""
    tensors, _ = tensors_of(STACK, STACKED)
    _, spec = to_canonical(tensors, STACK)
    assert (spec.num_heads, spec.head_dim) == (3, 2)


# ---- Numbers of heads ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "canonical",
        "torch.nn.MultiheadAttention",
        "qkv_proj",
        "equinox.nn.MultiheadAttention",
        "transformers.BERT",
        "transformers.GPT2",
        "transformers.Falcon",
        "transformers.LLaMA",
        "ttnn",
    ],
)
def test_undetermined_heads_raise(name):
    """Tensors whose shapes do not determine the heads raise an error without hints."""
    tensors, _ = tensors_of(LAYOUTS[name])
    with rejects("the heads"):
        to_canonical(tensors, LAYOUTS[name])


KERNELS = ["flax.nnx", "flax.linen", "keras.MultiHeadAttention", "keras.GroupQueryAttention"]
KERNELS += ["tunix.LLaMA", "tunix.Gemma", "keras_hub.LLaMA", "keras_hub.Gemma", "keras_hub.BLOOM"]


@pytest.mark.parametrize("name", KERNELS)
def test_head_axis_determines_heads(name):
    """Kernels with an axis of heads need no hints."""
    tensors, spec = tensors_of(LAYOUTS[name])
    _, read_spec = to_canonical(tensors, LAYOUTS[name])
    assert hints_of(read_spec) == hints_of(spec)


def input_error_of(tensors, layout, **hints):
    """Return the message of the error that tensors raise."""
    with pytest.raises(InputError) as input_error:
        to_canonical(tensors, layout, **hints)
    return str(input_error.value)


@pytest.mark.parametrize("candidate", ["1 x 6", "2 x 3", "3 x 2", "6 x 1"])
def test_all_fitting_heads_are_listed(candidate):
    """For a width of 6, the error lists 1 x 6, 2 x 3, 3 x 2 and 6 x 1 heads."""
    tensors, _ = tensors_of(LAYOUTS["torch.nn.MultiheadAttention"], AttentionSpec(6, 2))
    assert candidate in input_error_of(tensors, LAYOUTS["torch.nn.MultiheadAttention"])


def test_likely_head_sizes_come_first():
    """The error lists heads of 64, 128 and 32 features first, and each flag that decides."""
    rows = {"q": 512, "k": 128, "v": 128, "o": 512}
    tensors = {
        f"{name}_proj.weight": np.zeros((size, 512), np.float32) for name, size in rows.items()
    }
    words = input_error_of(tensors, LAYOUTS["transformers.LLaMA"])
    assert (
        "whose shapes fit 8 x 64 (key/value 2), 4 x 128 (key/value 1), 16 x 32 (key/value 4), "
        in words
    )
    assert words.endswith("; --num-heads or --num-kv-heads or --head-dim decides")


def test_jointly_required_flags_are_paired():
    """If no single flag decides the heads, the error suggests pairs of flags."""
    tensors = {"qkv_proj.weight": np.zeros((24, 8), np.float32)}
    words = input_error_of(tensors, LAYOUTS["qkv_proj"])
    heads, kv_heads, features = "--num-heads", "--num-kv-heads", "--head-dim"
    pairs = [f"{heads} with {kv_heads}", f"{heads} with {features}", f"{kv_heads} with {features}"]
    assert words.endswith(f"; {' or '.join(pairs)} decides")


@pytest.mark.parametrize(
    "candidate", ["4 x 4 (key/value 1)", "4 x 3 (key/value 2)", "4 x 2 (key/value 4)"]
)
def test_ambiguous_heads_list_candidates(candidate):
    """If several heads fit num_heads=4, the error lists them and the flags that decide."""
    tensors = {"qkv_proj.weight": np.zeros((24, 8), np.float32)}
    words = input_error_of(tensors, LAYOUTS["qkv_proj"], num_heads=4)
    assert candidate in words
    assert words.endswith("; --num-kv-heads or --head-dim decides")


def test_ambiguous_heads_load_with_hints():
    """num_heads=4 and num_kv_heads=2 decide that a packed tensor of 24 rows has head_dim=3."""
    tensors = {"qkv_proj.weight": np.zeros((24, 8), np.float32)}
    _, spec = to_canonical(tensors, LAYOUTS["qkv_proj"], num_heads=4, num_kv_heads=2)
    assert hints_of(spec) == {"num_heads": 4, "num_kv_heads": 2, "head_dim": 3, "rope": None}


def test_padded_heads_require_head_dim():
    """ttnn's padded heads raise an error that suggests `--head-dim`."""
    tensors, _ = tensors_of(LAYOUTS["ttnn"])
    words = input_error_of(tensors, LAYOUTS["ttnn"], num_heads=4, num_kv_heads=2)
    assert words.endswith("; --head-dim decides")


@pytest.mark.parametrize("field", ["num_heads", "num_kv_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -4, 5])
def test_invalid_head_size_raises(field, value):
    """A head size that is zero, negative or does not fit raises an error with its value."""
    tensors, spec = tensors_of(LAYOUTS["canonical"])
    hints = {**hints_of(spec), field: value}
    with rejects("the heads" if value > 0 else field, {field: value}):
        to_canonical(tensors, LAYOUTS["canonical"], **hints)


@pytest.mark.parametrize("value", [True, 4.0, "4"])
def test_non_integer_head_count_raises(value):
    """num_heads of True, 4.0 or '4' raises a TypeError."""
    tensors, _ = tensors_of(LAYOUTS["canonical"])
    with rejects_type("num_heads", num_heads=value):
        to_canonical(tensors, LAYOUTS["canonical"], num_heads=value)


def test_head_candidates_are_few_and_sorted():
    """For 4096 features the error lists four candidates; for 64, fewer heads come first."""
    tensors = {"qkv_proj.weight": np.zeros((3 * 4096, 8), np.float32)}
    words = input_error_of(tensors, LAYOUTS["qkv_proj"])
    assert words.count(" x ") == 4
    tensors = {
        f"{name}.weight": np.zeros((64, 64), np.float32) for name in ("wq", "wk", "wv", "wo")
    }
    assert "fit 1 x 64 (key/value 1), 2 x 32 (key/value 2), 4 x 16 " in input_error_of(
        tensors, LAYOUTS["meta.LLaMA"]
    )


@sample(6, seed=14)
@every_layout
def test_wrong_heads_raise_one_line(layout):
    """The error for num_heads=7 has one line in every layout."""
    tensors, _ = tensors_of(layout)
    assert "\n" not in input_error_of(tensors, layout, num_heads=7)


def test_number_as_rope_raises():
    """rope=500.0 instead of Rope(500.0) raises a TypeError."""
    tensors, spec = tensors_of(LAYOUTS["canonical"])
    with rejects_type("rope", rope=500.0):
        to_canonical(tensors, LAYOUTS["canonical"], **{**hints_of(spec), "rope": 500.0})


def test_rope_with_odd_head_dim_raises():
    """RoPE raises an error for heads of 3 features."""
    tensors, spec = tensors_of(LAYOUTS["canonical"], MHA)
    with rejects("shapes"):
        to_canonical(tensors, LAYOUTS["canonical"], **{**hints_of(spec), "rope": Rope(500.0)})


# ---- Values and shapes ---------------------------------------------------------------------------


@sample(6, seed=15)
@every_layout
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_tensor_raises(layout, value):
    """A NaN or an infinity in the smallest tensor raises an error that names a projection."""
    tensors, spec = tensors_of(layout)
    min(tensors.values(), key=np.size).flat[0] = value
    with rejects("…_proj.…"):
        to_canonical(tensors, layout, **hints_of(spec))


@sample(6, seed=16)
@every_layout
def test_non_finite_weights_raise(layout):
    """Laying out weights with a NaN in k_proj.weight raises an error with its name."""
    spec = example(layout)
    weights = random_weights(spec)
    weights["k_proj.weight"][0, 0] = np.nan
    with rejects("k_proj.weight", "1 NaN or infinities"):
        from_canonical(weights, spec, layout)


@sample(6, seed=17)
@every_layout
def test_mixed_dtypes_raise(layout):
    """One bfloat16 tensor among float32 ones raises a TypeError with both dtypes."""
    tensors, spec = tensors_of(layout)
    first = next(iter(tensors))
    tensors[first] = tensors[first].astype(ml_dtypes.bfloat16)
    with rejects_type("weights", "['bfloat16', 'float32']"):
        to_canonical(tensors, layout, **hints_of(spec))


@sample(6, seed=18)
@every_layout
@pytest.mark.parametrize("wrong", [np.int32, None], ids=["integers", "list"])
def test_non_float_tensor_raises(layout, wrong):
    """Integers, or a list instead of an array, raise a TypeError with the tensor's name."""
    tensors, spec = tensors_of(layout)
    first = next(iter(tensors))
    tensors[first] = tensors[first].tolist() if wrong is None else tensors[first].astype(wrong)
    with rejects_type(first):
        to_canonical(tensors, layout, **hints_of(spec))


@sample(12, seed=19)
@every_layout
@pytest.mark.parametrize(
    "change", [lambda x: x.reshape(-1), lambda x: x[None], lambda x: x[:0], lambda x: x[0, 0]]
)
def test_weight_of_wrong_rank_or_size_raises(layout, change):
    """A weight that is flattened, sliced, empty or has one axis more raises an error."""
    tensors, spec = tensors_of(layout)
    first = next(iter(tensors))
    tensors[first] = np.asarray(change(tensors[first]))
    with rejects("shapes"):
        to_canonical(tensors, layout, **hints_of(spec))


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("canonical", "q_proj.weight"),
        ("canonical", "out_proj.weight"),
        ("qkv_proj", "qkv_proj.weight"),
        ("transformers.GPT2", "c_attn.weight"),
        ("transformers.Falcon", "query_key_value.weight"),
        ("flax.nnx", "out.kernel"),
        ("ttnn", "qkv_proj.weight"),
    ],
)
def test_transposed_weight_raises(name, weight):
    """A transposed weight that is not square raises an error."""
    tensors, spec = tensors_of(LAYOUTS[name])
    tensors[weight] = tensors[weight].T
    with rejects("shapes"):
        to_canonical(tensors, LAYOUTS[name], **hints_of(spec))


@pytest.mark.parametrize(
    ("name", "weight", "is_transposed"),
    [
        ("transformers.BERT", "output.dense.weight", False),
        ("transformers.GPT2", "c_proj.weight", True),
    ],
)
def test_square_weight_follows_layout(name, weight, is_transposed):
    """A square output weight is transposed from GPT-2's layout, but not from BERT's."""
    tensors, spec = tensors_of(LAYOUTS[name])
    square = np.triu(np.ones((16, 16), np.float32))
    weights, _ = to_canonical({**tensors, weight: square}, LAYOUTS[name], **hints_of(spec))
    assert (weights["out_proj.weight"] == (square.T if is_transposed else square)).all()


@pytest.mark.parametrize("rope", [None, Rope(500.0)])
@pytest.mark.parametrize("name", ["qkv_proj.weight", "qkv_proj.bias", "out_proj.weight"])
@pytest.mark.parametrize("value", [1.0, np.nan])
def test_nonzero_ttnn_padding_raises(name, rope, value):
    """A one or a NaN in the padding of ttnn's heads raises an error."""
    tensors, spec = tensors_of(LAYOUTS["ttnn"], replace(example(LAYOUTS["ttnn"]), rope=rope))
    padded = tensors[name].T if name == "out_proj.weight" else tensors[name]
    padded[-1, 31] = value
    with rejects("features that pad the heads of …", "others"):
        to_canonical(tensors, LAYOUTS["ttnn"], **hints_of(spec))


def test_ttnn_padding_reveals_missing_rope():
    """ttnn's heads padded for RoPE raise an error if they are read without RoPE."""
    spec = AttentionSpec(10, 2, head_dim=40, rope=Rope(500.0))  # 64 features either way
    tensors, _ = tensors_of(LAYOUTS["ttnn"], spec)
    with rejects("features that pad the heads of q_proj.weight", "others"):
        to_canonical(tensors, LAYOUTS["ttnn"], num_heads=2, num_kv_heads=2, head_dim=40)


@sample(6, seed=20)
@every_layout
def test_conversion_keeps_its_input(layout):
    """Reading tensors of a layout does not change them."""
    tensors, spec = tensors_of(layout)
    before = bits_of(tensors)
    to_canonical(tensors, layout, **hints_of(spec))
    assert bits_of(tensors) == before
