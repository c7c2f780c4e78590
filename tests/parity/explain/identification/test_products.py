"""Products of queries and keys with vectors of distances, identified in live models; and oddities
of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from helpers.released_models import draw
from helpers.samples import sample
from torch import Tensor, nn

import mha_torch
from mha_spec import RelativeProducts
from parity.explain.identification import Identification, identify
from parity.measure.core.weights import load_tensors
from parity.use.cli.main import main

DEBERTA = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DEBERTA |= {"intermediate_size": 16, "max_position_embeddings": 64, "relative_attention": True}
WAV2VEC2 = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 16,
}
WAV2VEC2 |= {
    "feature_projection_input_dim": 16,
    "left_max_position_embeddings": 6,
    "right_max_position_embeddings": 3,
}
WAV2VEC2 |= {"conv_depthwise_kernel_size": 3}
BOTH = {"pos_att_type": ["c2p", "p2c"]}

FOUND: dict[str, tuple[str, dict[str, Any], RelativeProducts]] = {
    "DeBERTa v2": (
        "DebertaV2",
        {**DEBERTA, **BOTH, "position_buckets": 8},
        RelativeProducts(7, 8, 4, 64, of_keys=True, per_head=True),
    ),
    "DeBERTa v3": (
        "DebertaV2",
        {**DEBERTA, **BOTH, "position_buckets": 6, "share_att_key": True},
        RelativeProducts(5, 6, 3, 64, of_keys=True, per_head=True),
    ),
    "DeBERTa v2, queries": (
        "DebertaV2",
        {**DEBERTA, "pos_att_type": ["c2p"], "max_relative_positions": 8},
        RelativeProducts(7, 8, per_head=True),
    ),
    "DeBERTa v2, keys": (
        "DebertaV2",
        {**DEBERTA, "pos_att_type": ["p2c"], "position_buckets": 32, "max_relative_positions": 40},
        RelativeProducts(31, 32, 16, 40, of_queries=False, of_keys=True, per_head=True),
    ),
    "wav2vec2-bert": (
        "Wav2Vec2Bert",
        {**WAV2VEC2, "attn_implementation": "eager"},
        RelativeProducts(6, 3),
    ),
    "wav2vec2-bert, sdpa": (
        "Wav2Vec2Bert",
        {**WAV2VEC2, "attn_implementation": "sdpa"},
        RelativeProducts(6, 3),
    ),
}


def model_of(name: str, **options: Any) -> Any:
    """Return a small model with random weights, in evaluation mode."""
    kind = getattr(transformers, f"{name}Model")
    model = kind(kind.config_class(**options)).eval()
    draw(model)
    with torch.no_grad():
        for weight in (x for x in model.parameters() if x.ndim == 2):
            weight.mul_(
                0.5
            )  # weights of keys that nearly tie in sharp rows differ by more than their budget
    return model


def inputs_of(name: str, sequences: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "Wav2Vec2Bert":
        return {"input_features": torch.randn(sequences, 20, 16, generator=generator)}
    return {"input_ids": torch.randint(3, 90, (sequences, 20), generator=generator)}


@sample(name=["DeBERTa v3", "wav2vec2-bert"])
@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("sequences", [1, 2])
def test_relative_products_are_identified(name, sequences):
    """Products of DeBERTa and wav2vec2-bert are identified in every layer, from one sequence or
    two; the table of wav2vec2-bert is its parameter.
    """
    kind, options, record = FOUND[name]
    model = model_of(kind, **options)
    layers = identify(model, inputs_of(kind, sequences))
    assert [layer.reason for layer in layers] == [""] * len(layers)
    assert {layer.spec.relative_products for layer in layers if layer.spec is not None} == {record}
    if kind == "Wav2Vec2Bert":
        table = model.encoder.layers[0].self_attn.distance_embedding.weight
        assert (layers[0].weights["relative_keys"] == table.detach().numpy()).all()
        assert layers[0].names["relative_keys"] == "distance_embedding.weight"


def test_products_with_equal_axis_lengths():
    """DeBERTa with 10 position buckets is identified from 10
    tokens, though axes have the same length.
    """
    model = model_of("DebertaV2", **DEBERTA, **BOTH, position_buckets=10)
    inputs = {name: x[:, :10] for name, x in inputs_of("DebertaV2").items()}
    layers = identify(model, inputs)
    assert len(layers) == 2
    for layer in layers:
        assert layer.spec is not None, str(layer)
        assert layer.spec.relative_products == RelativeProducts(
            9, 10, 5, 64, of_keys=True, per_head=True
        )


def test_deberta_conversion_keeps_vectors(tmp_path, capsys):
    """Conversion of a DeBERTa folder keeps the vectors of its first layer within 1e-6; conversion
    to BERT's layout exits with 2.
    """
    kind, options, record = FOUND["DeBERTa v3"]
    model = model_of(kind, **options)
    model.save_pretrained(tmp_path / "model")
    file = str(tmp_path / "layers.safetensors")
    assert (
        main(["convert", str(tmp_path / "model"), file, "--to", "canonical", "--rest", "drop"]) == 0
    )
    back = [
        "convert",
        file,
        str(tmp_path / "back.safetensors"),
        "--to",
        "transformers.BERT",
        "--rest",
        "drop",
    ]
    assert main(back) == 2
    assert "transformers.BERT" in capsys.readouterr().err
    weights, _ = load_tensors(file)
    first = identify(model, inputs_of(kind))[0]
    for name in ("relative_keys", "relative_queries"):
        converted = weights[f"encoder.layer.0.attention.self.{name}"]
        assert converted.shape == (record.num_buckets, 4, 8)
        assert np.abs(converted - first.weights[name]).max() < 1e-6


def test_log_buckets_match_deberta():
    """`RelativeProducts` has DeBERTa's logarithmic buckets at all distances, for four sizes."""
    module = transformers.models.deberta_v2.modeling_deberta_v2
    for buckets, most in ((8, 64), (6, 24), (32, 40), (256, 512)):
        record = RelativeProducts(buckets - 1, buckets, buckets // 2, most)
        distances = np.arange(-2 * most, 2 * most + 1)
        steps = module.make_log_bucket_position(torch.from_numpy(distances), buckets, most).clamp(
            -buckets, buckets - 1
        )
        buckets_by_distance = record.buckets()[np.clip(-distances, -most, most) + most]
        assert (2 * buckets - 1 - buckets_by_distance == steps.numpy() + buckets).all()


# ---- A handwritten layer -------------------------------------------------------------------------

HEADS, WIDTH = 4, 8


class Relative(nn.Module):
    """Attention with products of vectors for distances.

    Args:
        change: a function of `(layer, q, k, rows, scores)` that returns scores.
        kv_heads: number of key/value heads.
        is_causal: whether later keys are hidden.
    """

    def __init__(
        self, change: Callable[..., Tensor], kv_heads: int = HEADS, *, is_causal: bool = False
    ) -> None:
        super().__init__()
        self.query, self.out = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(2))
        self.key, self.value = (nn.Linear(HEADS * WIDTH, kv_heads * WIDTH) for _ in range(2))
        self.of_queries, self.of_keys = nn.Embedding(9, WIDTH), nn.Embedding(9, WIDTH)
        self.change, self.is_causal = change, is_causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            projection(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        k, v = (heads.repeat_interleave(HEADS // heads.shape[1], 1) for heads in (k, v))
        position = torch.arange(x.shape[1])
        rows = (position - position[:, None]).clamp(-5, 3) + 5
        scores = self.change(self, q, k, rows, q @ k.mT / WIDTH**0.5)
        if self.is_causal:
            scores = scores.masked_fill(position > position[:, None], -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def of_queries(layer: Any, q: Tensor, rows: Tensor) -> Tensor:
    return torch.einsum("bnth,tsh->bnts", q, layer.of_queries(rows)) / WIDTH**0.5


def of_keys(layer: Any, k: Tensor, rows: Tensor) -> Tensor:
    return torch.einsum("bnsh,tsh->bnts", k, layer.of_keys(rows)) / WIDTH**0.5


def identified(model: nn.Module, num_tokens: int = 20) -> Identification:
    x = torch.randn(3, num_tokens, HEADS * WIDTH, generator=torch.Generator().manual_seed(1))
    (layer,) = identify(model, {"input": x}, layers="Relative")
    return layer


def made(change: Callable[..., Tensor], **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Relative(change, **options)).eval()


RIGHT = {
    "queries": (
        lambda layer, q, k, rows, scores: scores + of_queries(layer, q, rows),
        RelativeProducts(5, 3),
    ),
    "keys": (
        lambda layer, q, k, rows, scores: scores + of_keys(layer, k, rows),
        RelativeProducts(5, 3, of_queries=False, of_keys=True),
    ),
    "both": (
        lambda layer, q, k, rows, scores: (
            scores + of_queries(layer, q, rows) + of_keys(layer, k, rows)
        ),
        RelativeProducts(5, 3, of_keys=True),
    ),
    "by query - key": (
        lambda layer, q, k, rows, scores: scores + of_queries(layer, q, rows.T),
        RelativeProducts(3, 5),
    ),
}


@sample(4)
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize(("kv_heads", "is_causal"), [(HEADS, False), (2, True)])
def test_identified_products_run_in_torch(name, kv_heads, is_causal):
    """`mha_torch` with the identified spec and weights returns the output within 1e-5."""
    change, record = RIGHT[name]
    model = made(change, kv_heads=kv_heads, is_causal=is_causal)
    layer = identified(model)
    assert layer.spec is not None, str(layer)
    assert layer.spec.relative_products == record
    ours = mha_torch.MultiHeadSelfAttention(layer.spec)
    ours.load_state_dict(
        {weight: torch.from_numpy(x.copy()) for weight, x in layer.weights.items()}
    )
    x = torch.randn(2, 30, HEADS * WIDTH)
    with torch.no_grad():
        assert torch.allclose(ours(x, is_causal=is_causal), model(x), atol=1e-5)


def test_shared_vectors_become_per_head():
    """If keys have vectors per head and queries share theirs, the spec has both per head."""

    def change(layer: Any, q: Tensor, k: Tensor, rows: Tensor, scores: Tensor) -> Tensor:
        per_head = layer.projected(layer.of_positions).unflatten(-1, (HEADS, WIDTH))
        products = torch.einsum("bnsh,tsnh->bnts", k, per_head[rows]) / WIDTH**0.5
        return scores + of_queries(layer, q, rows) + products

    model = made(change)
    model[0].projected, model[0].of_positions = (
        nn.Linear(8, HEADS * WIDTH),
        nn.Parameter(torch.randn(9, 8)),
    )
    identification = identified(model)
    assert identification.spec is not None, str(identification)
    assert identification.spec.relative_products == RelativeProducts(
        5, 3, of_keys=True, per_head=True
    )
    keys = identification.weights["relative_keys"]
    assert keys.shape == (9, HEADS, WIDTH)
    assert (keys == model[0].of_queries.weight.detach().numpy()[:, None]).all()


def other_row(rows: Tensor) -> Tensor:
    """Return rows in which one distance has the row of another."""
    return torch.where(rows == 3, 7, rows)


ODD: dict[str, Callable[..., Tensor]] = {
    "sign": lambda layer, q, k, rows, scores: scores - of_queries(layer, q, rows),
    "scale": lambda layer, q, k, rows, scores: scores + 1.01 * of_queries(layer, q, rows),
    "unscaled": lambda layer, q, k, rows, scores: scores + WIDTH**0.5 * of_queries(layer, q, rows),
    "scaled-twice": lambda layer, q, k, rows, scores: (
        scores + of_queries(layer, q, rows) / WIDTH**0.5
    ),
    "row-of-another-distance": lambda layer, q, k, rows, scores: (
        scores + of_queries(layer, q, other_row(rows))
    ),
    "clipped-early": lambda layer, q, k, rows, scores: (
        scores + of_queries(layer, q, rows.clamp(1, 7))
    ),
    "by-size-of-distance": lambda layer, q, k, rows, scores: (
        scores + of_queries(layer, q, (rows - 5).abs() + 3)
    ),
    "exchanged-in-one": lambda layer, q, k, rows, scores: (
        scores + of_queries(layer, q, rows) + of_keys(layer, k, rows.T)
    ),
    "keys-unscaled": lambda layer, q, k, rows, scores: (
        scores + of_queries(layer, q, rows) + 2.0 * of_keys(layer, k, rows)
    ),
    "one-head-alone": lambda layer, q, k, rows, scores: torch.cat(
        [scores[:, :1] + of_queries(layer, q, rows)[:, :1], scores[:, 1:]], dim=1
    ),
    "query-of-the-token-before": lambda layer, q, k, rows, scores: (
        scores + of_queries(layer, q.roll(1, 2), rows)
    ),
    "heads-in-another-order": lambda layer, q, k, rows, scores: (
        scores + of_queries(layer, q.flip(1), rows)
    ),
    "rows-that-wrap": lambda layer, q, k, rows, scores: (
        scores + of_queries(layer, q, (rows + 1) % 9)
    ),
    "one-sequence-alone": lambda layer, q, k, rows, scores: torch.cat(
        [scores[:1] + of_queries(layer, q, rows)[:1], scores[1:]]
    ),
    "squashed": lambda layer, q, k, rows, scores: (
        scores + 9.0 * torch.tanh(of_queries(layer, q, rows) / 9.0)
    ),
    "of-near-keys-alone": lambda layer, q, k, rows, scores: (
        scores + torch.where((rows > 0) & (rows < 8), of_queries(layer, q, rows), 0.0)
    ),
    "a-number-more-far-away": lambda layer, q, k, rows, scores: (
        scores + of_queries(layer, q, rows) + 0.01 * (rows == 0)
    ),
}


@sample(8)
@pytest.mark.parametrize("name", ODD)
def test_product_oddity_is_rejected(name):
    """A layer whose products `RelativeProducts` does not describe has no spec, and a reason."""
    layer = identified(made(ODD[name]))
    assert layer.spec is None, str(layer)
    assert layer.reason
