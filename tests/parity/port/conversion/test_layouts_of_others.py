"""With converted tensors, equations of libraries not installed here match the reference.

Each equation is written in NumPy and float64 after the source that its layout names, with its names
of axes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from helpers.input_errors import rejects
from helpers.samples import sample

from mha_spec import Gate, Latent, Norm, Rope, YarnScaling
from parity import AttentionSpec, Case, random_weights
from parity.measure.core.problem import make_problem
from parity.measure.core.trace import Reference
from parity.measure.files import open_tensors, write_tensors
from parity.port.conversion.bits import same_bits
from parity.port.conversion.convert import convert_file, load
from parity.port.conversion.layouts import LAYOUTS, from_canonical, to_canonical
from parity.port.conversion.layouts.layout import Tensor

# ---- Operations between projections --------------------------------------------------------------


def frequencies(theta, size):
    """1 / theta ** (2 i / size), in float32 as in all of these libraries."""
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    return 1 / (theta ** exponents.astype(np.float64)).astype(np.float32)


def angles(x, theta):
    """Angles of each position and pair, (T, H / 2)."""
    return np.outer(np.arange(x.shape[1]), frequencies(theta, x.shape[-1]))


def halves(x, theta):
    """`split(x, 2)` rotated: MaxText's RotaryEmbedding, Tunix's apply_rope, torchtitan's
    CosSinRoPE.
    """
    first, second = np.split(x, 2, axis=-1)
    sin, cos = (f(angles(x, theta))[:, None] for f in (np.sin, np.cos))
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def laid_out_anew(x, theta):
    """keras_hub's Gemma: rotated halves, whose features then alternate."""
    first, second = np.split(halves(x, theta), 2, axis=-1)
    return np.stack([first, second], axis=-1).reshape(x.shape)


def neighbours(x, theta):
    """`view_as_complex` of (…, H / 2, 2): torchtitan's ComplexRoPE, MaxText's
    LLaMARotaryEmbedding.
    """
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles(x, theta))[:, None]
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def rms(x, weight, eps=1e-6):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def attend(q, k, v, scale, sinks=None):
    """Causal attention of grouped heads, (B, T, N, H)."""
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) * scale
    scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    beside = np.full((*scores.shape[:-1], 0), 0.0) if sinks is None else sinks[:, None, None]
    if sinks is not None:
        beside = np.broadcast_to(beside, (*scores.shape[:-1], 1))
    every = np.exp(np.concatenate([scores, beside], axis=-1))
    weights = every[..., : scores.shape[-1]] / every.sum(axis=-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weights, v)


# ---- The projections -----------------------------------------------------------------------------


def einsums(query, key, out, names, leaf="kernel", bias="{}.bias"):
    """Projections by equations, with biases if there are any."""

    def one(tensors, equation, name, x):
        b = tensors.get(bias.format(name), np.zeros(1))
        y = np.einsum(equation, x, tensors[f"{name}.{leaf}"])
        return y + (b.reshape(y.shape[2:]) if b.size > 1 else b)

    def project(tensors, spec, x):
        return [
            one(tensors, eq, name, x) for eq, name in zip((query, key, key), names[:3], strict=True)
        ]

    return project, lambda tensors, spec, context: one(tensors, out, names[3], context)


def gemma(tensors, spec, x):
    if "qkv_einsum.w" in tensors:
        return list(np.einsum("BTD,SNDH->SBTNH", x, tensors["qkv_einsum.w"]))
    query = np.einsum("BTD,NDH->BTNH", x, tensors["q_einsum.w"])
    return [query, *np.einsum("BSD,CKDH->CBSKH", x, tensors["kv_einsum.w"])]


def fused(tensors, spec, x):
    """split_qkv of one device: [num_query_heads, num_query_heads + num_kv_heads] on the axis of
    heads.
    """
    heads = np.einsum("bqd,dnh->bqnh", x, tensors["qkv_proj.kernel"]) + tensors.get(
        "qkv_proj.bias", 0.0
    )
    return np.split(heads, [spec.num_heads, spec.num_heads + spec.num_kv_heads], axis=2)


def fused_of_parts(parts):
    """split_qkv of a mesh that divides heads: each device splits its own heads."""

    def project(tensors, spec, x):
        heads = np.einsum("bqd,dnh->bqnh", x, tensors["qkv_proj.kernel"]) + tensors.get(
            "qkv_proj.bias", 0.0
        )
        local = []
        for part in np.split(heads, parts, axis=2):
            queries = part.shape[2] * spec.num_heads // (spec.num_heads + 2 * spec.num_kv_heads)
            local.append(
                np.split(part, [queries, queries + (part.shape[2] - queries) // 2], axis=2)
            )
        return [np.concatenate(arrays, axis=2) for arrays in zip(*local, strict=True)]

    return project


def gpt3(tensors, spec, x):
    """qkv_projection of Gpt3MultiHeadAttention: qkv_proj[:, :, 0, ...], 1 and 2."""
    mixed = np.einsum("bqd,dpnh->bqpnh", x, tensors["qkv_proj.kernel"]) + tensors["qkv_proj.bias"]
    return [mixed[:, :, index, ...] for index in range(3)]


def yarn(x, rope):
    """YarnRotaryEmbedding: interleaved pairs or halves; the result has real parts first."""
    size, base, scaling = x.shape[-1], rope.theta, rope.scaling
    freqs = frequencies(base, size)
    if scaling is not None:
        low, high = (
            size * np.log(scaling.original_length / (turns * 2 * np.pi)) / (2 * np.log(base))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        low, high = max(int(np.floor(low)), 0), min(int(np.ceil(high)), size - 1)
        smooth = 1 - np.clip((np.arange(size // 2, dtype=np.float32) - low) / (high - low), 0, 1)
        freqs = freqs / scaling.factor * (1 - smooth) + freqs * smooth
    first, second = (
        (x[..., ::2], x[..., 1::2]) if rope.pairs == "interleaved" else np.split(x, 2, axis=-1)
    )
    turned = (first + 1j * second) * np.exp(1j * np.outer(np.arange(x.shape[1]), freqs))[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def mla(tensors, spec, x):
    """mla_query_projection, mla_kv_projection and mla_get_key_value: all heads, scaled q."""
    latent, own_features = spec.latent, spec.head_dim - spec.latent.rope_dim
    softmax_scale = spec.head_dim**-0.5
    if spec.rope.scaling is not None:
        softmax_scale *= (
            0.1 * spec.rope.scaling.mscale_all_dim * np.log(spec.rope.scaling.factor) + 1.0
        ) ** 2
    if "query.kernel" in tensors:
        q = np.einsum("bld,dnh->blnh", x, tensors["query.kernel"])
    else:
        low_rank_q = rms(x @ tensors["wq_a.kernel"], tensors["q_norm.scale"])
        q = np.einsum("blr,rnh->blnh", low_rank_q, tensors["wq_b.kernel"])
    q_nope, q_pe = np.split(q, [own_features], axis=-1)
    query = np.concatenate([q_nope, yarn(q_pe, spec.rope)], axis=-1) * softmax_scale
    low_rank_main, low_rank_rope = np.split(x @ tensors["wkv_a.kernel"], [latent.kv_rank], axis=-1)
    key_rope = yarn(low_rank_rope[:, :, None], spec.rope)
    kv_out = np.einsum(
        "blr,rnh->blnh", rms(low_rank_main, tensors["kv_norm.scale"]), tensors["wkv_b.kernel"]
    )
    key_nope, value = np.split(kv_out, [own_features], axis=-1)
    key_rope = np.broadcast_to(key_rope, (*key_nope.shape[:3], latent.rope_dim))
    return [query, np.concatenate([key_nope, key_rope], axis=-1), value]


def gemma_out(tensors, spec, context):
    return np.einsum("BTNH,NHD->BTD", context, tensors["attn_vec_einsum.w"])


def linear(tensors, name, x):
    return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)


def titan(tensors, spec, x):
    return [
        linear(tensors, f"qkv_linear.w{p}", x).reshape(*x.shape[:2], -1, spec.head_dim)
        for p in "qkv"
    ]


def titan_out(tensors, spec, context):
    return linear(tensors, "wo", context.reshape(*context.shape[:2], -1))


def megatron(tensors, spec, x):
    """get_query_key_value_tensors: [sq, b, ng, (np/ng + 2) * hn], or with the gate (2 * np/ng + 2),
    split along it.
    """
    groups, size = spec.num_kv_heads, spec.head_dim
    of_queries = spec.num_heads // groups * size
    lengths = [of_queries] * (2 if spec.gate else 1) + [size, size]
    mixed = linear(tensors, "linear_qkv", x).reshape(*x.shape[:2], groups, sum(lengths))
    parts = np.split(mixed, np.cumsum(lengths)[:-1], axis=-1)
    query, *gate, key, value = (part.reshape(*x.shape[:2], -1, size) for part in parts)
    return [query, key, value, *gate]


def megatron_out(tensors, spec, context):
    return linear(tensors, "linear_proj", context.reshape(*context.shape[:2], -1))


def bloom_out(tensors, spec, context):
    return (
        context.reshape(*context.shape[:2], -1) @ tensors["output_dense.kernel"]
        + tensors["output_dense.bias"]
    )


KERAS = ("query", "key", "value", "attention_output")
MAXTEXT = einsums(
    "bqd,dnh->bqnh", "bkd,dnh->bknh", "bqnh,nhd->bqd", ("query", "key", "value", "out")
)
KERAS_LLAMA = einsums("bqm,muh->bquh", "bkm,mvh->bkvh", "bquh,uhm->bqm", KERAS)
KERAS_GEMMA = einsums("btd,ndh->btnh", "bsd,kdh->bskh", "btnh,nhd->btd", KERAS)
BLOOM = einsums(
    "btm,mnh->btnh", "bsm,mnh->bsnh", "", ("query_dense", "key_dense", "value_dense", "")
)[0]
TUNIX = einsums(
    "BTD,DNH->BTNH",
    "BSD,DKH->BSKH",
    "BTNH,NHD->BTD",
    [f"{p}_proj" for p in "qkvo"],
    leaf="w",
    bias="{0[0]}_bias",
)

# ---- The layers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnPaper:
    """A layer of a library: its layout, its specification and its equations.

    If `is_done`, `project` also rotates queries and keys, and multiplies queries by the scale.
    """

    layout: str
    spec: AttentionSpec
    project: Callable
    out: Callable
    rotate: Callable = halves
    norms: tuple[str, str] = ("", "")
    sinks: str = ""
    is_done: bool = False

    def run(self, tensors, x):
        tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        q, k, v, *gate = self.project(tensors, self.spec, x.astype(np.float64))
        if self.spec.qk_norm is not None:
            q, k = (
                rms(y, tensors[n] + (self.spec.qk_norm.weight == "1+w"))
                for y, n in zip((q, k), self.norms, strict=True)
            )
        if self.spec.rope is not None and not self.is_done:
            q, k = (self.rotate(y, self.spec.rope.theta) for y in (q, k))
        context = attend(
            q, k, v, 1.0 if self.is_done else self.spec.score_scale, tensors.get(self.sinks)
        )
        return self.out(tensors, self.spec, context / (1 + np.exp(-gate[0])) if gate else context)


GROUPED = AttentionSpec(
    30, 6, num_kv_heads=2, head_dim=4, qkv_bias=False, out_bias=False, rope=Rope(500.0)
)
BIASED = replace(GROUPED, qkv_bias=True, out_bias=True)
NORMED, NORMED_1W = (replace(GROUPED, qk_norm=Norm(weight=weight)) for weight in ("w", "1+w"))
SINKS = replace(BIASED, sinks=True)
LATENTS = AttentionSpec(
    *(30, 6),
    head_dim=10,
    value_head_dim=6,
    qkv_bias=False,
    latent=Latent(12, 6, q_rank=14),
    rope=Rope(
        500.0,
        rotary_dim=6,
        rotated="last",
        pairs="interleaved",
        scaling=YarnScaling(4.0, 64, beta_fast=8.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=0.7),
    ),
)
WHOLE_QUERIES = replace(
    LATENTS, latent=Latent(12, 6), out_bias=False, rope=Rope(500.0, rotary_dim=6, rotated="last")
)
OF_MAXTEXT, OF_TUNIX = ("query_norm.scale", "key_norm.scale"), ("q_norm.w", "k_norm.w")
OF_KERAS = ("query_dense_layernorm.scale", "key_dense_layernorm.scale")
OF_GEMMA, OF_TITAN = ("_query_norm.scale", "_key_norm.scale"), ("q_norm.weight", "k_norm.weight")
OF_MEGATRON, OFFSET = ("q_layernorm.weight", "k_layernorm.weight"), "core_attention.softmax_offset"

LAYERS = {
    "maxtext": OnPaper("maxtext", replace(SINKS, scale=1.0), *MAXTEXT, sinks="sinks"),
    "maxtext, norms": OnPaper("maxtext", replace(NORMED, scale=0.3), *MAXTEXT, norms=OF_MAXTEXT),
    "maxtext, Qwen2": OnPaper("maxtext", replace(GROUPED, qkv_bias=True, scale=1.0), *MAXTEXT),
    "maxtext, LLaMA 3.1": OnPaper(
        "maxtext.LLaMA-3.1", replace(GROUPED, scale=1.0), *MAXTEXT, rotate=neighbours
    ),
    "maxtext, fused": OnPaper(
        "maxtext.qkv_proj", replace(SINKS, scale=1.0), fused, MAXTEXT[1], sinks="sinks"
    ),
    **{
        f"maxtext, fused, {parts} parts": OnPaper(
            f"maxtext.qkv_proj.{parts}",
            replace(BIASED, num_heads=24, num_kv_heads=8, scale=1.0),
            fused_of_parts(parts),
            MAXTEXT[1],
        )
        for parts in (2, 4, 8)
    },
    "maxtext, GPT-3": OnPaper(
        "maxtext.GPT-3", replace(BIASED, num_kv_heads=6, rope=None), gpt3, MAXTEXT[1]
    ),
    "maxtext, MLA": OnPaper("maxtext.MLA", LATENTS, mla, MAXTEXT[1], is_done=True),
    "maxtext, MLA, whole queries": OnPaper(
        "maxtext.MLA", WHOLE_QUERIES, mla, MAXTEXT[1], is_done=True
    ),
    "tunix, LLaMA": OnPaper("tunix.LLaMA", GROUPED, *TUNIX),
    "tunix, Qwen2": OnPaper("tunix.LLaMA", replace(GROUPED, qkv_bias=True), *TUNIX),
    "tunix, Qwen3": OnPaper("tunix.LLaMA", NORMED, *TUNIX, norms=OF_TUNIX),
    "tunix, Gemma": OnPaper("tunix.Gemma", replace(GROUPED, num_kv_heads=6), gemma, gemma_out),
    "tunix, Gemma 3": OnPaper(
        "tunix.Gemma", replace(NORMED_1W, scale=0.3), gemma, gemma_out, norms=OF_GEMMA
    ),
    "keras_hub, LLaMA": OnPaper("keras_hub.LLaMA", GROUPED, *KERAS_LLAMA),
    "keras_hub, Qwen": OnPaper("keras_hub.LLaMA", replace(GROUPED, qkv_bias=True), *KERAS_LLAMA),
    "keras_hub, Qwen3": OnPaper("keras_hub.LLaMA", NORMED, *KERAS_LLAMA, norms=OF_KERAS),
    "keras_hub, gpt-oss": OnPaper("keras_hub.LLaMA", SINKS, *KERAS_LLAMA, sinks="sinks"),
    "keras_hub, Gemma": OnPaper("keras_hub.Gemma", GROUPED, *KERAS_GEMMA, rotate=laid_out_anew),
    "keras_hub, Gemma 3": OnPaper("keras_hub.Gemma", NORMED_1W, *KERAS_GEMMA, norms=OF_MAXTEXT),
    "keras_hub, BLOOM": OnPaper(
        "keras_hub.BLOOM", replace(BIASED, num_kv_heads=6, rope=None), BLOOM, bloom_out
    ),
    "torchtitan, LLaMA": OnPaper("torchtitan.LLaMA", GROUPED, titan, titan_out, rotate=neighbours),
    "torchtitan, Qwen3": OnPaper("torchtitan.Qwen3", NORMED, titan, titan_out, norms=OF_TITAN),
    "torchtitan, gpt-oss": OnPaper("torchtitan.Qwen3", SINKS, titan, titan_out, sinks="sinks"),
    "megatron": OnPaper("megatron", SINKS, megatron, megatron_out, sinks=OFFSET),
    "megatron, norms": OnPaper("megatron", NORMED_1W, megatron, megatron_out, norms=OF_MEGATRON),
    "megatron, gate": OnPaper(
        "megatron.gate", replace(BIASED, gate=Gate(bias=True)), megatron, megatron_out
    ),
}
every_layer = pytest.mark.parametrize("layer", LAYERS.values(), ids=list(LAYERS))


def errors(layer, layout):
    """Largest error with converted weights, relative to the reference's largest value."""
    weights = random_weights(layer.spec, seed=1)
    problem = make_problem(
        Case("paper", layer.spec, "equations", seq_len=7, is_causal=True), "float32", weights
    )
    expected = Reference(problem).accumulated["output"]
    actual = layer.run(from_canonical(weights, layer.spec, layout), problem.inputs["query"])
    return np.abs(actual - expected).max() / np.abs(expected).max()


@sample(12)
@every_layer
def test_library_equations_match_reference(layer):
    """With converted weights, a library's equations match the reference to 1e-13 of its maximum."""
    assert (
        errors(layer, LAYOUTS[layer.layout]) < 1e-13
    )  # both in float64: rounding of 1e-16 in sums of 30 terms


def test_every_library_layout_has_equations():
    """Every layout of maxtext, tunix, keras_hub, torchtitan and megatron is tested on paper."""
    theirs = ("maxtext", "tunix", "keras_hub", "torchtitan", "megatron")
    assert {layer.layout for layer in LAYERS.values()} == {
        name for name in LAYOUTS if name.startswith(theirs)
    }


def holding(layout, name, holds):
    """The layout with other projections in a tensor."""
    forms = [
        tuple(Tensor(t.name, holds, t.kind, t.axes) if t.name == name else t for t in form)
        for form in layout.forms
    ]
    return replace(layout, forms=tuple(forms))


def with_axes(layout, name, axes):
    """The layout with the axes of a tensor in a different order."""
    forms = [
        tuple(replace(t, axes=axes) if t.name == name else t for t in form) for form in layout.forms
    ]
    return replace(layout, forms=tuple(forms))


WRONG = {
    "maxtext, LLaMA 3.1": lambda layout: replace(layout, rope="half"),
    "maxtext": lambda layout: replace(layout, rope="interleaved"),
    "maxtext, fused": lambda layout: replace(layout, grouped=True),
    "maxtext, fused, 4 parts": lambda layout: replace(layout, blocks=2),
    "maxtext, GPT-3": lambda layout: holding(layout, "qkv_proj.kernel", "qvk"),
    "maxtext, MLA": lambda layout: with_axes(layout, "out.kernel", "h n e"),
    "torchtitan, LLaMA": lambda layout: replace(layout, rope="half"),
    "torchtitan, Qwen3": lambda layout: replace(layout, rope="interleaved"),
    "tunix, Gemma 3": lambda layout: holding(layout, "kv_einsum.w", "vk"),
    "tunix, Gemma": lambda layout: holding(layout, "qkv_einsum.w", "qvk"),
    "megatron": lambda layout: replace(layout, grouped=False),
    "megatron, gate": lambda layout: holding(layout, "linear_qkv.weight", "gqkv"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_layout_changes_output(name):
    """A layout with a wrong order, axis or RoPE pairing causes a relative error above 1e-3."""
    layer = LAYERS[name]
    assert errors(layer, WRONG[name](LAYOUTS[layer.layout])) > 1e-3


# ---- Axes of projections -------------------------------------------------------------------------


def test_tunix_gemma_stacks_q_k_and_v():
    """Tunix's qkv_einsum.w stacks q, k and v, each with the axes (heads, d_model, head_dim)."""
    spec = replace(GROUPED, num_kv_heads=6)
    weights = random_weights(spec)
    laid_out = from_canonical(weights, spec, LAYOUTS["tunix.Gemma"])["qkv_einsum.w"]
    assert laid_out.shape == (3, 6, 30, 4)
    for index, p in enumerate("qkv"):
        assert (
            laid_out[index] == weights[f"{p}_proj.weight"].reshape(6, 4, 30).swapaxes(1, 2)
        ).all()


def test_grouped_form_loads_ungrouped_heads():
    """Tunix's form for grouped heads is also read if there are as many key/value heads as heads."""
    spec = replace(GROUPED, num_kv_heads=6)
    weights = random_weights(spec)
    layout = LAYOUTS["tunix.Gemma"]
    grouped = from_canonical(weights, spec, replace(layout, forms=layout.forms[1:]))
    assert grouped.keys() == {"q_einsum.w", "kv_einsum.w", "attn_vec_einsum.w"}
    back, read_spec = to_canonical(grouped, layout, rope=spec.rope)
    assert read_spec == spec
    assert all((back[name] == x).all() for name, x in weights.items())


# ---- Scanned layers ------------------------------------------------------------------------------

PREFIX, SCALED = "params.decoder.layers.self_attention", replace(NORMED, scale=1.0)
SCANNED = {
    "maxtext": SCALED,
    "maxtext.qkv_proj.2": SCALED,
    "maxtext.GPT-3": replace(BIASED, num_kv_heads=6, rope=None),
    "maxtext.MLA": LATENTS,
}
every_scanned = pytest.mark.parametrize("layout", SCANNED)


def scanned(tmp_path, axis, count=3, layout="maxtext"):
    """Write a file of layers stacked on an axis; return its path and their canonical weights."""
    spec = SCANNED[layout]
    weights = [random_weights(spec, seed=i) for i in range(count)]
    layers = [from_canonical(x, spec, LAYOUTS[layout]) for x in weights]
    tensors = {
        f"{PREFIX}.{name}": np.stack([layer[name] for layer in layers], axis) for name in layers[0]
    }
    path = tmp_path / "a.npz"
    write_tensors(
        path, {name: (x.shape, x.dtype) for name, x in tensors.items()}, tensors.__getitem__
    )
    return path, weights


@every_scanned
@pytest.mark.parametrize("axis", [0, 1])
def test_maxtext_scan_axis_is_detected(tmp_path, layout, axis):
    """Each scanned layer loads bit for bit, whether the layers are stacked on axis 0 or 1."""
    path, weights = scanned(tmp_path, axis, layout=layout)
    for index, expected in enumerate(weights):
        loaded, spec = load(path, layout, prefix=f"{PREFIX}[{index}]", spec=SCANNED[layout])
        assert spec == SCANNED[layout]
        assert same_bits(loaded, expected)


@every_scanned
def test_maxtext_scan_round_trip_is_exact(tmp_path, layout):
    """Scanned layers become numbered ones and scanned ones again exactly, or a stack of mha_jax."""
    path, weights = scanned(tmp_path, 1, layout=layout)
    hints = {"source": layout, "prefix": PREFIX, "spec": SCANNED[layout]}
    convert_file(
        path, tmp_path / "c.safetensors", target="canonical", to_prefix="layers.{i}", **hints
    )
    for index, expected in enumerate(weights):
        assert same_bits(load(tmp_path / "c.safetensors", prefix=f"layers.{index}")[0], expected)
    convert_file(
        tmp_path / "c.safetensors",
        tmp_path / "b.npz",
        target=layout,
        prefix="layers.{i}",
        to_prefix=PREFIX,
    )
    with open_tensors(path) as before, open_tensors(tmp_path / "b.npz") as after:
        assert before.infos.keys() == after.infos.keys()
        for name in before.infos:
            assert before.infos[name].shape == after.infos[name].shape
            assert before.read(name).tobytes() == after.read(name).tobytes()
    assert same_bits(load(tmp_path / "b.npz", prefix=f"{PREFIX}[2]")[0], weights[2])
    convert_file(
        path, tmp_path / "s.npz", target="mha_jax", **hints
    )  # a stack again, on the first axis
    with open_tensors(tmp_path / "s.npz") as file:
        assert {info.shape[0] for info in file.infos.values()} == {3}
    assert same_bits(load(tmp_path / "s.npz", prefix=f"{PREFIX}[1]")[0], weights[1])


def test_ambiguous_stack_axis_raises(tmp_path):
    """A stack of three 3 x 3 layers, which fits on axis 0 and on axis 1, raises an error."""
    spec = AttentionSpec(3, 3, head_dim=3, d_in=3, qkv_bias=False, out_bias=False, scale=1.0)
    layer = from_canonical(random_weights(spec), spec, LAYOUTS["maxtext"])
    tensors = {f"{PREFIX}.{name}": np.stack([x] * 3) for name, x in layer.items()}
    write_tensors(
        tmp_path / "a.npz",
        {name: (x.shape, x.dtype) for name, x in tensors.items()},
        tensors.__getitem__,
    )
    with rejects(
        "the axis of a stack",
        "shapes that fit on [0, 1]",
        where="params.decoder.layers.self_attention",
    ):
        load(tmp_path / "a.npz", "maxtext", prefix=f"{PREFIX}[0]", spec=spec)


def test_maxtext_requires_spec_with_scale(tmp_path):
    """Loading a maxtext layer without a spec, or with a spec that has no scale, raises an error."""
    path, _ = scanned(tmp_path, 0)
    with rejects("a layer in maxtext", where="params.decoder.layers.self_attention"):
        load(path, "maxtext", prefix=PREFIX, num_heads=6)
    with rejects("the layer"):
        load(path, "maxtext", prefix=PREFIX, spec=NORMED)


# ---- Latents with an indexer ---------------------------------------------------------------------


def test_maxtext_indexer_is_rejected(tmp_path):
    """An indexer next to MaxText's latents raises an error that names its tensor."""
    tensors = from_canonical(random_weights(LATENTS), LATENTS, LAYOUTS["maxtext.MLA"])
    tensors = {
        f"a.{name}": x
        for name, x in (tensors | {"indexer.wk.kernel": np.zeros((30, 4), np.float32)}).items()
    }
    write_tensors(
        tmp_path / "a.npz",
        {name: (x.shape, x.dtype) for name, x in tensors.items()},
        tensors.__getitem__,
    )
    with rejects("tensors", "unknown names ['indexer.wk.kernel']", where="a"):
        load(tmp_path / "a.npz", "maxtext.MLA", prefix="a", spec=LATENTS)
