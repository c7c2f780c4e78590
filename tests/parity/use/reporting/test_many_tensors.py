"""Tests with thousands of tensors: the time of `inspect`, and readable tables."""

import io
import json
import struct
import sys
import time

import pytest
from helpers.samples import sample
from rich.text import Text

from parity.port.conversion.layouts import LAYOUTS
from parity.port.conversion.prefixes import Names
from parity.use.cli.main import main
from parity.use.reporting.console import MOST_ROWS, console, print_table


def letters(number):
    """Return a number in letters, because names that differ by numbers are shown together."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def write_header(path, names, shape):
    """Write a safetensors file whose tensors are a hole in the file."""
    size = 4
    for axis in shape:
        size *= axis
    header = {}
    for index, name in enumerate(names):
        header[name] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [index * size, (index + 1) * size],
        }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + len(names) * size)
    return path


def projections(prefixes):
    return [f"{prefix}.self_attn.{part}_proj.weight" for prefix in prefixes for part in "qkvo"]


MANY = {
    "other names": ([f"x{letters(i)}" for i in range(10_000)], [0]),
    "numbered layers": (projections(f"model.layers.{i}" for i in range(2_500)), [8, 8]),
    "layers of other names": (
        projections(f"model.{letters(i)}.layers.0" for i in range(1_250)),
        [8, 8],
    ),
}


@sample(1)
@pytest.mark.parametrize("kind", MANY)
def test_inspect_time_grows_with_tensors(tmp_path, capsys, kind):
    """`inspect` of 10,000 tensors takes less than 2.5 s; numbered layers are one entry, other
    names are all printed.
    """
    names, shape = MANY[kind]
    path = write_header(tmp_path / "many.safetensors", names, shape)
    begun = time.process_time()
    assert main(["inspect", str(path)]) == 0
    assert (
        time.process_time() - begun < 2.5
    )  # about half a second; in quadratic time it took more than three
    printed = capsys.readouterr().out
    if kind == "numbered layers":
        assert "model.layers.{i}.self_attn.q_proj.weight" in printed
        assert len(printed.splitlines()) < 30
        assert "2500" in printed
    else:
        assert all(name.replace(".0.", ".{i}.") in printed for name in names)


def test_layers_of_equal_shapes_are_listed(tmp_path, capsys):
    """30 layers of equal shapes and different names are all in the JSON, in order, with heads
    2 x 4.
    """
    prefixes = [f"{letters(i)}.layers.0" for i in range(30)]
    path = write_header(tmp_path / "some.safetensors", projections(prefixes), [8, 8])
    assert (
        main(["inspect", str(path), "--num-heads", "2", "--json", str(tmp_path / "found.json")])
        == 0
    )
    layers = json.loads((tmp_path / "found.json").read_text())["layers"]
    of_llama = [layer for layer in layers if layer["layout"] == "transformers.LLaMA"]
    assert [layer["prefix"] for layer in of_llama] == [
        f"{letters(i)}.layers.{{i}}.self_attn" for i in range(30)
    ]
    assert all(layer["heads"].startswith("2 x 4") for layer in of_llama)


def rows_of(number):
    return [(f"row{i}", Text(f"cell{i}")) for i in range(number)]


def test_terminal_shows_first_rows(monkeypatch):
    """On a terminal, a table has its first MOST_ROWS rows and the number of further ones."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    print_table(console(), "title", ("one", "two"), rows_of(MOST_ROWS + 5))
    printed = sys.stdout.getvalue()
    assert f"cell{MOST_ROWS - 1} " in printed
    assert f"cell{MOST_ROWS} " not in printed
    assert "… and 5 more rows" in printed


def test_pipe_receives_all_rows(monkeypatch):
    """In a pipe, a table has all rows, with long cells whole and control characters escaped."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    hostile = ("\x1b[2J\n", "x" * 300)
    print_table(console(), "title", ("one", "two"), [*rows_of(MOST_ROWS), hostile])
    lines = sys.stdout.getvalue().splitlines()
    assert len(lines) == MOST_ROWS + 3
    assert lines[1].split() == ["one", "two"]
    assert lines[2].split() == ["row0", "cell0"]
    assert lines[-1].split() == [r"\x1b[2J\n", "x" * 300]


def test_prefixes_are_found_in_file_order():
    """Prefixes that a layout may have are found in the order of the file, and only those."""
    names = Names(
        [
            "b.q_proj.weight",
            "a.q_proj.weight",
            "q_proj.weight",
            "a.b.q_proj.weight",
            "x.other.weight",
        ]
    )
    assert [*names.possible_prefixes(LAYOUTS["canonical"])] == ["b", "a", "", "a.b"]
    assert names.under("a") == ["a.q_proj.weight", "a.b.q_proj.weight"]
    assert names.beginning("") == [*names.order]
