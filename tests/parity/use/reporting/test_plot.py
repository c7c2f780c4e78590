"""Tests of heat maps of attention from arrays, live modules, traces and weight files."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pytest
from helpers.input_errors import Misuse, rejects, rejects_type
from helpers.samples import sample
from PIL import Image

import parity.use.reporting.plot
from parity import CASES, AttentionSpec, make_problem, random_weights
from parity.explain.diagnosis.attention import (
    attention_for,
    attention_in_case,
    attention_of,
    read_array,
)
from parity.measure.core.trace import Reference
from parity.measure.core.weights import save_weights
from parity.use.cli.main import main
from parity.use.reporting.plot import downsample, plot_attention
from parity.use.running.traces import load_trace


def texts(path):
    """Return the texts in an SVG."""
    return [
        element.text for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    ]


def picture(path):
    """Return the pixels of a PNG, read completely."""
    with Image.open(path, formats=["PNG"]) as image:
        return np.asarray(image.convert("RGB")).astype(int)


@pytest.fixture
def attn_weights(rng):
    weights = rng.random((2, 4, 3, 5))
    return weights / weights.sum(-1, keepdims=True)


# ---- Pictures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_suffix_determines_format(attn_weights, tmp_path, suffix):
    """The file is a PNG or an SVG according to its suffix, and the figure has one panel per
    head.
    """
    path = tmp_path / f"a.{suffix}"
    figure = plot_attention(attn_weights, path=path)
    assert [panel.get_title() for panel in figure.axes[:4]] == [f"head {i}" for i in range(4)]
    if suffix == "png":
        assert picture(path).std() > 0
    else:
        assert [word for word in texts(path) if word and word.startswith("head")] == [
            f"head {i}" for i in range(4)
        ]


@sample(suffix=["svg"])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_same_weights_have_same_bytes(attn_weights, tmp_path, suffix):
    """The same weights, plotted twice, are files with the same bytes."""
    for name in "ab":
        plot_attention(attn_weights, path=tmp_path / f"{name}.{suffix}", title="t")
    assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def test_plot_shows_chosen_head_and_sequence(tmp_path):
    """A weight of 1 is bright only for its head and sequence, at the upper right: first
    query, last key.
    """
    weights = np.zeros((2, 2, 2, 2))
    weights[1, 1, 0, 1] = 1.0  # the upper right of one panel

    def bright(**chosen):
        plot_attention(weights, path=tmp_path / "a.png", **chosen)
        pixels = picture(tmp_path / "a.png")
        left = pixels[:, : int(pixels.shape[1] * 0.7)]  # without the color bar
        return np.argwhere(
            (np.abs(left - np.array([253, 231, 37])) < 4).all(-1)
        )  # the end of viridis

    assert bright(heads=[0], sequence=1).size == 0
    assert bright(heads=[1], sequence=0).size == 0
    bright_cells = bright(heads=[1], sequence=1)
    dark = picture(tmp_path / "a.png")
    panel = np.argwhere(
        (np.abs(dark[:, : int(dark.shape[1] * 0.7)] - np.array([68, 1, 84])) < 4).all(-1)
    )
    assert bright_cells[:, 0].mean() < panel[:, 0].mean()
    assert bright_cells[:, 1].mean() > panel[:, 1].mean()


def test_labels_are_drawn_in_order(attn_weights, tmp_path):
    """The labels of keys and queries are drawn in order, and dollar signs in labels and
    titles are literal.
    """
    path = tmp_path / "a.svg"
    keys, queries = ["The", "cat", "sat", "$on$", "it"], ["x", "y", "z"]
    plot_attention(
        attn_weights, path=path, heads=[2], tokens=keys, query_tokens=queries, title="of $a^2$"
    )
    labels = texts(path)
    assert [word for word in labels if word in keys] == keys
    assert [word for word in labels if word in queries] == queries
    assert "of $a^2$" in labels


def test_tokens_label_keys_and_queries(tmp_path):
    """Given as many tokens as queries and keys, both have these labels."""
    plot_attention(np.eye(3), path=tmp_path / "a.svg", tokens=["a", "b", "c"])
    assert [word for word in texts(tmp_path / "a.svg") if word in list("abc")] == list("abcabc")


def test_invisible_labels_are_escaped(tmp_path):
    """Newlines, control characters and surrogates in labels are drawn escaped."""
    plot_attention(np.eye(3), path=tmp_path / "a.svg", tokens=["\n", "<b>\x00", "\ud800"])
    labels = texts(tmp_path / "a.svg")
    assert {"\\n", "<b>\\x00", "\\ud800"} <= set(labels)


def test_nan_is_drawn_in_red(tmp_path):
    """NaN weights are drawn in pure red."""
    plot_attention(np.full((2, 2), np.nan), path=tmp_path / "a.png")
    pixels = picture(tmp_path / "a.png")
    assert (pixels == np.array([255, 0, 0])).all(-1).sum() > 1000


def test_many_tokens_keep_their_peak(tmp_path):
    """3000 queries are reduced to 1024 rows that keep the largest weight, and have 64 labels."""
    weights = np.zeros((3000, 2))
    weights[1234, 1] = 1.0
    assert downsample(weights, 1024).shape == (1024, 2)
    assert downsample(weights, 1024).max() == 1.0
    plot_attention(weights, path=tmp_path / "a.svg", query_tokens=[f"q{i}" for i in range(3000)])
    assert (
        sum(word is not None and word.startswith("q") for word in texts(tmp_path / "a.svg")) - 1
        == 64
    )


def test_plotting_changes_no_settings(attn_weights, tmp_path):
    """Plotting does not change the settings of Matplotlib."""
    before = dict(mpl.rcParams)
    plot_attention(attn_weights, path=tmp_path / "a.png")
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("arguments", "input_error"),
    [
        ({"path": "a.jpg"}, rejects("path", path="a.jpg")),
        ({"path": "/no/such/folder/a.png"}, rejects("path", "/no/such/folder/a.png: ")),
        ({"attn_weights": np.ones(3)}, rejects("attn_weights", attn_weights=(3,))),
        ({"attn_weights": np.ones((0, 3))}, rejects("attn_weights", attn_weights=(0, 3))),
        ({"attn_weights": np.array([["a"]])}, rejects_type("attn_weights", "dtype <U1")),
        (
            {"attn_weights": np.ones((2, 2), complex)},
            rejects_type("attn_weights", "dtype complex128"),
        ),
        ({"tokens": ["a"]}, rejects("tokens", {"len(tokens)": 1})),
        ({"query_tokens": ["a"]}, rejects("query_tokens", "1")),
        ({"heads": [4]}, rejects("heads", heads=[4])),
        ({"heads": []}, rejects("heads", heads=[])),
        ({"sequence": 2}, rejects("sequence", sequence=2)),
        ({"sequence": -1}, rejects("sequence", sequence=-1)),
    ],
)
def test_invalid_arguments_write_nothing(
    attn_weights, tmp_path, monkeypatch, arguments, input_error
):
    """An invalid argument of `plot_attention` raises an error with its name and value, and no
    file is written.
    """
    monkeypatch.chdir(tmp_path)
    with input_error:
        plot_attention(**{"attn_weights": attn_weights, "path": "a.png", **arguments})
    assert list(tmp_path.iterdir()) == []


# ---- Sources of weights --------------------------------------------------------------------------


def test_module_returns_attention_weights(sibling, rng):
    """`attention_of` returns the weights of a module for an input, with rows that sum to 1."""
    module = sibling.module("MultiHeadAttention", AttentionSpec(8, 2))
    weights = attention_of(module, sibling.array(rng.standard_normal((1, 3, 8)).astype(np.float32)))
    assert weights.shape == (1, 2, 3, 3)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)


def test_module_without_weights_is_rejected(sibling):
    """`attention_of` raises an error for MultiHeadSelfAttention, which returns no attention
    weights.
    """
    with rejects_type("module", "MultiHeadSelfAttention"):
        attention_of(sibling.module("MultiHeadSelfAttention", AttentionSpec(8, 2)), None)


@pytest.mark.parametrize("name", ["full", "causal", "rope-gqa", "cross"])
def test_attention_for_matches_reference(name):
    """`attention_for` returns exactly the attention weights of the reference, in float64."""
    problem = make_problem(CASES[name], "float64")
    weights = attention_for(
        problem.weights,
        problem.spec,
        problem.inputs["query"],
        problem.inputs.get("key"),
        is_causal=problem.case.is_causal,
    )
    np.testing.assert_array_equal(weights, Reference(problem).accumulated["attn_weights"])


def test_attention_in_case_has_its_mask():
    """`attention_in_case` applies the mask of a case, and returns the last step of a cached
    case.
    """
    spec = AttentionSpec(12, 3)
    stage, weights = attention_in_case(random_weights(spec), spec, CASES["causal-padding-empty"])
    assert stage == "attn_weights"
    assert weights.shape == (2, 3, 5, 5)
    assert not weights[0].any()  # an empty sequence
    stage, weights = attention_in_case(random_weights(spec), spec, CASES["decode"])
    assert (stage, weights.shape) == ("step3.attn_weights", (2, 3, 1, 10))


# ---- The command ---------------------------------------------------------------------------------


@pytest.fixture
def layer(tmp_path, rng):
    """Save weights and an input, and return both paths."""
    spec = AttentionSpec(8, 2)
    save_weights(tmp_path / "w.safetensors", random_weights(spec), spec)
    np.save(tmp_path / "x.npy", rng.standard_normal((4, 8)).astype(np.float32))
    return str(tmp_path / "w.safetensors"), str(tmp_path / "x.npy")


@pytest.fixture
def trace(tmp_path):
    """Save the trace of a cached case, and return its path."""
    arguments = [
        "--cases",
        "decode",
        "--backends",
        "torch",
        "--save-traces",
        str(tmp_path / "traces"),
        "--quiet",
    ]
    assert main(["run", *arguments]) == 0
    return str(next((tmp_path / "traces").iterdir()))


def test_plot_draws_layer_with_labels(layer, tmp_path, capsys):
    """`plot` draws a head of a layer for an input with labels; its JSON has the heads and the
    shape.
    """
    weights, x = layer
    target = str(tmp_path / "a.svg")
    arguments = [
        "--input",
        x,
        "--causal",
        "--labels",
        "The,cat,the,cat",
        "--heads",
        "1",
        "--json",
        f"{target}.json",
    ]
    assert main(["plot", weights, target, *arguments]) == 0
    assert f"attn_weights, sequence 0, head 1; wrote {target}" in capsys.readouterr().out
    assert texts(target).count("cat") == 4
    content = json.loads((tmp_path / "a.svg.json").read_text())
    assert (content["heads"], content["shape"]) == ([1], [1, 2, 4, 4])


def test_plot_reads_labels_from_file(layer, tmp_path):
    """`plot --labels-file` reads one label per line, which may have a comma."""
    (tmp_path / "t.txt").write_text("a,b\nc\nd\ne\n")
    target = tmp_path / "a.svg"
    assert (
        main(
            [
                "plot",
                layer[0],
                str(target),
                "--input",
                layer[1],
                "--labels-file",
                str(tmp_path / "t.txt"),
            ]
        )
        == 0
    )
    assert "a,b" in texts(target)


def test_plot_draws_last_or_given_step(trace, tmp_path, monkeypatch):
    """`plot` draws the last step of a trace, or the given stage and sequence."""
    drawn = []
    figure = SimpleNamespace(image=str.encode)
    monkeypatch.setattr(
        parity.use.reporting.plot, "_draw", lambda maps, *others: drawn.append(maps) or figure
    )
    assert main(["plot", trace, str(tmp_path / "a.png")]) == 0
    assert (
        main(
            [
                "plot",
                trace,
                str(tmp_path / "a.png"),
                "--stage",
                "step0.attn_weights",
                "--sequence",
                "1",
            ]
        )
        == 0
    )
    stages = load_trace(trace).accumulated
    np.testing.assert_array_equal(drawn[0], stages["step3.attn_weights"][0].astype(np.float64))
    np.testing.assert_array_equal(drawn[1], stages["step0.attn_weights"][1].astype(np.float64))


def test_plot_accepts_any_layout(tmp_path):
    """`plot --case` draws a layer from torch.nn.MultiheadAttention under a prefix."""
    weights = random_weights(AttentionSpec(8, 2))
    parity.save(
        tmp_path / "w.safetensors",
        weights,
        AttentionSpec(8, 2),
        "torch.nn.MultiheadAttention",
        prefix="a.b",
    )
    target = tmp_path / "a.png"
    arguments = [
        "--from",
        "torch.nn.MultiheadAttention",
        "--prefix",
        "a.b",
        "--num-heads",
        "2",
        "--case",
        "causal",
    ]
    assert main(["plot", str(tmp_path / "w.safetensors"), str(target), *arguments]) == 0
    assert picture(target).std() > 0


@pytest.mark.parametrize(
    ("arguments", "input_error"),
    [
        (["W", "a.jpg", "--input", "X"], rejects("DST", DST="a.jpg")),
        (["W", "a.png"], Misuse("a file of weights requires --input or --case")),
        (
            ["W", "a.png", "--case", "no-such-case"],
            rejects("--case", {"--case": "no-such-case"}, hint="the nearest are "),
        ),
        (["W", "a.png", "--case", "full", "--causal"], Misuse("--causal requires --input")),
        (
            ["W", "a.png", "--input", "X", "--stage", "attn_weights"],
            rejects("--stage", {"--stage": "attn_weights"}),
        ),
        (["W", "a.png", "--input", "W"], rejects("…w.safetensors")),
        (
            ["W", "a.png", "--input", "X", "--labels", "a,b"],
            rejects("--labels", {"len(tokens)": 2}),
        ),
        (["W", "a.png", "--input", "X", "--key-input", "NARROW"], rejects("key", key=(2, 7))),
        (["W", "a.png", "--input", "NARROW"], rejects("query", query=(2, 7))),
        (["W", "a.png", "--input", "INTEGERS"], rejects("query", {"query.dtype": np.dtype(int)})),
        (["W", "a.png", "--input", "NAN"], rejects("query", "1 NaN")),
        (["T", "a.png", "--causal"], rejects("--causal", "decode-float32-torch")),
        (["T", "a.png", "--stage", "q"], rejects("stage", stage="q")),
    ],
)
def test_bad_usage_of_plot_writes_nothing(capsys, tmp_path, layer, trace, arguments, input_error):
    """Invalid arguments of `plot` exit with status 2 and one error line about them; no
    picture is written.
    """
    files = {
        "W": layer[0],
        "X": layer[1],
        "T": trace,
        "a.png": str(tmp_path / "a.png"),
        "a.jpg": "a.jpg",
    }
    spoilt = np.ones((2, 8))
    spoilt[0, 0] = np.nan
    for name, array in (
        ("NARROW", np.ones((2, 7))),
        ("INTEGERS", np.ones((2, 8), int)),
        ("NAN", spoilt),
    ):
        np.save(tmp_path / f"{name}.npy", array)
        files[name] = str(tmp_path / f"{name}.npy")
    capsys.readouterr()
    assert main(["plot", *(files.get(argument, argument) for argument in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mha-parity: ")
    assert input_error.is_printed_in(captured.err)
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "a.png").exists()


def test_missing_input_is_named_in_error(capsys, layer):
    """An --input that does not exist exits with status 2 and one error line with its path."""
    assert main(["plot", layer[0], "a.png", "--input", "/no/such/file"]) == 2
    error = capsys.readouterr().err
    assert "/no/such/file" in error
    assert error.count("\n") == 1


class CreatesFile:
    """Creates a file in the working folder if it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("unpickled"),)


@pytest.mark.parametrize(
    "content", [b"", b"\x93NUMPY", pickle.dumps(CreatesFile())], ids=["empty", "head", "pickle"]
)
def test_non_array_file_is_rejected(tmp_path, content, monkeypatch):
    """`read_array` raises an error for an empty file, a truncated array and a pickle."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.npy").write_bytes(content)
    with rejects("…/x.npy"):
        read_array(tmp_path / "x.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


def test_object_array_is_rejected(tmp_path):
    """`read_array` raises an error for an array of objects."""
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    with rejects("…/x.npy"):
        read_array(tmp_path / "x.npy")


def test_missing_matplotlib_is_named(capsys, layer, tmp_path, monkeypatch):
    """Without matplotlib, `plot` exits with status 2 and an error with the command to install
    it.
    """
    monkeypatch.setattr("parity.measure.core.packages.is_installed", lambda package: False)
    assert main(["plot", layer[0], str(tmp_path / "a.png"), "--input", layer[1]]) == 2
    assert (
        "a plot needs matplotlib, not installed here: pip install matplotlib"
        in capsys.readouterr().err
    )


@pytest.mark.thorough
@pytest.mark.costly("modules that a new process imports")
def test_picture_libraries_load_lazily(tmp_path):
    """Importing the modules for plots and HTML imports neither Matplotlib, Jinja2 nor Pillow.

    Plotting does not import matplotlib.pyplot, which would look for a window system.
    """
    program = f"""
import sys, parity.use.reporting.plot, parity.use.reporting.html
print({{"matplotlib", "jinja2", "PIL"}} & set(sys.modules))
import numpy
parity.use.reporting.plot.plot_attention(numpy.eye(2), path={str(tmp_path / "a.png")!r})
print("matplotlib" in sys.modules, "matplotlib.pyplot" in sys.modules)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "set()\nTrue False\n"
