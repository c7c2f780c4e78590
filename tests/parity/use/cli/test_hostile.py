"""Tests of hostile files: nothing in them runs, hangs, fills memory or controls a terminal."""

import io
import json
import os
import re
import struct
import subprocess
import sys
import time
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.command_line import error_line
from helpers.input_errors import rejects
from helpers.limits import within

import parity
from mha_spec import InputError, Rope
from parity import AttentionSpec, random_weights, save
from parity.measure.core.trace import Trace
from parity.measure.core.weights import load_tensors, save_tensors
from parity.measure.files import open_tensors
from parity.measure.text import in_line, printable
from parity.port.conversion.hints import LayerHints
from parity.port.conversion.layouts import LAYOUTS, find_spec
from parity.use.cli.main import main
from parity.use.cli.messages import warn
from parity.use.reporting.console import console, print_table
from parity.use.running.elsewhere import Elsewhere
from parity.use.running.jobs import by_processes
from parity.use.running.run import compare_traces
from parity.use.running.traces import save_trace

ESCAPES = "\x1b[2J\x9b2J\x07\u202e"
SPEC = AttentionSpec(8, 2)


# ---- Text ----------------------------------------------------------------------------------------


def test_control_characters_are_escaped():
    """`printable` escapes control characters, changes of direction and surrogates, except for
    those in `keep`, a newline by default.
    """
    assert printable(f"é\n\t{ESCAPES}\ud800") == "é\n\\t\\x1b[2J\\x9b2J\\x07\\u202e\\ud800"
    assert printable("a\nb\tc", keep="\t") == "a\\nb\tc"


def test_workflow_commands_are_escaped():
    """A line of text that a GitHub workflow would obey is escaped, also after spaces; others with
    two colons are not.
    """
    assert printable("::error::x\n \t::add-mask::y\na::b ::c") == (
        "\\x3a:error::x\n \\t::add-mask::y\na::b ::c"
    )
    assert printable("a\n  ::error::x") == "a\n  \\x3a:error::x"
    assert printable("::error::x", keep="") == "\\x3a:error::x"


@pytest.mark.parametrize("option", ["--output-format=github", "--junit=-", "--html=-", "-v"])
def test_trace_begins_no_github_command(tmp_path, capfd, option):
    """The text of a trace never begins a workflow command, in any format."""
    problem = parity.make_problem("causal", "float32")
    error = "ValueError: first\n::error::from a file\n  ::add-mask::output"
    save_trace(tmp_path, Trace(problem, "torch", {}, {}, error=error))
    assert main(["compare", str(tmp_path), option]) == 1
    printed = capfd.readouterr().out
    assert "from a file" in printed
    own = re.compile("::error title=(causal%2C float32%3A torch|mha-parity)::")
    for line in printed.splitlines():
        assert not line.lstrip().startswith("::") or own.match(line), line


def test_traceback_begins_no_github_command(tmp_path, capfd, monkeypatch):
    """With --verbose, the text of an exception never begins a workflow command."""
    (tmp_path / "port.py").write_text("raise ValueError('first\\n::error::from a file')\n")
    monkeypatch.chdir(tmp_path)
    assert main(["conformance", "port:layer", "--verbose"]) == 2
    printed = capfd.readouterr().err
    assert "Traceback" in printed
    assert "\n\\x3a:error::from a file" in printed
    assert "\n::" not in printed


@pytest.mark.parametrize("command", ["plot a.safetensors a.png --heads", "run --model a --layers"])
def test_huge_range_is_an_error(capsys, command):
    """A range of more numbers than any model has layers or heads is an error, and fills no memory."""
    printed = error_line(capsys, *command.split(), "0,5-99999999999999")
    assert "0,5-99999999999999" in printed


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="a folder without new files")
def test_folder_without_new_files_fails():
    """A file in a folder in which no file can be created is an error, without an endless wait."""
    with within(20), pytest.raises(FileNotFoundError, match=r"a\.safetensors"):
        save("/proc/a.safetensors", random_weights(SPEC), SPEC)


def test_live_function_that_fails_is_named(tmp_path, capsys, monkeypatch):
    """An error of the function of `spec --live` names the option, the error and its line."""
    (tmp_path / "alive.py").write_text("def make(size):\n    pass\n\n\ndef fails():\n    1 / 0\n")
    monkeypatch.chdir(tmp_path)
    line = error_line(capsys, "spec", "--live", "alive:make")
    assert rejects("--live", "TypeError: make()").is_printed_in(line)
    line = error_line(capsys, "spec", "--live", "alive:fails")
    assert rejects("--live", "ZeroDivisionError").is_printed_in(line)
    assert "alive.py, line 6" in line


def test_message_is_one_short_line():
    """`in_line` joins lines, escapes control characters, and shortens a long text but keeps
    its end.
    """
    assert in_line("one \n\n two\r\x1b") == "one; two; \\x1b"
    cut = in_line("a" * 300_000 + "\nend", 1000)
    assert len(cut) < 1100
    assert cut.endswith("end")


def test_console_prints_text_literally(monkeypatch):
    """On a terminal, texts and tables show markup and emoji codes literally, with control
    characters escaped.
    """
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    out = console()
    assert out.is_terminal
    out.print(f"[link=https://a.b]x[/red] :smile: {ESCAPES}")
    print_table(out, f"[/red]{ESCAPES}", [f"[/red]{ESCAPES}"], [[f"[bold]{ESCAPES}"]])
    printed = sys.stdout.getvalue()
    assert "[link=https://a.b]x[/red] :smile: \\x1b[2J\\x9b2J\\x07\\u202e" in printed
    assert "\x1b[2J" not in printed
    assert not {"\x9b", "\x07", "\u202e"} & {*printed}


def config(tmp_path, **keys):
    known = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(known | keys))
    return ["spec", tmp_path]


def gguf(tmp_path, **values):
    def text(value):
        return struct.pack("<Q", len(value.encode())) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 4, 3 + len(values))
    for key in ("block_count", "attention.head_count", "embedding_length"):
        head += text(f"llama.{key}") + struct.pack("<II", 4, 1 if key == "block_count" else 4)
    head += b"".join(
        text(key) + struct.pack("<I", 8) + text(value) for key, value in values.items()
    )
    for i, name in enumerate(("q", "k", "v", "output")):
        head += text(f"blk.0.attn_{name}.weight") + struct.pack("<IQQIQ", 2, 4, 4, 0, 64 * i)
    (tmp_path / "a.gguf").write_bytes(head + bytes(-len(head) % 32 + 256))
    return ["inspect", tmp_path / "a.gguf"]


def metadata(tmp_path, **entries):
    save(tmp_path / "a.safetensors", random_weights(SPEC), SPEC)
    tensors, own = load_tensors(tmp_path / "a.safetensors")
    save_tensors(tmp_path / "a.safetensors", tensors, {**own, **entries})
    return ["compare", tmp_path / "a.safetensors", tmp_path / "a.safetensors"]


@pytest.mark.parametrize(
    "hostile",
    [
        lambda folder: config(folder, **{f"attn{ESCAPES}": 1}),
        lambda folder: config(folder, partial_rotary_factor=ESCAPES),
        lambda folder: config(folder, **{"attn" + "x" * 200_000: ["y"] * 100_000}),
        lambda folder: gguf(
            folder, **{"general.architecture": "llama", f"llama.attention.{ESCAPES}": ESCAPES}
        ),
        lambda folder: gguf(
            folder, **{"general.architecture": "llama", "llama.rope.scaling.type": ESCAPES}
        ),
        lambda folder: metadata(folder, dropped=json.dumps([ESCAPES])),
    ],
)
def test_text_of_files_is_escaped(tmp_path, capsys, hostile):
    """Control characters and long texts in configurations, GGUF files and metadata are
    printed escaped, in fewer than 10,000 characters.
    """
    assert main(list(map(str, hostile(tmp_path)))) in (0, 2)
    for text in capsys.readouterr():
        assert all(line.isprintable() for line in text.splitlines())
        assert len(text) < 10_000


@pytest.mark.filterwarnings("default")
def test_library_warning_is_one_line(tmp_path, capsys, monkeypatch):
    """A warning of a library is printed in one line, with control characters escaped."""
    monkeypatch.setattr(
        "parity.use.cli.inspect.run.callback",
        lambda _: warnings.warn(f"a\n{ESCAPES}", stacklevel=1) or (0, {}),
    )
    assert main(["inspect", str(tmp_path)]) == 0
    assert (
        capsys.readouterr().err
        == "mha-parity: warning: UserWarning: a; \\x1b[2J\\x9b2J\\x07\\u202e\n"
    )


def test_long_tensor_name_is_shortened(tmp_path, capsys):
    """The error about a tensor with a name of 200,000 characters has fewer than 1000."""
    header = json.dumps(
        {"x" * 200_000: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
    ).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert len(error_line(capsys, "inspect", tmp_path / "a.safetensors")) < 1000


# ---- Output that cannot be written ---------------------------------------------------------------


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, text):
        raise OSError(28, "No space left on device")

    def flush(self):
        self.write("")


@pytest.mark.filterwarnings("default")
def test_full_stderr_keeps_exit_status(tmp_path, monkeypatch):
    """If standard error cannot be written, an error still exits with status 2, and a warning
    with status 0.
    """
    monkeypatch.setattr(sys, "stderr", Full())
    assert main(["inspect", str(tmp_path / "nothing")]) == 2
    monkeypatch.setattr("parity.use.cli.inspect.run.callback", lambda _: warn("unsaid") or (0, {}))
    assert main(["inspect", str(tmp_path)]) == 0


@pytest.mark.costly("the exit status of a process whose disk is full")
def test_unwritable_output_exits_2(tmp_path):
    """If standard output and standard error cannot be written, the status is 2, not 1, which
    means a mismatch.
    """
    save(tmp_path / "a.npz", random_weights(SPEC), SPEC)
    with open("/dev/full", "w") as full:  # the interpreter itself may complain at its end
        command = [sys.executable, "-m", "parity", "inspect", tmp_path / "nothing"]
        assert subprocess.run(command, stderr=full, stdout=full, check=False).returncode == 2
        help_ = subprocess.run(
            [*command[:3], "--help"], stdout=full, capture_output=False, check=False, stderr=-3
        )
        assert help_.returncode == 2


def test_deleted_current_folder_exits_2(tmp_path, capsys, monkeypatch):
    """If the current folder does not exist any more, a command exits with status 2 and one
    line that says so.
    """

    def gone():
        raise FileNotFoundError(2, "No such file or directory")

    save(tmp_path / "a.npz", random_weights(SPEC), SPEC)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getcwd", gone)
        assert "current folder" in error_line(capsys, "inspect", tmp_path / "a.npz")


# ---- Code of the current folder ------------------------------------------------------------------


@pytest.fixture
def in_a_trap(tmp_path, monkeypatch):
    """Put modules with standard names into the current folder; return which of them ran."""
    for name in ("argparse", "multiprocessing", "runpy", "json"):
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + ' ')\n"
        )
    monkeypatch.chdir(tmp_path)
    return lambda: (tmp_path / "ran").read_text() if (tmp_path / "ran").exists() else ""


@pytest.mark.costly("modules that another interpreter imports")
def test_other_python_ignores_current_folder(in_a_trap):
    """Another Python that is started imports no module of the current folder."""
    with (
        Elsewhere(sys.executable, ["--nonsense"]) as elsewhere,
        pytest.raises(OSError, match="exit status 2"),
    ):
        elsewhere.wait()
    assert in_a_trap() == ""


@pytest.mark.costly("modules that a process of jobs imports")
def test_jobs_ignore_current_folder(in_a_trap):
    """Processes for jobs import no module of the current folder, and PYTHONSAFEPATH is not
    set afterwards.
    """
    assert list(by_processes(abs, [-1], 1, cost=float)) == [1]
    assert in_a_trap() == ""
    assert "PYTHONSAFEPATH" not in os.environ


def test_mesh_processes_have_safe_path(monkeypatch):
    """Both processes of a mesh start with PYTHONSAFEPATH=1 and the import path of this process."""
    from parity_lab.mesh import processes

    began = []

    def begin(**_):
        began.append((os.environ.get("PYTHONSAFEPATH"), os.environ.get("PYTHONPATH")))
        return SimpleNamespace(start=list, terminate=list, join=list, is_alive=list)

    context = SimpleNamespace(
        SimpleQueue=list, Queue=list, Process=begin, set_forkserver_preload=list
    )
    monkeypatch.setattr("torch.multiprocessing.get_context", lambda _: context)
    processes.Processes(2, print).stop()
    assert (
        began == [("1", os.pathsep.join(filter(None, sys.path)))] * 2
    )  # and this process's import path


# ---- Programs ------------------------------------------------------------------------------------


@pytest.mark.costly("a program in place of an interpreter")
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("sleep 20 & exit 0", ["exit status 0", "nothing on standard error"]),
        ("echo oops >&2; exit 1", ["exit status 1", "oops"]),
        ("printf 'bad \\222' >&2; exit 3", ["exit status 3", "bad \ufffd"]),
    ],
)
def test_non_python_program_is_named(tmp_path, script, words):
    """A program that is not Python raises an OSError within 10 seconds, with its path, exit
    status and standard error.
    """
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    begun = time.monotonic()
    with (
        Elsewhere(str(python), []) as elsewhere,
        pytest.raises(OSError, match="/python ") as caught,
    ):
        elsewhere.wait()
    assert time.monotonic() - begun < 10
    assert all(word in str(caught.value) for word in [str(python), *words])


# ---- Sizes ---------------------------------------------------------------------------------------

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


@pytest.mark.parametrize("shape", [(10**10, 0), (0, 2**63), (10**9, 1), (2**40, 2**40)])
def test_absurd_sizes_raise_quickly(shape):
    """Shapes that no layer has, such as 2^40 x 2^40, raise an error within 5 seconds."""
    shapes = {
        f"{name}.weight": shape if name != "out_proj" else shape[::-1] for name in PROJECTIONS
    }
    with within(5), rejects("shapes", {"q_proj.weight.shape": shape}):
        find_spec(shapes, LAYOUTS["canonical"], LayerHints())


def test_reason_is_of_the_same_shapes():
    """Heads of one feature, which RoPE rejects, are no reason if the shapes are not theirs."""
    shapes = {"q_proj.weight": (64, 32), "k_proj.weight": (16, 32), "v_proj.weight": (12, 32)}
    shapes["o_proj.weight"] = (32, 64)
    with pytest.raises(InputError) as caught:
        find_spec(shapes, LAYOUTS["transformers.LLaMA"], LayerHints(rope=Rope()))
    assert caught.value.argument == "shapes"
    assert "RoPE" not in str(caught.value)


def test_head_search_tries_only_divisors():
    """Heads of a layer with 14,414,400 features are found within 30 seconds, since only
    divisors are tried.
    """
    shapes = {
        f"{name}.weight": (14_414_400, 1) if name != "out_proj" else (1, 14_414_400)
        for name in PROJECTIONS
    }
    with within(30):
        heads = find_spec(shapes, LAYOUTS["canonical"], LayerHints(16, 16))
    assert heads.head_dim == 900_900


def test_empty_tensors_are_listed_quickly(tmp_path, capsys):
    """`inspect` lists empty tensors with an axis of 10^10 within 10 seconds."""
    entries = {
        f"{name}.weight": {"dtype": "F32", "shape": [10**10, 0], "data_offsets": [0, 0]}
        for name in PROJECTIONS
    }
    header = json.dumps(entries).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with within(10):
        assert main(["inspect", str(tmp_path / "a.safetensors")]) == 0
    assert "10000000000 x 0" in capsys.readouterr().out


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(
    "tensors",
    [
        {"x": torch.zeros(1).expand(60_000, 60_000)},
        {f"x{i}": torch.zeros(500, 1).expand(500, 500) for i in range(100)},
    ],
)
def test_expanded_torch_tensors_raise(tmp_path, tensors, is_old):
    """Opening a torch file of either format raises a ValueError if its expanded tensors
    exceed its size 100-fold.
    """
    torch.save(tensors, tmp_path / "a.pt", _use_new_zipfile_serialization=not is_old)
    with pytest.raises(ValueError, match="100-fold"):
        open_tensors(tmp_path / "a.pt")


def test_shared_torch_weights_are_read(tmp_path):
    """A torch file with one tensor under 60 names is read, and the last name has its values."""
    weight = torch.randn(500, 500)
    torch.save({f"x{i}": weight for i in range(60)}, tmp_path / "a.pt")
    with open_tensors(tmp_path / "a.pt") as file:
        assert np.array_equal(file.read("x59"), weight.numpy())


# ---- Damage --------------------------------------------------------------------------------------


def test_damaged_torch_tensor_raises(tmp_path):
    """Reading a damaged tensor of a torch file, or a part of it, raises a ValueError about
    its CRC-32; other tensors are read.
    """
    tensors = {"a": torch.arange(500.0), "b": torch.arange(500.0, 1000.0), "empty": torch.zeros(0)}
    torch.save(tensors | {"part": tensors["b"][3:]}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(np.float32(700.0).tobytes())] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    with open_tensors(tmp_path / "a.pt") as file:
        assert np.array_equal(file.read("a"), tensors["a"].numpy())
        assert file.read("empty").size == 0
        for name in ("b", "part", "b"):
            with pytest.raises(ValueError, match="CRC-32"):
                file.read(name)


def test_damaged_torch_pickle_raises(tmp_path):
    """Opening a torch file whose description of tensors is damaged raises a ValueError about
    its CRC-32.
    """
    torch.save({"name": torch.ones(3)}, tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes().replace(b"name", b"nome"))
    with pytest.raises(ValueError, match="CRC-32"):
        open_tensors(tmp_path / "a.pt")


def test_torch_file_without_crc_is_read(tmp_path):
    """A torch file that was saved without checksums is read."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    with open_tensors(tmp_path / "a.pt") as file:
        assert file.read("a").tolist() == [1.0, 1.0, 1.0]


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_quantized_torch_tensor_exits_2(tmp_path, capsys):
    """A quantized tensor exits with status 2 and one line with its dtype, without warnings of
    torch.
    """
    torch.save(
        {"a": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)}, tmp_path / "a.pt"
    )
    assert "qint8" in error_line(capsys, "inspect", tmp_path / "a.pt")


# ---- Traces and recordings -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    parity.run_cases([parity.CASES["textbook"]], ["torch"], traces=folder)
    return load_tensors(folder / "textbook-float32-torch.safetensors")


@pytest.mark.parametrize(
    "entries",
    [
        {"environment": "[1]"},
        {"environment": '{"backends": {"torch": {"numerics": {"arithmetic": "tensix"}}}}'},
    ],
)
def test_invalid_trace_metadata_exits_2(tmp_path, trace, entries, capsys):
    """A trace with an invalid environment or numerics in its metadata exits with status 2 and
    one line.
    """
    save_tensors(tmp_path / "a.safetensors", trace[0], trace[1] | entries)
    error_line(capsys, "compare", tmp_path / "a.safetensors")


def test_extra_stage_of_trace_fails(tmp_path, trace):
    """A trace with a stage step3.output, which the reference does not have, fails at this stage."""
    for part in ("accumulated", "local"):
        save_tensors(
            tmp_path / "a.safetensors",
            {**trace[0], f"{part}/step3.output": np.full(3, np.nan)},
            trace[1],
        )
        report = compare_traces([tmp_path / "a.safetensors"])
        assert [comparison.stage for comparison in report.failed] == ["step3.output"]


def tap(path, kind="self", changed=(), **layer):
    """Save a recording of one call, with some values changed."""
    x = np.random.default_rng(0).standard_normal((1, 3, 8)).astype(np.float32)
    values = {
        "0/0/input": x,
        "0/0/output": x,
        "0/0/q": np.ones((1, 2, 3, 4), np.float32),
        **dict(changed),
    }
    metadata = {
        "name": "attn",
        "index": 0,
        "module": "A",
        "kind": kind,
        "is_causal": None,
        "training": False,
    }
    call = {"past": 0, "first_key": 0, "continued_rows": None}
    metadata |= {"attention": "", "scale": None, "calls": [call], **layer}
    entries = {"layers": [metadata], "config": {}, "model": "M"}
    save_tensors(path, values, {"format": "1", "kind": "tap", "tap": json.dumps(entries)})


@pytest.mark.parametrize("kind", ["[/red]", "[link=https://a.b]x", ESCAPES])
def test_layer_kind_is_shown_literally(tmp_path, capsys, kind):
    """`compare` shows the kind of a recorded layer literally, with control characters escaped."""
    tap(tmp_path / "a.safetensors", kind)
    tap(tmp_path / "b.safetensors", kind)
    assert main(["compare", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]) == 0
    shown = capsys.readouterr().out
    assert f"layer 0 ({printable(kind)})"[:20] in shown
    assert all(line.isprintable() for line in shown.splitlines())


IMPOSSIBLE_RECORDINGS = [
    {"changed": {"0/0/input": np.float32(1.0)}},
    {"changed": {"0/0/q": np.float32(1.0)}},
    {"changed": {"0/0/output": np.ones((1, 5, 8), np.float32)}},
    {"calls": [{"past": "x", "first_key": 0, "continued_rows": None}]},
    {"calls": [{"past": 0, "first_key": -3, "continued_rows": None}]},
    {"calls": [{"past": 0, "first_key": 0, "continued_rows": [7]}]},
    {"calls": [{"past": 0, "first_key": 0, "continued_rows": 7}]},
    {"scale": "large"},
    {"index": None},
]


def test_impossible_recording_exits_2(tmp_path, capsys, subtests):
    """A recording with an impossible shape, call, scale or index exits with status 2 and one
    line.
    """
    tap(tmp_path / "a.safetensors")
    for changes in IMPOSSIBLE_RECORDINGS:
        with subtests.test(str(changes)):
            tap(tmp_path / "b.safetensors", **changes)
            error_line(capsys, "compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors")


# ---- Names ---------------------------------------------------------------------------------------


def test_undecodable_file_name_is_reported(tmp_path):
    """A file whose name is not valid UTF-8 is compared, with its name escaped in the JSON;
    JUnit XML and HTML are also written.
    """
    path = f"{tmp_path}/\udcff.safetensors"
    save(path, random_weights(SPEC), SPEC)
    report = [
        "--json",
        f"{tmp_path}/a.json",
        "--junit",
        f"{tmp_path}/a.xml",
        "--html",
        f"{tmp_path}/a.html",
    ]
    assert main(["run", "--backends", "torch", "--weights", path, "--quiet", *report]) == 0
    results = json.loads((tmp_path / "a.json").read_text())["results"]
    assert {result["case"] for result in results} >= {"weights-\\udcff-full"}
