"""Known answers of `conformance` about other libraries, in the versions of constraints.txt.

A release of one of them may fail these tests and no others: update the table, and `docs/evidence`
if it has the answer.
"""

import tempfile

import pytest

from parity.explain.conformance.examine import examine
from parity.explain.conformance.peers import peer
from parity.explain.conformance.subjects import DTYPES

with pytest.MonkeyPatch.context() as _environment, tempfile.TemporaryDirectory() as _home:
    _environment.setenv("KERAS_BACKEND", "torch")
    _environment.setenv("KERAS_HOME", _home)  # where it writes its settings
    import keras  # noqa: F401


FACTS = {
    "torch.nn.MultiheadAttention": {
        "mask": "True hides; floats added",
        "causal": "rejected without a mask",
        # is_causal alone raises an error on the slow path; the fast one raises none and hides
        # nothing
        "future token": "hidden in train or with grad, otherwise leaks",
        "empty row": "NaN with weights, zeros in train or with grad, otherwise NaN",
        "empty row gradient": "finite without weights, otherwise NaN even if the loss ignores it",
        "float16 overflow": "finite without weights, otherwise NaN",
        "weights": "per head",
        "padding": "True hides",
        "attends": "to all tokens",
        # its kernel for a CPU returns zeros for a query of NaN, with few tokens and without a mask
        "visible NaN": (
            "swallowed (no mask) without weights, otherwise propagates; propagates with 600 tokens"
        ),
        "hidden NaN": "leaks",
    },
    "F.scaled_dot_product_attention": {
        "mask": "True shows; floats added",
        "causal": "top-left",
        "empty row": "zeros",
        "float16 overflow": "finite",
        "grouped heads": "repeat",
        "visible NaN": "swallowed (no mask, flag); propagates with 600 tokens",
        "hidden NaN": "leaks",
    },
    "jax.nn.dot_product_attention": {
        "mask": "True shows; floats rejected",
        "causal": "top-left",
        "empty row": "mean(V)",
        "float16 overflow": "finite",
        "visible NaN": "propagates",
        "hidden NaN": "leaks",
    },
    "keras.layers.MultiHeadAttention": {
        "mask": "True shows; floats as booleans",
        "causal": "top-left",
        # keras#23038 is closed in 3.15.1: the flag holds with scores and with dropout
        "future token": "hidden",
        "empty row": (
            "zeros with weights or with dropout, as if unmasked in float16, otherwise mean(V)"
        ),
        "float16 overflow": "NaN with weights or with dropout, otherwise finite",
        "dropout": "train only",
        "visible NaN": (
            "propagates with weights or with dropout, otherwise swallowed (no mask, flag); "
            "propagates with 600 tokens"
        ),
    },
    "flax.nnx.MultiHeadAttention": {
        "causal": "top-left",
        "empty row": "mean(V)",
        "float16 overflow": "NaN with weights or with dropout, otherwise finite",
        "dropout": "train only, one mask for the batch",
        "grouped heads": "repeat",
        # flax#5591, and a full cache that goes on
        "cache": "equals one pass; with is_causal sees only key 0; overflow silent",
        "visible NaN": "propagates",
    },
    "keras.layers.GroupQueryAttention": {
        "causal": "top-left",
        "grouped heads": "repeat",
    },
    "flax.linen.MultiHeadDotProductAttention": {
        "empty row": "mean(V)",
        "float16 overflow": "NaN",
        "cache": "equals one pass; overflow silent",
        "visible NaN": "propagates",
        "hidden NaN": "leaks",
    },
    "equinox.nn.MultiheadAttention": {
        "empty row": "mean(V)",
        "float16 overflow": "NaN",
        "visible NaN": "propagates",
    },
}
BROKEN = {
    "torch.nn.MultiheadAttention": {
        "empty row",
        "empty row gradient",
        "float16 overflow",
        "future token",
        "visible NaN",
    },
    "F.scaled_dot_product_attention": {"visible NaN"},
    "keras.layers.MultiHeadAttention": {"empty row", "float16 overflow", "visible NaN"},
    "flax.nnx.MultiHeadAttention": {"float16 overflow", "cache"},
    "flax.linen.MultiHeadDotProductAttention": {"float16 overflow", "cache"},
    "equinox.nn.MultiheadAttention": {"float16 overflow"},
}


@pytest.mark.parametrize("name", FACTS)
def test_known_facts_are_found(name):
    """Answers about a library, its broken guarantees and the
    form of their examples are the known ones.
    """
    # JAX compiles everything again for each dtype: only one of its functions is examined in
    # bfloat16.
    is_of_jax = peer(name).framework == "jax" and name != "jax.nn.dot_product_attention"
    examination = examine(peer(name), FACTS[name], ("float32", "float16") if is_of_jax else DTYPES)
    assert {answer.question: answer.words for answer in examination.answers} == FACTS[name]
    assert {answer.question for answer in examination.broken} == BROKEN.get(name, set())
    for answer in examination.broken:
        lines = answer.example.splitlines()
        assert lines[0] == f"{name}, {answer.question}: {answer.words}"
        assert [line.split()[0] for line in lines[1:5]] == ["check", "input", "path", "result"]
        assert any(character.isdigit() for character in lines[4])
