"""Tests of `Checkpoint`: each source is read once, and only if it is needed."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.llama_folder import make_model

from parity import convert_file, load
from parity.port.conversion.checkpoint import Checkpoint
from parity.port.conversion.hints import LayerHints
from parity.use.cli.main import main

OPENED: list[str] = []
"""Paths that are opened while `opened_by` runs; an audit hook cannot be removed."""

WATCHED = [False]


def note_open(event, arguments):
    """Note the paths of files that are opened, while they are watched."""
    if WATCHED[0] and event == "open" and isinstance(arguments[0], str):
        OPENED.append(arguments[0])


sys.addaudithook(note_open)


def opened_by(function, *args):
    """Return how often a call opens each file, by path."""
    OPENED.clear()
    WATCHED[0] = True
    try:
        function(*args)
    finally:
        WATCHED[0] = False
    return Counter(OPENED)


@pytest.fixture
def model(tmp_path):
    """Return the folder of a Llama of two layers."""
    make_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "words",
    [
        ("convert", "MODEL", "OUT.safetensors", "--to", "mha_jax"),
        ("convert", "MODEL", "OUT.safetensors", "--to", "mha_jax", "--dry-run"),
        ("inspect", "MODEL"),
        ("write", "MODEL", "--to", "torch", "-o", "OUT.py"),
        ("run", "--model", "MODEL", "--backends", "torch", "--layers", "1"),
    ],
    ids=" ".join,
)
def test_command_reads_each_source_once(words, model, tmp_path):
    """A command opens the weights of a model and its configuration once each."""
    names = {"MODEL": str(model), "OUT.safetensors": str(tmp_path / "out.safetensors")}
    names["OUT.py"] = str(tmp_path / "out.py")
    opened = opened_by(main, [names.get(word, word) for word in words])
    assert opened[str(model / "model.safetensors")] == 1
    assert opened[str(model / "config.json")] == 1


def test_compare_reads_both_files_once(model, tmp_path):
    """`compare` reads both checkpoints once, after the kind of a file in its header."""
    target = tmp_path / "converted.safetensors"
    convert_file(model, target, target="mha_jax")
    opened = opened_by(main, ["compare", str(model), str(target)])
    assert opened[str(model / "model.safetensors")] == 1
    assert opened[str(model / "config.json")] == 1
    assert opened[str(target)] == 2


def test_spec_reads_the_configuration_once(model):
    """Spec opens the configuration once, and no weights."""
    opened = opened_by(main, ["spec", str(model)])
    assert opened[str(model / "config.json")] == 1
    assert opened[str(model / "model.safetensors")] == 0


def test_library_adds_one_configuration_read(model):
    """With `--against transformers`, this package and transformers open the configuration once
    each.
    """
    words = ["run", "--model", str(model), "--backends", "torch", "--layers", "1", "--quiet"]
    opened = opened_by(main, [*words, "--against", "transformers"])
    assert opened[str(model / "model.safetensors")] == 1
    assert opened[str(model / "config.json")] == 2


def test_config_is_read_only_if_needed(model, tmp_path):
    """A broken configuration next to a file of ours, whose metadata precede it, is not read."""
    convert_file(model, tmp_path / "converted.safetensors", target="mha_jax")
    (tmp_path / "config.json").write_text("{")
    with Checkpoint.open(tmp_path / "converted.safetensors") as checkpoint:
        layers = checkpoint.layers(LayerHints())
    assert [layer.hints.origin_of("num_heads") for layer in layers.in_order] == [
        "the file's metadata"
    ] * 2
    with pytest.raises(ValueError, match=r"config\.json .*correct it, or remove it"):
        _ = checkpoint.config


def test_layers_have_the_order_of_numbers(model):
    """Layers in order are those that `load` returns, by their labels."""
    with Checkpoint.open(model) as checkpoint:
        layers = checkpoint.layers(LayerHints()).in_order
        weights, spec = layers[1].load()
    assert [layer.label for layer in layers] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]
    expected, expected_spec = load(model, prefix="model.layers.1.self_attn")
    assert spec == expected_spec
    assert all((weights[name] == array).all() for name, array in expected.items())


COUNT_MODULES = """
import sys
from parity.use.cli.main import main

status = main(sys.argv[1:])
modules = [name for name in sys.modules if name.partition(".")[0] == "parity"]
print(status, len(modules), [name for name in modules if name.startswith("parity.explain")])
"""


@pytest.mark.costly("modules that a new process imports")
def test_convert_imports_few_modules(model, tmp_path):
    """A conversion by rules imports at most 110 modules of parity, and none that explain."""
    target = tmp_path / "out.safetensors"
    command = [sys.executable, "-c", COUNT_MODULES, "convert", str(model), str(target)]
    run = subprocess.run(
        [*command, "--to", "mha_jax"], capture_output=True, text=True, check=False, cwd=Path(ROOT)
    )
    status, count, explaining = run.stdout.splitlines()[-1].split(" ", 2)
    assert (status, explaining) == ("0", "[]"), run.stderr
    assert int(count) <= 110
