"""The trained layers: small, unchanged, and as hard as they are said to be."""

import hashlib
import re
from pathlib import Path

import pytest
from helpers.refusals import refuses

from parity import CASES, load_tensors, make_problem, pretrained
from parity.core import reference
from parity.core.stages import run_steps

FOLDER = Path(pretrained.__file__).parent


def test_all_files_together_are_below_3_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.glob("*.safetensors")) < 3_000_000


def test_weights_in_q4_1_have_the_bits_that_gguf_gives():
    from gguf import GGMLQuantizationType, dequantize

    tensors, _ = load_tensors(pretrained.path("smollm2-causal"))
    weights = make_problem(CASES["trained-smollm2-causal"], "float32").weights
    packed = {
        name.removesuffix(pretrained.PACKED): x for name, x in tensors.items() if name.endswith(pretrained.PACKED)
    }
    assert packed.keys() == weights.keys()
    for name, x in packed.items():
        expected = dequantize(x, GGMLQuantizationType.Q4_1)
        assert (expected.dtype, expected.tobytes()) == (weights[name].dtype, weights[name].tobytes())


@pytest.mark.parametrize("name", pretrained.NAMES)
def test_a_file_is_the_one_whose_provenance_is_told(name):
    section = (FOLDER / "PROVENANCE.md").read_text().split(f"### {name}.safetensors")[1].split("###")[0]
    sha256 = re.search(r"sha256 `([0-9a-f]{64})`", section)
    assert sha256 is not None
    assert hashlib.sha256(pretrained.path(name).read_bytes()).hexdigest() == sha256[1]


def test_there_is_a_file_for_each_name_and_no_other():
    assert {path.stem for path in FOLDER.glob("*.safetensors")} == set(pretrained.NAMES)


def test_every_layer_is_in_a_case():
    assert {case.trained for case in CASES.values() if case.trained} == set(pretrained.NAMES)


def test_the_licences_are_there():
    assert {path.stem.split("-")[0] for path in (FOLDER / "licenses").iterdir()} == {"anarcii", "rxnmapper", "llm"}


@pytest.mark.parametrize(("name", "logit"), [("trained-anarcii-causal", 1087.7), ("trained-anarcii-cross", 76174.1)])
def test_the_largest_logit_is_the_one_told(name, logit):
    stages = run_steps(reference.steps(make_problem(CASES[name], "float32"), "float64"))
    seen = abs(stages["scores"][~stages["mask"]]).max()
    assert seen == pytest.approx(logit, abs=0.05)  # printed to one decimal


def test_an_unknown_layer_is_refused():
    with refuses("name", name="gpt-5"):
        pretrained.path("gpt-5")
