"""Each attention layer of whole released models matches ours: encoders, encoder-decoders and
decoders.
"""

from dataclasses import replace

import pytest
from helpers.families import ALL, MODELS
from helpers.input_errors import rejects
from helpers.released_models import check_model
from helpers.samples import sample
from helpers.selection import first_families, stack_signature

from mha_spec import Alibi, Norm, RelativeBias, Rope
from parity import specs_of


# One family of each stack, and one whose layers with full attention have no RoPE.
@sample(name=[*first_families(ALL, by=stack_signature), "cohere2_moe"])
@pytest.mark.parametrize("name", ALL)
def test_layers_of_model_match_configuration(name, tmp_path):
    """Layers made from the configuration, with weights of the
    checkpoint, match the model's.
    """
    check_model(ALL[name], tmp_path)


def other_spec(**fields):
    """Return a function that changes fields of a layer's specification."""
    return lambda layer: replace(layer, spec=replace(layer.spec, **fields))


WRONG = {
    "causal": ("bert", lambda layer: replace(layer, is_causal=True)),
    "not causal": ("bert, decoder", lambda layer: replace(layer, is_causal=False)),
    "scale": ("whisper", other_spec(scale=0.3)),
    "window": ("modernbert", other_spec(window_size=3)),
    "relative bias": ("t5", other_spec(relative_bias=RelativeBias(8, 7))),
    "slopes": ("bloom", other_spec(alibi=Alibi(4.0))),
    "eps": ("qwen3_next", other_spec(qk_norm=Norm(weight="1+w", eps=1e-6))),
    "pairs": ("gptj", other_spec(rope=Rope(rotary_dim=4))),
    "axes": ("qwen2_5_vl_text", other_spec(rope=Rope(5e3, sections=(1, 1, 2)))),
}


def check_wrong(of, wrong, folder):
    """Check a model against layers that a function made wrong."""
    check_model(
        MODELS[of], folder, lambda values: [wrong(spec) for spec in specs_of(values) if spec.spec]
    )


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_specification_is_detected(name, tmp_path):
    """A wrong field in the specification of a model's layers fails the check."""
    of, wrong = WRONG[name]
    with pytest.raises(AssertionError, match="of its largest number off"):
        check_wrong(of, wrong, tmp_path)


def test_a_wrong_path_is_detected(tmp_path):
    """A wrong path to a model's layers fails the check."""
    with pytest.raises(AssertionError, match=r"^layers\.0\.self_attns is the path of \[\]"):
        check_wrong("opt", lambda layer: replace(layer, path=f"{layer.path}s"), tmp_path)


def test_a_wrong_layout_is_detected(tmp_path):
    """A wrong layout of a model's layers raises an error about missing and unexpected weights."""
    with rejects("weights", missing=..., unexpected=...):
        check_wrong(
            "gpt_bigcode", lambda layer: replace(layer, layout="transformers.ModernBERT"), tmp_path
        )
