"""`mutate` in layers: weights of each projection in any library, packed or separate, and buffers
next to them.
"""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from mha_spec import AttentionSpec, InputError
from parity import random_weights
from parity.explain.mutating import trials
from parity.explain.mutating.bugs import injections_for
from parity.explain.mutating.calls import Call
from parity.explain.mutating.carriers import carrier_of
from parity.explain.mutating.compare import Unfit, same
from parity.explain.mutating.view import View
from parity.explain.mutating.weights import OUT_WEIGHT, named_in
from parity.port.conversion.layouts import LAYOUTS, from_canonical, to_canonical
from parity.port.conversion.layouts.canonical import shapes_in

VIEW = View(
    "torch", "BTE", ("x",), roles={"query": "x"}, projections=True, biases=True, is_module=True
)
NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")
BATCH, TOKENS, WIDTH, HEADS, SIZE = 2, 6, 32, 4, 8


def inject(name, layer, x, view=VIEW, **options):
    """Return the output of a layer with a bug, or None if the call does not allow it."""
    buggy_call = injections_for(view)[0][name].make(Call(view, (x,), options, layer))
    if buggy_call is None:
        return None
    return buggy_call.run(forward)


def forward(call):
    """Call a layer; of torch, its `forward`, which is the method that bugs are injected into."""
    if isinstance(call.owner, nn.Module):
        return type(call.owner).forward(call.owner, *call.args, **call.kwargs)
    return call.owner(*call.args, **call.kwargs)


def turned(x, theta):
    """Apply RoPE to halves."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * theta ** -(
        torch.arange(half, dtype=x.dtype) / half
    )
    one, two = x.split(half, -1)
    return torch.cat(
        [one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], -1
    )


class Apart(nn.Module):
    """Four projections, RoPE, and any number of key/value heads: packed layers are compared with
    this one.
    """

    def __init__(self, num_kv_heads=HEADS):
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, num_kv_heads
        self.q_proj, self.out_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, num_kv_heads * SIZE) for _ in range(2))
        self.rope_theta = 10000.0

    def forward(self, x):
        return self.attended(self.q_proj(x), self.k_proj(x), self.v_proj(x))

    def attended(self, q, k, v):
        q, k, v = (heads.unflatten(-1, (-1, SIZE)).transpose(1, 2) for heads in (q, k, v))
        q, k = turned(q, self.rope_theta), turned(k, self.rope_theta)
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out_proj(y.transpose(1, 2).flatten(-2))


def rows(order, num_kv_heads):
    """Return the rows of q, k and v in a packed projection."""
    group = HEADS // num_kv_heads
    if order == "one after the other":
        return np.split(
            np.arange((HEADS + 2 * num_kv_heads) * SIZE),
            [HEADS * SIZE, (HEADS + num_kv_heads) * SIZE],
        )
    by_group = np.arange((HEADS + 2 * num_kv_heads) * SIZE).reshape(num_kv_heads, group + 2, SIZE)
    return [
        rows_of_part.reshape(-1)
        for rows_of_part in (by_group[:, :group], by_group[:, group], by_group[:, group + 1])
    ]


class Packed(Apart):
    def __init__(self, apart, order):
        super().__init__(apart.num_kv_heads)
        self.load_state_dict(apart.state_dict())
        self.rows = rows(order, apart.num_kv_heads)
        size = sum(map(len, self.rows))
        self.c_attn = nn.Linear(WIDTH, size, dtype=apart.q_proj.weight.dtype)
        with torch.no_grad():
            for rows_of_part, name in zip(self.rows, NAMES, strict=False):
                self.c_attn.weight[rows_of_part] = getattr(apart, name).weight
                self.c_attn.bias[rows_of_part] = getattr(apart, name).bias
        del self.q_proj, self.k_proj, self.v_proj

    def forward(self, x):
        return self.attended(*(self.c_attn(x)[..., rows] for rows in self.rows))


def layer_and_input(num_kv_heads=HEADS):
    torch.manual_seed(0)
    layer = Apart(num_kv_heads).double()
    return layer, torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.float64)


# ---- Packed --------------------------------------------------------------------------------------

IN_WEIGHTS = (
    *(
        "q_proj-transposed",
        "out_proj-transposed",
        "k-v-swapped",
        "v_proj-bias-missing",
        "scale-missing",
    ),
    *(
        "scale-by-d-model",
        "out-proj-missing",
        "q-heads-reversed",
        "v-heads-rolled",
        "kv-heads-tiled",
    ),
    *("scale-after-softmax", "rope-weights-interleaved", "rope-weights-deinterleaved"),
)


@pytest.mark.parametrize("order", ["one after the other", "by groups"])
@pytest.mark.parametrize("num_kv_heads", [HEADS, 2])
def test_packed_bugs_equal_separate_ones(order, num_kv_heads):
    """Bugs in a packed projection equal those in separate ones, or
    both raise `Unfit` with the same beginning.
    """
    apart, x = layer_and_input(num_kv_heads)
    packed = Packed(apart, order).double()
    torch.testing.assert_close(packed(x), apart(x))
    made = 0
    for name in IN_WEIGHTS:
        try:
            expected = inject(name, apart, x)
        except Unfit as error:
            with pytest.raises(Unfit, match=f"^{str(error)[:12]}"):
                inject(name, packed, x)
            continue
        assert not same(expected, apart(x)), name
        torch.testing.assert_close(inject(name, packed, x), expected, msg=name)
        made += 1
    assert (
        made >= len(IN_WEIGHTS) - 2
    )  # 2 heads of v are too few to roll, and heads that are not shared cannot be tiled


def test_unknown_packing_order_raises():
    """A packed projection in an unusual order raises `Unfit`."""
    apart, x = layer_and_input()
    packed = Packed(apart, "one after the other").double()
    packed.rows = [
        np.roll(rows, 5) for rows in np.split(np.random.default_rng(0).permutation(3 * WIDTH), 3)
    ]
    with pytest.raises(
        Unfit,
        match=(
            r"the order of features in its projections cannot be detected by calling it: .*\(96, "
            r"32\)"
        ),
    ):
        inject("k-v-swapped", packed, x)


def test_bug_in_packed_layer_leaves_no_trace():
    """After a bug in a packed projection, its weights and the random state are unchanged."""
    apart, x = layer_and_input()
    packed = Packed(apart, "by groups").double()
    before = {name: array.clone() for name, array in packed.state_dict().items()}
    torch.manual_seed(3)
    inject("k-v-swapped", packed, x)
    output = torch.rand(())
    torch.manual_seed(3)
    assert output == torch.rand(())
    assert all(torch.equal(array, before[name]) for name, array in packed.state_dict().items())


# ---- In the layouts of checkpoints ---------------------------------------------------------------

OF_MAPPING = View(
    "torch",
    "BTE",
    ("params", "x", "num_heads", "num_kv_heads"),
    roles={"query": "x", "weights": "params"},
    projections=True,
    biases=True,
)


def attend(weights, x, num_heads, num_kv_heads):
    """Compute attention with canonical weights."""
    q, k, v = (
        linear(x, weights[f"{name}_proj.weight"], weights[f"{name}_proj.bias"]) for name in "qkv"
    )
    q, k, v = (heads.unflatten(-1, (-1, SIZE)).transpose(1, 2) for heads in (q, k, v))
    y = scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(-2)
    return linear(y, weights["out_proj.weight"], weights["out_proj.bias"])


def layout_can_hold(layout, spec):
    try:
        return bool(shapes_in(layout, spec))
    except InputError:
        return False


@pytest.mark.costly("the attention is called in both orders of each layout")
@pytest.mark.parametrize("num_kv_heads", [2, pytest.param(HEADS, marks=pytest.mark.thorough)])
def test_heads_are_found_in_every_layout(num_kv_heads, monkeypatch):
    """Query heads are reversed in the layout of any checkpoint, whatever its names, axes and
    packing, as in canonical weights. Only the weights of TTNN have heads of whole tiles.
    """
    spec = AttentionSpec(WIDTH, HEADS, num_kv_heads=num_kv_heads)
    canonical = {name: torch.from_numpy(x) for name, x in random_weights(spec).items()}
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    reversed_heads = {
        name: canonical[name].unflatten(0, (HEADS, SIZE)).flip(0).flatten(0, 1)
        for name in ("q_proj.weight", "q_proj.bias")
    }
    expected = attend(canonical | reversed_heads, x, HEADS, num_kv_heads)
    layouts = [layout for layout in LAYOUTS.values() if layout_can_hold(layout, spec)]
    assert len(layouts) > 30
    for layout in layouts:

        def attend_as_stored(call, layout=layout):
            params, x, *heads = call.args
            weights, _ = to_canonical(params, layout, spec=spec)
            return attend({name: torch.tensor(w) for name, w in weights.items()}, x, *heads)

        stored = from_canonical(canonical, spec, layout)
        params = {name: torch.tensor(array) for name, array in stored.items()}
        call = Call(OF_MAPPING, (params, x, HEADS, num_kv_heads), {})
        monkeypatch.setattr(trials, "_tried", {})  # each layout is a different function
        if layout.padded:
            with pytest.raises(Unfit, match="have shapes that no known order explains"):
                injections_for(OF_MAPPING)[0]["q-heads-reversed"].make(call)
            continue
        buggy_call = injections_for(OF_MAPPING)[0]["q-heads-reversed"].make(call)
        actual = buggy_call.run(attend_as_stored)
        torch.testing.assert_close(actual, expected, msg=layout.name)


# ---- By hand -------------------------------------------------------------------------------------


def changed(layer, **weights):
    """Return the layer with other weights."""
    other = Apart(layer.num_kv_heads).double()
    other.load_state_dict(
        {
            **layer.state_dict(),
            **{name.replace("__", "."): array for name, array in weights.items()},
        }
    )
    return other


def of_heads(array, order):
    return array.unflatten(0, (-1, SIZE))[order].flatten(0, 1)


def test_query_heads_are_reversed():
    """Reversed query heads, at least two, equal weights and biases reversed by hand."""
    layer, x = layer_and_input()
    q = layer.q_proj
    expected = changed(
        layer,
        q_proj__weight=of_heads(q.weight, [3, 2, 1, 0]),
        q_proj__bias=of_heads(q.bias, [3, 2, 1, 0]),
    )
    torch.testing.assert_close(inject("q-heads-reversed", layer, x), expected(x))
    layer.num_heads = 2
    expected = changed(
        layer,
        q_proj__weight=of_heads(q.weight, [2, 3, 0, 1]),
        q_proj__bias=of_heads(q.bias, [2, 3, 0, 1]),
    )
    expected.num_heads = 2
    torch.testing.assert_close(inject("q-heads-reversed", layer, x), expected(x))


def test_shared_heads_of_a_layer_are_tiled():
    """Tiled key/value heads equal tiling by hand."""
    layer, x = layer_and_input(2)
    q, k, v = (
        getattr(layer, name)(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for name in NAMES[:3]
    )
    q, k = turned(q, 10000.0), turned(k, 10000.0)
    y = scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), is_causal=True)
    torch.testing.assert_close(
        inject("kv-heads-tiled", layer, x), layer.out_proj(y.transpose(1, 2).flatten(-2))
    )


def test_scale_is_applied_after_softmax():
    """The scale after the softmax equals the same bug made by hand."""
    layer, x = layer_and_input()
    q, k, v = (
        getattr(layer, name)(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for name in NAMES[:3]
    )
    q, k = turned(q, 10000.0), turned(k, 10000.0)
    y = scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0) / SIZE**0.5
    torch.testing.assert_close(
        inject("scale-after-softmax", layer, x), layer.out_proj(y.transpose(1, 2).flatten(-2))
    )


# ---- Bugs that are not injected, and why ---------------------------------------------------------


class Bare(nn.Module):
    """A layer whose names do not show whether its kernels are (in, out)."""

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.wq, self.wk, self.wv, self.wo = (
            nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(4)
        )


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = Apart(), Apart()


def bare(**attributes):
    layer = Apart()
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        (
            "q_proj-transposed",
            TwoLayers,
            "it holds 2 attention layers, one, other: select the class of one",
        ),
        (
            "q_proj-transposed",
            lambda: nn.Linear(4, 4),
            "no projections of q and k are known among its weights: weight",
        ),
        ("k_proj-transposed", lambda: Apart(2), r"its k_proj is not square: \(16, 32\)"),
        (
            "q-k-swapped",
            lambda: Apart(2),
            r"its q_proj and k_proj differ in shape: \(32, 32\) and \(16, 32\)",
        ),
        (
            "q_proj-bias-missing",
            lambda: bare(q_proj=nn.Linear(WIDTH, WIDTH, bias=False)),
            "its q_proj has no bias",
        ),
        ("scale-missing", lambda: bare(num_heads=None), "the number of heads is unknown"),
        (
            "out_proj-transposed",
            lambda: bare(out_proj=nn.Identity()),
            "no out_proj is known among its weights",
        ),
        ("kv-heads-tiled", Apart, "it has 4 query heads and 4 key/value heads"),
        ("q-heads-rolled", lambda: bare(num_heads=2), "it has 2 heads, and 3 are needed"),
        (
            "q-heads-reversed",
            Bare,
            "the order of its projections cannot be examined: NotImplementedError",
        ),
        ("rope-weights-interleaved", Bare, "it has no recognized RoPE"),
        ("rope-theta-500000", Bare, "its theta, frequencies, cosines and sines are all unknown"),
        (
            "mask-flipped",
            Bare,
            "it has no mask among its parameters, and no causal one among its buffers",
        ),
    ],
)
def test_impossible_bug_names_the_reason(name, layer, reason):
    """A bug that a layer does not allow raises `Unfit` with the reason."""
    with pytest.raises(Unfit, match=f"^{reason}"):
        inject(name, layer(), torch.zeros(BATCH, TOKENS, WIDTH))


def test_ambiguous_projection_raises():
    """Two weights that may both be `q_proj` raise `Unfit`."""
    layer = bare(query=nn.Linear(WIDTH, WIDTH))
    with pytest.raises(Unfit, match="two of its weights may be q_proj"):
        inject("q_proj-transposed", layer, torch.zeros(BATCH, TOKENS, WIDTH))


def test_weights_without_names_raise():
    """Weights that are an array, and no mapping of arrays by name, raise `Unfit`."""
    view = replace(VIEW, order=("x", "weights"), roles={**VIEW.roles, "weights": "weights"})
    call = Call(view, (torch.zeros(1, 2, WIDTH), torch.zeros(4, WIDTH, WIDTH)), {})
    with pytest.raises(Unfit, match="not a mapping of arrays by name, but Tensor"):
        carrier_of(call)


def out_proj_in(module):
    carrier = carrier_of(Call(VIEW, (torch.zeros(1, 2, WIDTH),), {}, module))
    return carrier.leaves[named_in(carrier).paths[OUT_WEIGHT]]


def test_out_proj_of_attention_is_found():
    """The output projection is the one of attention, not the one of an MLP or of a block's
    output.
    """
    block = nn.ModuleDict(
        {"attn": Apart(), "mlp": nn.ModuleDict({"c_proj": nn.Linear(WIDTH, WIDTH)})}
    )
    assert out_proj_in(block) is block["attn"].out_proj.weight
    bert = nn.ModuleDict(
        {
            "attention": nn.ModuleDict(
                {"self": bare(), "output": nn.ModuleDict({"dense": nn.Identity()})}
            )
        }
    )
    del bert["attention"]["self"].out_proj
    bert["attention"]["output"]["dense"] = nn.Linear(WIDTH, WIDTH)
    bert["output"] = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH)})
    assert out_proj_in(bert) is bert["attention"]["output"]["dense"].weight


# ---- flax.linen and Equinox ----------------------------------------------------------------------


class Linen(linen.Module):
    num_heads: int = HEADS

    @linen.compact
    def __call__(self, x):
        batch, num_tokens, width = x.shape
        qkv = linen.Dense(3 * width, name="qkv", bias_init=linen.initializers.normal())(x)
        q, k, v = (
            qkv.reshape(batch, num_tokens, self.num_heads, 3, -1)[..., i, :] for i in range(3)
        )
        self.sow("intermediates", "values", v)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return linen.Dense(width, name="proj")(y.reshape(batch, num_tokens, width))


class OfEquinox(eqx.Module):
    query_proj: eqx.nn.Linear
    key_proj: eqx.nn.Linear
    value_proj: eqx.nn.Linear
    output_proj: eqx.nn.Linear
    num_heads: int

    def __init__(self, key):
        made = (
            eqx.nn.Linear(WIDTH, WIDTH, key=key_of_layer)
            for key_of_layer in jax.random.split(key, 4)
        )
        self.query_proj, self.key_proj, self.value_proj, self.output_proj = made
        self.num_heads = HEADS

    def __call__(self, x):
        q, k, v = (
            jax.vmap(p)(x).reshape(1, len(x), self.num_heads, -1)
            for p in (self.query_proj, self.key_proj, self.value_proj)
        )
        return jax.vmap(self.output_proj)(jax.nn.dot_product_attention(q, k, v)[0].reshape(x.shape))


def linen_with(params, x, bug=None):
    """Return the jitted output of the layer of flax.linen, with a bug in its call."""
    view = replace(VIEW, framework="jax")

    def apply(params, x):
        layer = Linen().bind({"params": params})
        return layer(x) if bug is None else inject(bug, layer, x, view)

    return jax.jit(apply)(params, x)


@pytest.mark.parametrize(
    "name",
    [
        "k-v-swapped",
        # Packed projections of torch are changed in the same way.
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("scale-missing", "q-heads-reversed", "q_proj-bias-missing")
        ),
    ],
)
def test_packed_linen_layer_is_changed(name):
    """In a jitted linen layer, a bug equals the same change of the packed kernel by hand."""
    x = jax.random.normal(jax.random.key(0), (BATCH, TOKENS, WIDTH))
    params = Linen().init(jax.random.key(1), x)["params"]
    kernel, bias = (
        np.array(params["qkv"][leaf]).reshape(-1, HEADS, 3, SIZE) for leaf in ("kernel", "bias")
    )
    if name == "k-v-swapped":
        kernel, bias = kernel[:, :, [0, 2, 1]], bias[:, :, [0, 2, 1]]
    elif name == "q-heads-reversed":
        kernel[:, :, 0], bias[:, :, 0] = kernel[:, ::-1, 0].copy(), bias[:, ::-1, 0].copy()
    elif name == "q_proj-bias-missing":
        bias[:, :, 0] = 0
    else:
        kernel[:, :, 0] *= SIZE**0.5
        bias[:, :, 0] *= SIZE**0.5
    wrong = {
        **params,
        "qkv": {
            "kernel": jnp.asarray(kernel.reshape(WIDTH, -1)),
            "bias": jnp.asarray(bias.ravel()),
        },
    }
    output = linen_with(params, x, name)
    assert not same(output, linen_with(params, x))
    np.testing.assert_allclose(output, linen_with(wrong, x), rtol=1e-5, atol=1e-6)


def test_values_sown_by_linen_are_kept():
    """Values that a linen layer sows are kept when a bug is injected."""
    x = jax.random.normal(jax.random.key(0), (BATCH, TOKENS, WIDTH))
    layer = Linen().bind(Linen().init(jax.random.key(1), x), mutable=["intermediates"])
    inject("k-v-swapped", layer, x, replace(VIEW, framework="jax"))
    (values,) = layer.variables["intermediates"]["values"]
    assert values.shape == (BATCH, TOKENS, HEADS, SIZE)


def test_equinox_layer_is_changed():
    """In an Equinox layer, swapped projections and reversed heads
    equal the same changes by hand.
    """
    layer, x = (
        OfEquinox(jax.random.key(0)),
        jax.random.normal(jax.random.key(1), (BATCH, TOKENS, WIDTH)),
    )
    view = replace(VIEW, framework="jax")
    output = jax.vmap(lambda x: inject("k-v-swapped", layer, x, view))(x)
    wrong = eqx.tree_at(
        lambda tree: (tree.key_proj, tree.value_proj), layer, (layer.value_proj, layer.key_proj)
    )
    np.testing.assert_allclose(output, jax.vmap(wrong)(x), rtol=1e-5, atol=1e-6)
    output = inject("v-heads-reversed", layer, x[0], view)
    reversed_ = layer.value_proj.weight.reshape(HEADS, SIZE, -1)[::-1].reshape(WIDTH, -1)
    bias = layer.value_proj.bias.reshape(HEADS, SIZE)[::-1].ravel()
    wrong = eqx.tree_at(
        lambda tree: (tree.value_proj.weight, tree.value_proj.bias), layer, (reversed_, bias)
    )
    np.testing.assert_allclose(output, wrong(x[0]), rtol=1e-5, atol=1e-6)


def test_kernels_of_three_axes_are_changed():
    """Kernels of three axes are transposed as matrices, have heads
    reversed, and are replaced by the identity.
    """
    view = View(
        "jax", "BTE", ("params", "x"), roles={"query": "x", "weights": "params"}, projections=True
    )
    rng = np.random.default_rng(0)
    params = {
        name: jnp.asarray(rng.standard_normal((WIDTH, HEADS, SIZE))) for name in ("wq", "wk", "wv")
    }
    variables = {"layer": {**params, "wo": jnp.asarray(rng.standard_normal((HEADS, SIZE, WIDTH)))}}
    call = Call(view, (variables, jnp.zeros((1, 2, WIDTH))), {})

    def made(name):
        return injections_for(view)[0][name].make(call).run(lambda call: call.args[0]["layer"])

    np.testing.assert_array_equal(
        made("k_proj-transposed")["wk"].reshape(WIDTH, WIDTH), params["wk"].reshape(WIDTH, -1).T
    )
    np.testing.assert_array_equal(
        made("out_proj-transposed")["wo"].reshape(WIDTH, WIDTH),
        variables["layer"]["wo"].reshape(WIDTH, -1).T,
    )
    np.testing.assert_array_equal(made("q-heads-reversed")["wq"], params["wq"][:, ::-1])
    np.testing.assert_array_equal(
        made("out-proj-missing")["wo"].reshape(WIDTH, WIDTH), np.eye(WIDTH)
    )


# ---- Buffers and arguments next to the weights ---------------------------------------------------


class WithMask(Apart):
    def __init__(self, mask):
        super().__init__()
        self.register_buffer("bias", mask)

    def forward(self, x):
        return self.bias[..., : x.shape[1], : x.shape[1]].clone()


TRIL = torch.ones(8, 8).tril()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("mask-flipped", lambda t, s: s <= t),
        ("mask-ignored", lambda t, s: (s < 0) & (t < 0)),
        ("causal-off-by-one", lambda t, s: s > t + 1),
        ("causal-excludes-self", lambda t, s: s >= t),
    ],
)
@pytest.mark.parametrize(
    "mask",
    [
        TRIL[None, None],
        TRIL.bool(),
        ~TRIL.bool(),
        torch.zeros(8, 8).masked_fill(TRIL == 0, float("-inf")),
    ],
    ids=["numbers", "shows", "hides", "added"],
)
def test_causal_mask_in_buffer_is_changed(mask, name, wrong):
    """A causal mask in a buffer, of any kind, is changed in the
    call with its dtype; the buffer is restored.
    """
    layer, x = WithMask(mask), torch.zeros(BATCH, TOKENS, WIDTH)
    actual = inject(name, layer, x)
    t, s = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    is_visible, hidden = mask[..., 0, 0].squeeze(), mask[..., 0, 1].squeeze()
    expected = torch.where(wrong(t, s), hidden, is_visible)
    assert torch.equal(actual.squeeze(), expected)
    assert actual.dtype == mask.dtype
    assert torch.equal(layer.bias, mask)


def test_other_buffer_is_not_a_mask():
    """A buffer with the identity does not count as a causal mask and raises `Unfit`."""
    with pytest.raises(Unfit, match="no causal one among its buffers"):
        inject("mask-flipped", WithMask(torch.eye(8)), torch.zeros(BATCH, TOKENS, WIDTH))


class WithFrequencies(Apart):
    def __init__(self):
        super().__init__()
        self.rotary = nn.Module()
        self.rotary.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, SIZE, 2) / SIZE))

    def forward(self, x):
        return self.rotary.inv_freq


def test_rope_frequencies_change_with_base():
    """Frequencies in a buffer become the frequencies of base 500000; base 10000, its own, raises
    `Unfit`.
    """
    layer, x = WithFrequencies(), torch.zeros(BATCH, TOKENS, WIDTH)
    output = inject("rope-theta-500000", layer, x)
    torch.testing.assert_close(output, 500000.0 ** -(torch.arange(0, SIZE, 2) / SIZE))
    with pytest.raises(Unfit, match="its theta is 10000"):
        inject("rope-theta-10000", layer, x)


@pytest.mark.parametrize("how", ["halves", "neighbours", "once"])
@pytest.mark.parametrize("as_pair", [True, False])
def test_cosines_and_sines_change_with_base(how, as_pair):
    """Cosines and sines become the ones of base 500000; its own base, and
    positions that do not start at 0, raise `Unfit`.
    """

    def table(theta):
        angles = torch.arange(TOKENS)[:, None] * theta ** -(torch.arange(0, SIZE, 2) / SIZE)
        angles = {
            "halves": angles.repeat(1, 2),
            "neighbours": angles.repeat_interleave(2, -1),
            "once": angles,
        }[how]
        return angles.cos()[None], angles.sin()[None]

    roles = {"query": "x", "position_embeddings": "pair", "cos": "cos", "sin": "sin"}
    view = replace(VIEW, order=("x",), roles=roles, is_module=False)
    inputs = (
        {"pair": table(10000.0)}
        if as_pair
        else dict(zip(("cos", "sin"), table(10000.0), strict=True))
    )
    call = Call(view, (torch.zeros(1, TOKENS, WIDTH),), inputs)
    make = injections_for(view)[0]["rope-theta-500000"].make
    output = make(call).run(
        lambda call: call.kwargs["pair"] if as_pair else (call.kwargs["cos"], call.kwargs["sin"])
    )
    for one, other in zip(output, table(500000.0), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    with pytest.raises(Unfit, match="its theta is 10000"):
        injections_for(view)[0]["rope-theta-10000"].make(call)
    later = {
        name: tuple(x[:, 1:] for x in value) if as_pair else value[:, 1:]
        for name, value in inputs.items()
    }
    with pytest.raises(Unfit, match="do not belong to positions 0, 1, 2"):
        make(Call(view, (torch.zeros(1, TOKENS - 1, WIDTH),), later))


def test_base_argument_is_changed():
    """An argument `theta` becomes 500000; its own value raises `Unfit`."""
    view = View("torch", "BNTH", ("q", "theta"), roles={"query": "q", "theta": "theta"})
    call = Call(view, (torch.zeros(1, 1, 2, 4),), {"theta": 10000.0})
    assert (
        injections_for(view)[0]["rope-theta-500000"]
        .make(call)
        .run(lambda call: call.kwargs["theta"])
        == 500000.0
    )
    with pytest.raises(Unfit, match="its theta is 10000"):
        injections_for(view)[0]["rope-theta-10000"].make(call)


def test_additive_mask_needs_no_polarity():
    """An additive mask is changed without a declaration; a boolean one
    raises `Unfit` that suggests `--mask-true`.
    """
    view = replace(VIEW, order=("x", "mask"), roles={"query": "x", "mask": "mask"})
    added = torch.zeros(TOKENS, TOKENS).masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -1e9)
    buggy_call = injections_for(view)[0]["causal-excludes-self"].make(
        Call(view, (torch.zeros(1, TOKENS, WIDTH), added), {})
    )
    assert torch.equal(
        buggy_call.run(lambda call: call.args[1]) == 0, torch.ones(TOKENS, TOKENS).tril(-1).bool()
    )
    with pytest.raises(Unfit, match=r"declare it \(--mask-true\)"):
        injections_for(view)[0]["causal-excludes-self"].make(
            Call(view, (torch.zeros(1, TOKENS, WIDTH), added == 0), {})
        )
