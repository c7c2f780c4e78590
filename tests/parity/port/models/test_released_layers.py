"""Layers of our specifications equal the modules released in transformers: norms, scores,
projections, latents.

`test_released_rope.py` compares layers with RoPE, which also run token by token, and
`test_released_biases.py` layers with a bias of scores.
"""

import pytest
import torch
from helpers.released import check_equal
from helpers.released_layers import latents, norms, projections, scores
from helpers.samples import sample

LAYERS = {
    f"{module.__name__.rpartition('.')[2]}: {name}": made
    for module in (norms, scores, projections, latents)
    for name, made in module.LAYERS.items()
}


@sample(
    name=[
        "norms: OLMo 2",
        "scores: Gemma 2, sliding",
    ]
)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.costly("gradients and cached steps of released layers")
def test_layer_matches_released_one(name):
    """Output, gradients and cached steps equal the released layer's."""
    check_equal(LAYERS[name]())


def test_released_whisper_encoder():
    """An encoder of Whisper, which has biases of q and v but none
    of k, matches the released one.
    """

    def everything(batch, head, query, key):
        return torch.ones_like(key + query, dtype=torch.bool)

    check_equal(projections.WHISPER(is_decoder=False, sees=everything), is_causal=False)
