"""Tests of `tools/tt-simulator`: rejected input, the printed environment, and unpacked packages."""

import hashlib
import importlib.machinery
import importlib.util
import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.input_errors import rejects

TOOL = ROOT / "tools" / "tt-simulator"
ELF = b"\x7fELF and so on"

needs_zstd = pytest.mark.skipif(shutil.which("zstd") is None, reason="zstd unpacks the compiler")


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader("tt_simulator", str(TOOL))
    spec = importlib.util.spec_from_loader("tt_simulator", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def library(tmp_path):
    path = tmp_path / "libttsim_bh.so"
    path.write_bytes(ELF)
    return path


@pytest.fixture
def python(tmp_path):
    """An interpreter whose environment has ttnn."""
    ttnn = tmp_path / "site" / "ttnn"
    for folder in ("tt_metal/soc_descriptors", "ttnn", "runtime/hw"):
        (ttnn / folder).mkdir(parents=True)
    for name in ("blackhole_140_arch", "wormhole_b0_80_arch"):
        (ttnn / "tt_metal" / "soc_descriptors" / f"{name}.yaml").write_text(name)
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\necho {ttnn}\n")
    path.chmod(0o755)
    return path


def message_of(capsys, tool, *arguments):
    assert tool.main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""  # a shell evaluates standard output as an environment
    return printed.err.splitlines()[-1]


def test_unknown_library_name_is_rejected(capsys, tool, tmp_path):
    """A library named libttsim.so exits with status 2 and an error with the valid names."""
    (tmp_path / "libttsim.so").write_bytes(ELF)
    message = message_of(capsys, tool, tmp_path / "libttsim.so")
    assert rejects("the simulator", "libttsim.so'").is_printed_in(message)
    assert [
        name for name in ("libttsim_bh.so", "libttsim_wh.so", "wolfpine") if name not in message
    ] == []


def test_missing_library_is_rejected(capsys, tool, tmp_path):
    """A library that does not exist exits with status 2 and an error with its name."""
    assert rejects("the simulator", "libttsim_wh.so'").is_printed_in(
        message_of(capsys, tool, tmp_path / "libttsim_wh.so")
    )


def test_non_elf_library_is_rejected(capsys, tool, library):
    """A file that is not an ELF library exits with status 2 and an error with its path."""
    library.write_text("<html>not found</html>")
    assert rejects("the simulator", str(library)).is_printed_in(message_of(capsys, tool, library))


def test_wrong_sha256_is_rejected(capsys, tool, library):
    """A library with a different SHA-256 exits with status 2 and an error with both."""
    digest = hashlib.sha256(ELF).hexdigest()
    message = message_of(capsys, tool, library, "--sha256", "0" * 64)
    assert rejects("the simulator", digest, where="tt-simulator").is_printed_in(message)
    assert "0" * 64 in message


def test_mismatched_options_are_rejected(capsys, tool, library):
    """--arch with a library, and --sha256 with wolfpine, exit with status 2 and an error with
    the option.
    """
    assert rejects("--arch", "wh").is_printed_in(message_of(capsys, tool, library, "--arch", "wh"))
    assert rejects("--sha256", "wolfpine").is_printed_in(
        message_of(capsys, tool, "wolfpine", "--sha256", "0" * 64)
    )


@pytest.mark.costly("the tool asks the interpreter")
def test_python_without_ttnn_is_rejected(capsys, tool, library, tmp_path):
    """A --python without ttnn, or one that does not exist, exits with status 2 and an error
    with its path.
    """
    (tmp_path / "python").write_text("#!/bin/sh\necho\n")
    (tmp_path / "python").chmod(0o755)
    for name in ("python", "none"):
        message = message_of(capsys, tool, library, "--python", tmp_path / name)
        assert rejects("--python", str(tmp_path / name)).is_printed_in(message)


@pytest.mark.costly("a shell reads what is printed")
@pytest.mark.parametrize(("chip", "arch"), [("bh", "blackhole"), ("wh", "wormhole")])
def test_library_is_set_up_with_environment(capsys, tool, library, python, tmp_path, chip, arch):
    """A library is copied into the folder with its SoC descriptor, and the printed variables
    lead to it and to ttnn's folders.
    """
    library = library.rename(tmp_path / f"libttsim_{chip}.so")
    folder = tmp_path / "a folder"
    (folder / "sfpi").mkdir(parents=True)  # the compiler was set up before
    sha256 = hashlib.sha256(ELF).hexdigest()
    assert (
        tool.main(
            [str(library), "--folder", str(folder), "--python", str(python), "--sha256", sha256]
        )
        == 0
    )
    printed = capsys.readouterr()
    shell = subprocess.run(
        ["sh", "-c", f"{printed.out}env"], capture_output=True, text=True, check=True, env={}
    )
    environment = dict(line.split("=", 1) for line in shell.stdout.splitlines())
    installed = Path(environment["TT_METAL_SIMULATOR"])
    assert installed == folder / arch / library.name
    assert installed.read_bytes() == ELF
    assert (installed.parent / "soc_descriptor.yaml").read_text().startswith(arch)
    root = Path(environment["TT_METAL_RUNTIME_ROOT"])
    assert all(
        (root / link).is_dir() for link in ("tt_metal", "ttnn", "runtime/hw", "runtime/sfpi")
    )
    assert environment["TT_METAL_CACHE"] == f"{folder}/kernels/{arch}/"
    assert f"sha256 {sha256}, as given" in printed.err


def test_wheel_with_wrong_sha256_raises(tool, tmp_path):
    """A wheel with a different SHA-256 raises an error with its name and the expected SHA-256."""
    (tmp_path / "a.whl").write_bytes(b"another")
    with pytest.raises(tool.SimulatorError, match=r"a\.whl.*1f25.*"):
        tool.check_sha256(tmp_path / "a.whl", tool.WOLFPINE[2])


def archive(**files):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name.replace("__", "/"))
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


def compressed(content):
    return subprocess.run(
        ["zstd", "--quiet", "--stdout"], input=content, capture_output=True, check=True
    ).stdout


@pytest.mark.costly("zstd is a program")
@needs_zstd
def test_compiler_is_found_in_last_frame(tool, tmp_path):
    """The compiler is unpacked from the last of three zstd frames between other bytes,
    without files of other frames.
    """
    name = "runtime__sfpi__compiler__bin__riscv-tt-elf-g++"
    frames = [b"not an archive", archive(runtime__other=b"1"), archive(**{name: b"the compiler"})]
    tool.unpack(b"\0" * 100 + b"x".join(map(compressed, frames)) + b"\0" * 100, tmp_path)
    assert (tmp_path / "runtime/sfpi/compiler/bin/riscv-tt-elf-g++").read_bytes() == b"the compiler"
    assert not (tmp_path / "runtime/other").exists()


@pytest.mark.costly("zstd is a program")
@needs_zstd
def test_library_without_compiler_raises(tool, tmp_path):
    """Unpacking a library whose frames have no compiler raises an error about it."""
    with pytest.raises(tool.SimulatorError, match="compiler"):
        tool.unpack(compressed(archive(runtime__other=b"1")), tmp_path)


def test_division_follows_risc_v(tool):
    """Quotients round toward zero, remainders have the dividend's sign, and division by zero
    returns -1, exactly up to 2^62.
    """
    namespace = {}
    exec(f"class Divider:{tool.DIVISION}", namespace)
    divided = namespace["Divider"]._divided
    assert [divided(*pair) for pair in ((7, 2), (-7, 2), (7, -2), (-7, -2))] == [
        (3, 1),
        (-3, -1),
        (-3, 1),
        (3, -1),
    ]
    assert divided(5, 0) == (-1, 5)
    assert divided(2**62 + 1, 1) == (2**62 + 1, 0)  # exact, unlike a float


def test_unknown_division_code_raises(tool):
    """A module of wolfpine with the known lines gets the new division; one with other lines
    raises an error.
    """
    assert "_divided" in tool.with_division("\n".join(tool.REPLACED))
    with pytest.raises(tool.SimulatorError, match="wolfpine"):
        tool.with_division("result = rs1_val // rs2_val")


@pytest.mark.costly("the tool runs without the project")
def test_help_names_trusted_sources():
    """The help names the two sources that are trusted, the missing license and the SHA-256."""
    shown = subprocess.run(
        [sys.executable, TOOL, "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert [
        word
        for word in ("jax-tt-plugin", "wolfpine", "neither a license", "sha256")
        if word not in shown
    ] == []
