"""Trained layers: small, unchanged, and with scores as large as documented."""

import hashlib
import re
from pathlib import Path

import pytest
from helpers.input_errors import rejects

from parity import CASES, make_problem
from parity.measure import pretrained
from parity.measure.core import reference
from parity.measure.core.stages import run_steps
from parity.measure.core.weights import load_tensors

FOLDER = Path(pretrained.__file__).parent


def test_trained_files_are_below_3_megabytes():
    """All files of trained layers together are smaller than 3 MB."""
    assert sum(path.stat().st_size for path in FOLDER.glob("*.safetensors")) < 3_000_000


def test_q4_1_weights_match_gguf():
    """Weights packed as Q4_1 are those that gguf dequantizes, bit for bit."""
    from gguf import GGMLQuantizationType, dequantize

    tensors, _ = load_tensors(pretrained.path("smollm2-causal"))
    weights = make_problem(CASES["trained-smollm2-causal"], "float32").weights
    packed = {
        name.removesuffix(pretrained.PACKED): x
        for name, x in tensors.items()
        if name.endswith(pretrained.PACKED)
    }
    assert packed.keys() == weights.keys()
    for name, x in packed.items():
        expected = dequantize(x, GGMLQuantizationType.Q4_1)
        assert (expected.dtype, expected.tobytes()) == (
            weights[name].dtype,
            weights[name].tobytes(),
        )


@pytest.mark.parametrize("name", pretrained.NAMES)
def test_provenance_has_digest_of_file(name):
    """The SHA-256 of a file is the one in PROVENANCE.md."""
    section = (
        (FOLDER / "PROVENANCE.md").read_text().split(f"### {name}.safetensors")[1].split("###")[0]
    )
    sha256 = re.search(r"sha256 `([0-9a-f]{64})`", section)
    assert sha256 is not None
    assert hashlib.sha256(pretrained.path(name).read_bytes()).hexdigest() == sha256[1]


def test_each_name_has_one_file():
    """Files of trained layers are exactly `pretrained.NAMES`."""
    assert {path.stem for path in FOLDER.glob("*.safetensors")} == set(pretrained.NAMES)


def test_every_trained_layer_has_a_case():
    """Cases with trained weights use exactly the layers of `pretrained.NAMES`."""
    assert {case.trained for case in CASES.values() if case.trained} == set(pretrained.NAMES)


def test_licenses_are_included():
    """The folder has licenses of exactly three sources: anarcii, rxnmapper and llm."""
    assert {path.stem.split("-")[0] for path in (FOLDER / "licenses").iterdir()} == {
        "anarcii",
        "rxnmapper",
        "llm",
    }


@pytest.mark.parametrize(
    ("name", "logit"), [("trained-anarcii-causal", 1087.7), ("trained-anarcii-cross", 76174.1)]
)
def test_largest_visible_score(name, logit):
    """The largest score that is not masked is 1087.7 in one case and 76174.1 in the other."""
    stages = run_steps(reference.steps(make_problem(CASES[name], "float32"), "float64"))
    largest = abs(stages["scores"][~stages["mask"]]).max()
    assert largest == pytest.approx(logit, abs=0.05)  # printed to one decimal


def test_unknown_trained_layer_raises():
    """The path of an unknown trained layer raises an error that names it."""
    with rejects("name", name="gpt-5"):
        pretrained.path("gpt-5")
