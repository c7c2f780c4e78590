"""Grid biases and context norms of live models, identified by their behavior; and oddities of
them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from helpers.released_models import draw
from helpers.samples import sample

from mha_spec import GridBias, Norm
from parity.explain.identification import identify

SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [1, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
BEIT = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 8}
BEIT |= {"image_size": 8, "patch_size": 2}
BITNET = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}
BITNET |= {"vocab_size": 97, "intermediate_size": 32}
KOSMOS = {"vocab_size": 97, "embed_dim": 32, "layers": 1, "ffn_dim": 32, "attention_heads": 4}


def model_of(name: str, **options: Any) -> Any:
    """Return a small model with random weights, in evaluation mode."""
    kind = (
        transformers.models.kosmos2.modeling_kosmos2.Kosmos2TextModel if name == "kosmos" else None
    )
    kind = kind or getattr(transformers, f"{name}Model")
    model = kind(kind.config_class(**options)).eval()
    draw(model)
    return model


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name in ("Swin", "Beit"):
        size = 32 if name == "Swin" else 8
        return {"pixel_values": torch.randn(2, 3, size, size, generator=generator)}
    return {"input_ids": torch.randint(3, 90, (2, 16), generator=generator)}


FOUND = {
    "Swin": ("Swin", SWIN, {"relative_bias": GridBias(4, 4)}),
    "BEiT": (
        "Beit",
        {**BEIT, "use_relative_position_bias": True},
        {"relative_bias": GridBias(4, 4, class_token=True)},
    ),
    "BEiT, one table": (
        "Beit",
        {**BEIT, "use_shared_relative_position_bias": True},
        {"relative_bias": GridBias(4, 4, class_token=True)},
    ),
    "BitNet": ("BitNet", BITNET, {"context_norm": Norm(over="width", eps=1e-5)}),
    "Kosmos-2": (
        "kosmos",
        KOSMOS,
        {"context_norm": Norm("layer", over="width", bias=True, eps=1e-5)},
    ),
}


@sample(name=["BEiT", "Kosmos-2"])
@pytest.mark.parametrize("name", FOUND)
def test_grid_bias_or_norm_is_identified(name):
    """Grid biases and context norms are identified exactly, with parameters of the model as
    weights; shifted windows of Swin have a mask as evidence.
    """
    kind, options, fields = FOUND[name]
    model = model_of(kind, **options)
    layers = identify(model, inputs_of(kind))
    first = layers[0]
    assert first.spec is not None, str(first)
    assert {field: getattr(first.spec, field) for field in fields} == fields
    parameters = dict(model.named_parameters())
    of_features = {"Kosmos-2": {"context_norm.weight"}, "BEiT": {"relative_bias"}}
    weights = {*first.weights} & {"relative_bias", "context_norm.weight"}
    assert weights >= of_features.get(name, set())
    for weight in weights:
        known = [x for path, x in parameters.items() if path.endswith(first.names[weight])]
        assert any((x.detach().numpy() == first.weights[weight]).all() for x in known)
    if name == "Swin":  # shifted windows receive masks
        assert [layer.spec is not None for layer in layers] == [True] * 3, "\n".join(
            map(str, layers)
        )
        assert any(entry.field == "mask" for entry in layers[2].evidence)


def changed(path: str, change: Any) -> Any:
    """Return a function that changes the output of modules whose names end with `path`."""

    def inject(model: Any) -> None:
        for name, module in model.named_modules():
            if name.endswith(path):
                module.register_forward_hook(lambda _, inputs, output: change(output, *inputs))

    return inject


BIAS, NORM = "relative_position_bias", "attn_sub_norm"
ODDITIES = {
    "bias-larger": changed(BIAS, lambda bias, *_: 1.001 * bias),
    "bias-of-keys": changed(BIAS, lambda bias, *_: bias.mT),
    "bias-of-heads-exchanged": changed(BIAS, lambda bias, *_: bias.flip(1)),
    "bias-by-position": changed(BIAS, lambda bias, *_: bias + 0.01 * torch.arange(bias.shape[-1])),
    "norm-with-input": changed(NORM, lambda normed, x: normed + 0.01 * x),
    "norm-by-halves": changed(
        NORM, lambda normed, x: torch.cat([normed[..., :16], x[..., 16:]], dim=-1)
    ),
    "norm-squashed": changed(NORM, lambda normed, x: 8.0 * torch.tanh(normed / 8.0)),
    "norm-of-the-token-before": changed(NORM, lambda normed, x: normed.roll(1, 1)),
    "norm-of-large-inputs-alone": changed(
        NORM, lambda normed, x: normed if x.abs().max() > 1.0 else x
    ),
}


@sample(5)
@pytest.mark.parametrize("name", list(ODDITIES))
def test_injected_oddity_is_rejected(name):
    """No layer with a changed bias or norm has a spec, and each has a reason."""
    kind = "Beit" if name.startswith("bias") else "BitNet"
    model = model_of(
        kind, **({**BEIT, "use_relative_position_bias": True} if kind == "Beit" else BITNET)
    )
    ODDITIES[name](model)
    layers = identify(model, inputs_of(kind))
    assert len(layers) == (2 if kind == "Beit" else 1)
    assert [str(layer) for layer in layers if layer.spec is not None] == []
    assert all(layer.reason for layer in layers)
