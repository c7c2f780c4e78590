"""Layers that compute attention themselves: a tap records their operations; they are identified or
rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.samples import sample
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, FalconConfig, T5Config

import parity
from mha_spec import Alibi, RelativeBias, Rope
from parity.explain.identification import Identification, identify

HEADS, WIDTH = 4, 8
Attend = Callable[..., Tensor]


class PlainAttention(nn.Module):
    """Attention as commonly written: projections, and a function of heads (B, T, N, H)."""

    def __init__(self, attend: Attend, kv_heads: int = HEADS, table: Tensor | None = None) -> None:
        super().__init__()
        self.query, self.out = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(2))
        self.key, self.value = (
            nn.Linear(HEADS * WIDTH, kv_heads * WIDTH, bias=False) for _ in range(2)
        )
        self.attend = attend
        self.bias = None if table is None else nn.Embedding.from_pretrained(table)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, WIDTH))
            for projection in (self.query, self.key, self.value)
        )
        return self.out(self.attend(self, q, k, v).flatten(2))


def by_heads(*parts: Tensor) -> list[Tensor]:
    """Return (B, T, N, H) as (B, N, T, H)."""
    return [part.transpose(1, 2) for part in parts]


def folded(*parts: Tensor) -> list[Tensor]:
    """Return (B, T, N, H) as (B * N, T, H)."""
    return [part.transpose(1, 2).flatten(0, 1) for part in parts]


def unfolded(context: Tensor) -> Tensor:
    return context.unflatten(0, (-1, HEADS)).transpose(1, 2)


def causal(x: Tensor) -> Tensor:
    """Return a mask of the keys after each query, (T, S)."""
    return torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)


def distances(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1]) - torch.arange(x.shape[-2])[:, None]


def attended(scores: Tensor, v: Tensor) -> Tensor:
    """Return the context (B, T, N, H) of scores (B, N, T, S) and values (B, T, N, H)."""
    return torch.einsum("bnts,bsnh->btnh", scores.softmax(-1), v)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(WIDTH)


# ---- Equivalent implementations ------------------------------------------------------------------


def einsum(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attended(scores_of(q, k), v)


def keys_first(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (
        torch.einsum("btnh,bsnh->btsn", q, k) * WIDTH**-0.5
    )  # softmax over an axis that is not the last one
    return torch.einsum("bsnh,btsn->btnh", v, scores.softmax(2))


def bmm(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = folded(q, k, v)
    scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(WIDTH)
    scores = scores.float().masked_fill(causal(scores), -1e9)
    weights = F.dropout(F.softmax(scores, -1).type_as(v), 0.1, layer.training)
    return unfolded(torch.bmm(weights, v))


def baddbmm(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = folded(q, k, v)
    mask = torch.zeros(q.shape[1], k.shape[1]).masked_fill(causal(q @ k.mT), -math.inf)
    return unfolded(torch.baddbmm(mask, q, k.mT, alpha=WIDTH**-0.5).softmax(-1) @ v)


def in_place(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = by_heads(q, k, v)
    scores = q @ k.transpose(-1, -2)
    scores /= torch.sqrt(torch.tensor(float(WIDTH)))
    scores += torch.where(causal(scores), torch.finfo(scores.dtype).min, 0.0)
    return (scores.clamp(min=torch.finfo(scores.dtype).min).softmax(-1) @ v).transpose(1, 2)


def groups_repeated(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (heads.repeat_interleave(HEADS // heads.shape[2], 2) for heads in (k, v))
    return einsum(layer, q, k, v)


def groups_together(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("btkgh,bskh->bkgts", q.unflatten(2, (k.shape[2], -1)), k) * WIDTH**-0.5
    return torch.einsum("bkgts,bskh->btkgh", scores.softmax(-1), v).flatten(2, 3)


def sdpa(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = by_heads(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def sdpa_of_a_window(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = by_heads(q, k, v)
    sees = distances(q @ k.mT).abs() < 5
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=0.25).transpose(1, 2)


def sdpa_with_alibi(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = by_heads(q, k, v)
    bias = -slopes(4.0) * distances(q @ k.mT).abs()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2)


# ---- Changes to scores ---------------------------------------------------------------------------


def slopes(max_bias: float) -> Tensor:
    return torch.tensor(Alibi(max_bias).slopes(HEADS))[:, None, None]


def on_scores(change: Callable[[Any, Tensor], Tensor]) -> Attend:
    """Return attention with changed scores."""
    return lambda layer, q, k, v: attended(change(layer, scores_of(q, k)), v)


def hidden(scores: Tensor) -> Tensor:
    return scores.masked_fill(causal(scores), -math.inf)


def of_buckets(layer: Any, scores: Tensor) -> Tensor:
    relative = RelativeBias(16, 64)
    buckets = torch.from_numpy(relative.buckets())[distances(scores).clamp(-64, 64) + 64]
    return scores + layer.bias(buckets).permute(2, 0, 1)


soft_capped = on_scores(lambda layer, scores: hidden(3.0 * torch.tanh(scores / 3.0)))
scaled_twice = on_scores(lambda layer, scores: scores / math.sqrt(WIDTH))
alibi = on_scores(
    lambda layer, scores: hidden(scores + slopes(8.0) * torch.arange(scores.shape[-1]))
)
alibi_scaled = on_scores(
    lambda layer, scores: hidden(scores - WIDTH**-0.5 * slopes(8.0) * distances(scores).abs())
)
TABLE = torch.randn(16, HEADS, generator=torch.Generator().manual_seed(2))

WRITTEN: dict[str, tuple[Attend, dict[str, Any], bool]] = {
    "einsum": (einsum, {}, False),
    "keys-first": (keys_first, {}, False),
    "bmm": (bmm, {}, True),
    "baddbmm": (baddbmm, {}, True),
    "in-place": (in_place, {}, True),
    "groups-repeated": (groups_repeated, {"num_kv_heads": 2}, False),
    "groups-together": (groups_together, {"num_kv_heads": 2}, False),
    "sdpa": (sdpa, {"num_kv_heads": 2}, True),
    "sdpa-of-a-window": (sdpa_of_a_window, {"window_size": 5, "scale": 0.25}, False),
    "sdpa-with-alibi": (sdpa_with_alibi, {"alibi": Alibi(4.0)}, False),
    "soft-cap": (soft_capped, {"soft_cap": 3.0}, True),
    "scaled-twice": (scaled_twice, {"scale": 0.125}, False),
    "alibi": (alibi, {"alibi": Alibi()}, True),
    "alibi-scaled": (alibi_scaled, {"alibi": Alibi(scaled=True)}, True),
    "relative-bias": (on_scores(of_buckets), {"relative_bias": RelativeBias(16, 64)}, False),
}
"""Implementations of attention, each with its identified fields and True if it is causal."""


def made(attend: Attend, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(PlainAttention(attend, **options)).eval()


def inputs(num_tokens: int = 24) -> Tensor:
    return torch.randn(3, num_tokens, HEADS * WIDTH, generator=torch.Generator().manual_seed(1))


def identified(model: nn.Module) -> Identification:
    (layer,) = identify(model, {"input": inputs()})
    return layer


FEW = ["bmm", "keys-first", "groups-together", "sdpa", "soft-cap", "alibi-scaled", "relative-bias"]


@sample(name=FEW)
@pytest.mark.parametrize("name", list(WRITTEN))
def test_any_implementation_is_identified(name):
    """Each implementation of attention has the expected fields, causality and bias table."""
    attend, fields, is_causal = WRITTEN[name]
    kv_heads = fields.get("num_kv_heads", HEADS)
    model = made(attend, kv_heads=kv_heads, table=TABLE if "relative_bias" in fields else None)
    layer = identified(model)
    assert layer.spec is not None, str(layer)
    assert layer.is_causal is is_causal
    fields_of_spec = layer.spec.given()
    assert fields_of_spec.pop("scale", None) == pytest.approx(fields.get("scale"))
    assert fields_of_spec == {
        "d_model": 32,
        "num_heads": HEADS,
        "qkv_bias": (True, False, False),
    } | {name: value for name, value in fields.items() if name != "scale"}
    if "relative_bias" in fields:
        assert layer.names["relative_bias"] == "bias.weight"
        assert (layer.weights["relative_bias"] == TABLE.numpy()).all()


class Mixer(PlainAttention):
    """Attention whose class name does not contain the word."""


def test_class_matched_by_name_is_identified():
    """A class whose name does not contain "attention" is identified if `layers` matches it."""
    model = nn.Sequential(Mixer(sdpa, kv_heads=2)).eval()
    (layer,) = identify(model, {"input": inputs()}, layers="Mix*")
    assert layer.spec is not None, str(layer)
    assert layer.spec.num_kv_heads == 2


@pytest.mark.parametrize("gradients", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_tap_records_and_checks_operations(gradients):
    """A tap records each stage of plain operations without changing the output, with or without
    gradients; the verdict passes with the identified spec, and fails with a scale of 1.
    """
    model = made(bmm)
    x = inputs(9)
    with gradients():
        expected = model(x)
        with parity.tap(model) as tapped:
            output = model(x)
    assert torch.equal(output, expected)
    (layer,) = tapped.layers
    shapes = {name: value.shape for name, value in layer.calls[0].values.items()}
    heads, pairs = (3, HEADS, 9, WIDTH), (3, HEADS, 9, 9)
    assert shapes.items() >= dict.fromkeys(("q", "k", "v", "context"), heads).items()
    assert shapes.items() >= dict.fromkeys(("mask", "scores", "attn_weights"), pairs).items()
    identity = identified(model)
    assert identity.spec is not None
    verdict = parity.check_tap(tapped, {0: identity.spec}, {0: identity.weights})
    assert verdict.passed
    assert {comparison.stage for comparison in verdict.layers[0].comparisons} >= {
        "mask",
        "q",
        "k",
        "v",
        "attn_weights",
        "context",
    }
    assert not parity.check_tap(
        tapped, {0: identity.spec.replace(scale=1.0)}, {0: identity.weights}
    ).passed


def test_exception_removes_dispatch_mode():
    """No dispatch mode of torch remains after an exception inside a tap or inside `identify`."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    def broken(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise IndexError(str(q.shape))

    model = made(broken)
    with parity.tap(model), pytest.raises(IndexError):
        model(inputs())
    with pytest.raises(IndexError):
        identify(model, {"input": inputs()})
    assert _get_current_dispatch_mode() is None


# ---- Oddities ------------------------------------------------------------------------------------


def on_weights(change: Callable[[Any, Tensor], Tensor]) -> Attend:
    """Return attention with changed attention weights."""

    def attend(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum(
            "bnts,bsnh->btnh", change(layer, hidden(scores_of(q, k)).softmax(-1)), v
        )

    return attend


def differential(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attended(scores_of(q, k), v) - 0.2 * attended(scores_of(q.roll(1, 2), k), v)


def two_products(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attended(scores_of(q, k) + 0.1 * scores_of(k, q).mT, v)


def by_blocks(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (heads.unflatten(1, (2, -1)).flatten(0, 1) for heads in (q, k, v))
    return attended(scores_of(q, k), v).unflatten(0, (-1, 2)).flatten(1, 2)


def seconds(scores: Tensor) -> Tensor:
    return (torch.arange(scores.shape[-2]) % 2)[:, None].float()


ODDITIES: dict[str, Attend] = {
    "bias-of-squares": on_scores(
        lambda layer, scores: hidden(scores - 0.01 * distances(scores) ** 2)
    ),
    "bias-of-one-slope": on_scores(
        lambda layer, scores: hidden(scores - 0.1 * distances(scores).abs())
    ),
    "bias-of-slopes-exchanged": on_scores(
        lambda layer, scores: hidden(scores - slopes(8.0).flip(0) * distances(scores).abs())
    ),
    "bias-of-later-keys": on_scores(lambda layer, scores: scores + slopes(8.0) * distances(scores)),
    "bias-of-no-table": on_scores(lambda layer, scores: scores + torch.sin(distances(scores))),
    "bias-of-a-key": on_scores(
        lambda layer, scores: scores + 0.1 * (torch.arange(scores.shape[-1]) == 0)
    ),
    "bias-of-the-input": on_scores(
        lambda layer, scores: scores + 0.1 * scores.mean(-1, True).sin().mT
    ),
    "scale-of-heads": on_scores(
        lambda layer, scores: scores * torch.linspace(0.9, 1.1, HEADS)[:, None, None]
    ),
    "scale-of-positions": on_scores(lambda layer, scores: scores * (1.0 + 0.1 * seconds(scores))),
    "scale-by-size": on_scores(lambda layer, scores: scores * torch.where(scores > 0, 1.0, 0.9)),
    "scores-clipped": on_scores(lambda layer, scores: scores.clamp(-0.3, 0.3)),
    "scores-capped-twice": on_scores(
        lambda layer, scores: 3.0 * torch.tanh(torch.tanh(scores / 3.0))
    ),
    "softmax-over-queries": lambda layer, q, k, v: torch.einsum(
        "bnts,bsnh->btnh", scores_of(q, k).softmax(2), v
    ),
    "softmax-over-heads": lambda layer, q, k, v: torch.einsum(
        "bnts,bsnh->btnh", scores_of(q, k).softmax(1), v
    ),
    "mask-one-late": on_scores(
        lambda layer, scores: scores.masked_fill(causal(scores).roll(1, 1), -1e9)
    ),
    "mask-without-the-first": on_scores(
        lambda layer, scores: hidden(scores).index_fill(2, torch.tensor(0), 0.0)
    ),
    "mask-that-is-weak": on_scores(lambda layer, scores: scores - 3.0 * causal(scores)),
    "mask-of-a-head": on_scores(
        lambda layer, scores: torch.cat([hidden(scores[:, :1]), scores[:, 1:]], 1)
    ),
    "weights-dropped": on_weights(
        lambda layer, weights: weights * (torch.arange(weights.shape[-1]) != 3)
    ),
    "weights-dropped-in-place": on_weights(
        lambda layer, weights: weights.mul_(1.0 - 0.1 * seconds(weights))
    ),
    "weights-of-heads-mixed": on_weights(
        lambda layer, weights: 0.9 * weights + 0.1 * weights.roll(1, 1)
    ),
    "weights-of-talking-heads": on_weights(
        lambda layer, weights: torch.einsum("bnts,nm->bmts", weights, torch.eye(HEADS) + 0.1)
    ),
    "weights-renormalized": on_weights(
        lambda layer, weights: F.normalize(weights**2, p=1.0, dim=-1)
    ),
    "context-of-heads-exchanged": lambda layer, q, k, v: einsum(layer, q, k, v).flip(2),
    "values-centered": lambda layer, q, k, v: einsum(layer, q, k, v - 0.1 * v.mean(1, True)),
    "sdpa-of-two": lambda layer, q, k, v: (
        sdpa(layer, q, k, v) + 0.1 * sdpa(layer, q.roll(1, 1), k, v)
    ),
    "differential": differential,
    "two-products": two_products,
    "by-blocks": by_blocks,
}
"""Layers whose attention no specification describes."""


def test_shifted_bias_buckets_are_rejected():
    """A bias table whose buckets are shifted by one distance has no spec."""
    shifted = on_scores(
        lambda layer, scores: of_buckets(layer, torch.cat([scores, scores[..., :1]], -1))[..., 1:]
    )
    assert identified(made(shifted, table=TABLE)).spec is None


@sample(name=list(ODDITIES)[::3])
@pytest.mark.parametrize("name", list(ODDITIES))
def test_oddity_is_never_accepted(name):
    """A layer whose attention no specification describes has no spec, and a reason."""
    layer = identified(made(ODDITIES[name]))
    assert layer.spec is None, str(layer)
    assert layer.reason


def test_bias_table_of_other_layer_is_named():
    """A bias table used by two layers is named with its path in the layer that holds it."""
    model = nn.Sequential(
        *made(on_scores(of_buckets), table=TABLE), *made(on_scores(of_buckets))
    ).eval()
    model[1].__dict__["bias"] = model[0].bias  # used by both, held by the first
    first, second = identify(model, {"input": inputs()})
    assert first.names["relative_bias"] == "bias.weight"
    assert second.names["relative_bias"] == "0.bias.weight"
    assert (second.weights["relative_bias"] == TABLE.numpy()).all()


# ---- Layers of torch -----------------------------------------------------------------------------


def test_torch_transformer_is_identified():
    """All three layers of `nn.Transformer` have the spec and
    weights that `spec_of` and `weights_of` read.
    """
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 1, 1, 32, dropout=0.0, batch_first=True).eval()
    layers = identify(model, {"src": inputs(12), "tgt": inputs(10)})
    assert len(layers) == 3
    for layer in layers:
        assert layer.spec is not None, str(layer)
        module = model.get_submodule(layer.name)
        assert layer.spec == parity.spec_of(module)
        weights = parity.weights_of(module)
        assert all((layer.weights[name] == weight).all() for name, weight in weights.items())
    assert layers[2].inputs == {"query": "query", "key": "key", "value": "key"}
    assert layers[0].names["k_proj.weight"] == "in_proj_weight"


@pytest.mark.parametrize("options", [{}, {"kdim": 24, "vdim": 24, "bias": False}])
@pytest.mark.parametrize("need_weights", [False, True])
def test_torch_layer_alone_is_identified(options, need_weights):
    """`nn.MultiheadAttention` alone is identified: causal with biases,
    or cross-attention without, with `d_kv`.
    """
    torch.manual_seed(0)
    module = nn.MultiheadAttention(32, 4, batch_first=True, **options).eval()
    x, other = inputs(12), inputs(9)[..., : module.kdim]
    options_of_call = {"attn_mask": torch.ones(12, 12).triu(1).bool()} if not options else {}
    keys = other if options else x
    (layer,) = identify(
        module,
        {"query": x, "key": keys, "value": keys, "need_weights": need_weights, **options_of_call},
    )
    assert layer.spec is not None, str(layer)
    assert layer.spec.qkv_bias is not bool(options)
    assert layer.spec.d_kv == module.kdim
    assert layer.is_causal is not bool(options)


def test_add_zero_attn_is_rejected():
    """`nn.MultiheadAttention` with `add_zero_attn` has no spec."""
    x = inputs(12)
    module = nn.MultiheadAttention(32, 4, batch_first=True, add_zero_attn=True).eval()
    (layer,) = identify(module, {"query": x, "key": x, "value": x})
    assert layer.spec is None


# ---- Models of transformers ----------------------------------------------------------------------


@sample(implementation=["sdpa"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_t5_blocks_share_first_bias_table(implementation):
    """All blocks of T5's encoder and of its decoder have the bias table of
    the first block; cross-attention has none.
    """
    sizes: dict[str, Any] = {
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 16,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 97,
    }
    torch.manual_seed(0)
    model = AutoModel.from_config(T5Config(**sizes), attn_implementation=implementation).eval()
    tokens = torch.randint(1, 97, (2, 24), generator=torch.Generator().manual_seed(1))
    layers = {
        layer.name: layer
        for layer in identify(model, {"input_ids": tokens, "decoder_input_ids": tokens[:, :20]})
    }
    specs = {
        name: layer.spec
        for name, layer in layers.items()
        if layer.spec is not None and layer.spec.scale == 1.0
    }
    assert specs.keys() == layers.keys(), "\n".join(map(str, layers.values()))
    for part, is_causal in (("encoder", False), ("decoder", True)):
        table = "layer.0.SelfAttention.relative_attention_bias.weight"
        for block, name in enumerate(["relative_attention_bias.weight", f"{part}.block.0.{table}"]):
            layer = layers[f"{part}.block.{block}.layer.0.SelfAttention"]
            assert specs[layer.name].relative_bias == RelativeBias(bidirectional=not is_causal)
            assert layer.names["relative_bias"] == name
            assert layer.is_causal is is_causal
    assert specs["decoder.block.1.layer.1.EncDecAttention"].relative_bias is None


def falcon(implementation: str, **options: Any) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_hidden_layers": 1,
        "vocab_size": 97,
    }
    torch.manual_seed(0)
    config = FalconConfig(**sizes, bos_token_id=1, eos_token_id=1, **options)
    return AutoModel.from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_falcon_alibi_by_implementation(implementation):
    """Falcon's ALiBi is identified with sdpa; eager attention adds it twice and is rejected."""
    tokens = torch.randint(1, 97, (2, 16), generator=torch.Generator().manual_seed(1))
    (layer,) = identify(falcon(implementation, alibi=True), {"input_ids": tokens})
    if implementation == "eager":  # transformers 5 adds ALiBi to the mask, and again to the scores
        assert layer.spec is None
        assert "added to scores" in layer.reason
        return
    assert layer.spec is not None, str(layer)
    assert layer.spec.num_kv_heads == 1
    assert layer.spec.alibi == Alibi(scaled=True)


def test_falcon_with_rope_is_identified():
    """Falcon's new decoder architecture has 2 key/value heads and RoPE with base 10000."""
    tokens = torch.randint(1, 97, (2, 16), generator=torch.Generator().manual_seed(1))
    (layer,) = identify(
        falcon("eager", new_decoder_architecture=True, num_kv_heads=2), {"input_ids": tokens}
    )
    assert layer.spec is not None, str(layer)
    assert layer.spec.num_kv_heads == 2
    assert layer.spec.rope == Rope(10000.0)
