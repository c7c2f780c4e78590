"""`write` with untrusted files: their text is data in the written module, and never runs."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.input_errors import rejects
from helpers.samples import sample
from helpers.written import module_of, nested
from safetensors.numpy import save_file

import parity
from mha_spec import AttentionSpec, Rope
from parity.explain.writing.evaluate import FUNCTIONS, value_of
from parity.explain.writing.quoting import check_keys, string_literal
from parity.use.cli.main import main

SPEC = AttentionSpec(8, 2, qkv_bias=False, out_bias=False, rope=Rope())
LAYER = "model.layers.0.self_attn"
LAYOUT = "transformers.LLaMA"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 16,
    "vocab_size": 8,
}

SYSTEM = '__import__("os").system("touch PWNED")'
FROM_SPEC = (
    'spec.__class__.__init__.__globals__["__builtins__"]["__import__"]("os").system("touch PWNED")'
)
"""Expressions that leave a file behind: one in any evaluation, one in an evaluation that has only
`spec`.
"""

HOSTILE = {
    "known expression": f'"""+str({FROM_SPEC})+"""',
    "expression": f'"""+str({SYSTEM})+"""x',
    "end of a docstring": '"""',
    "statement": f'x"""; {SYSTEM}; """',
    "single quotes": f"'''+str({SYSTEM})+'''",
    "end of a key": f'"]; {SYSTEM}; tensors["',
    "end of a key, escaped": f'\\"]; {SYSTEM}; tensors[\\"',
    "backslash": "back\\",
    "backslashes": "\\\\",
    "escape": "\\x22 \\N{QUOTATION MARK} \\u0022 \\",
    "braces": f"{{{SYSTEM}}} {{0.__class__}} {{",
    "fields of a format": "{layers}.{0}.{j}",
    "comment": "# type: ignore #",
    "percent": "%s %(x)s %",
    "shell": "$(touch PWNED) `touch PWNED` ; touch PWNED",
    "words of the template": "ABOUT TITLE ABSENT spec call tensors",
    "many letters": "測量-Maß-é-😀",
    "both quotes": "'\"",
    "long": "x" * 300,
}
"""Text for names of tensors, before the layer's own names; each is kept unchanged."""

LINE_ENDS = [
    "\n",
    "\r",
    "\r\n",
    "\u2028",
    "\u2029",
    "\u0085",
    "\x0b",
    "\x0c",
    "\x00",
    "\x1b[2J",
    "\u202e",
    "\udc80",
]
"""Text that is not printable: names with it raise an error."""


def tensors_of(prefix: str, spec: AttentionSpec = SPEC) -> dict[str, np.ndarray]:
    """Return the tensors of a layer, under a prefix."""
    names = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"}
    weights = parity.random_weights(spec)
    return {f"{prefix}.{name}.weight": weights[f"{own}.weight"] for own, name in names.items()}


def save(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors with the libraries of their formats, which accept any name."""
    if path.suffix == ".safetensors":
        save_file(dict(tensors), path)
    elif path.suffix == ".pt":
        torch.save({name: torch.tensor(x) for name, x in tensors.items()}, path)
    else:
        np.savez(path, **tensors)  # pyright: ignore[reportArgumentType]


def file_of(folder: Path, prefix: str, suffix: str) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a layer under a prefix, with a configuration for a folder of safetensors; return path
    and tensors.
    """
    tensors = tensors_of(prefix)
    if suffix == "folder":
        (folder / "config.json").write_text(json.dumps(CONFIG))
        save(folder / "model.safetensors", tensors)
        return folder, tensors
    path = folder / f"weights{suffix}"
    save(path, tensors)
    return path, tensors


def check_written(path: Path, framework: str, tensors: Mapping[str, np.ndarray]) -> None:
    """Check that names are keys of `tensors` alone, and that the loader loads the right weights."""
    source = path.read_text(encoding="utf-8")
    keys = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id == "tensors"
        ):
            assert isinstance(node.slice, ast.Constant)
            keys.add(node.slice.value)
    assert keys == set(tensors)
    rest = source
    for name in tensors:
        assert string_literal(name) in rest
        rest = rest.replace(string_literal(name), "")
    assert "PWNED" not in rest
    if framework == "ttnn":  # which is not installed here: its loader alone
        loader = source[source.index("\ndef weights_from") :]
        source = f"from collections.abc import Mapping\nimport numpy as np\n{loader}"
    module = module_of(source)
    tensors_by_name: dict[str, Any] = dict(tensors)
    if framework == "torch":
        tensors_by_name = {name: torch.tensor(x) for name, x in tensors.items()}
    expected = parity.random_weights(SPEC)
    if framework == "jax":
        for part, leaves in nested(expected, SPEC).items():
            for leaf, weight in leaves.items():
                np.testing.assert_array_equal(
                    np.asarray(module.params_from(tensors_by_name)[part][leaf]), np.asarray(weight)
                )
    else:
        loaded = module.weights_from(tensors_by_name)
        assert loaded.keys() == expected.keys()
        for name, weight in expected.items():
            np.testing.assert_array_equal(np.asarray(loaded[name]), weight)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to a folder in which no text of a file may leave a file behind."""
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    source.mkdir()
    yield source
    assert not list(tmp_path.rglob("PWNED"))


def run_write(source: Path, framework: str, *options: str) -> int:
    return main(["write", str(source), "--to", framework, "-o", "attention.py", *options])


# ---- Names ---------------------------------------------------------------------------------------


WORST = ("known expression", "expression", "end of a key, escaped", "words of the template")


@sample(12)
@pytest.mark.parametrize(
    ("framework", "name"),
    [
        *(("torch", name) for name in HOSTILE),
        *((framework, name) for framework in ("jax", "ttnn") for name in WORST),
    ],
)
def test_names_of_tensors_stay_data(folder, framework, name):
    """Names of tensors are keys in the written module and nothing
    else, and its loader returns the weights.
    """
    prefix = f"{HOSTILE[name]}.{LAYER}"
    source, tensors = file_of(folder, prefix, "folder")
    assert run_write(source, framework, "--cache", "static") == 0
    check_written(Path("attention.py"), framework, tensors)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".npz"])
@pytest.mark.parametrize(
    "text", [HOSTILE[name] for name in ("known expression", "statement", "end of a key, escaped")]
)
def test_names_in_each_format_stay_data(folder, text, suffix):
    """Names in safetensors, pt and npz files are keys in the written module and nothing else."""
    prefix = f"{text}.{LAYER}"
    source, tensors = file_of(folder, prefix, suffix)
    assert run_write(source, "torch", "--from", LAYOUT, "--prefix", prefix, "--num-heads", "2") == 0
    check_written(Path("attention.py"), "torch", tensors)


@pytest.mark.parametrize(
    "text", [HOSTILE[name] for name in ("known expression", "expression", "statement")]
)
def test_prefix_after_number_stays_data(folder, text):
    """Text after a layer's number is part of keys in the written module, but not of its test."""
    tensors = {**tensors_of(f"layers.0.{text}"), "other": np.ones(1, np.float32)}
    save(folder / "weights.npz", tensors)
    options = ("--from", LAYOUT, "--prefix", f"layers.{{i}}.{text}", "--num-heads", "2")
    assert run_write(folder / "weights.npz", "torch", *options, "--test", "trace") == 0
    check_written(Path("attention.py"), "torch", tensors_of(f"layers.0.{text}"))
    assert "PWNED" not in Path("test_attention.py").read_text()


NOT_IN_NAMES = {".safetensors": ["\udc80"], ".npz": ["\x00", "\udc80"], ".pt": []}
"""Text that a format's own library cannot write in a name."""


@sample(12)
@pytest.mark.parametrize(
    ("suffix", "end"),
    [
        (suffix, end)
        for suffix, others in NOT_IN_NAMES.items()
        for end in LINE_ENDS
        if end not in others
    ],
    ids=ascii,
)
def test_names_with_line_ends_fail(folder, capsys, suffix, end):
    """A name with an unprintable character exits with 2, one line of error and no module."""
    prefix = f'"""{end}{SYSTEM}{end}"""'
    source, _ = file_of(folder, prefix, suffix)
    assert run_write(source, "torch", "--from", LAYOUT, "--prefix", prefix, "--num-heads", "2") == 2
    error = capsys.readouterr().err
    assert error.startswith("mha-parity: error: ")
    assert error.count("\n") == 1
    assert not Path("attention.py").exists()


# ---- Metadata and configurations -----------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [HOSTILE[name] for name in ("known expression", "statement", "backslash", "shell")]
)
def test_metadata_of_convert_stay_data(folder, text):
    """Text in the metadata of `convert`, which set layout, prefix and specification, stays data in
    the written module and its test.
    """
    prefix = f"{text}.layers.0"
    path = folder / "converted.safetensors"
    parity.save(path, parity.random_weights(SPEC), SPEC, LAYOUT, prefix=prefix)
    with parity.measure.files.open_tensors(path) as file:
        metadata = {**file.metadata, "author": text, text: text}
        tensors = {name: file.read(name) for name in file.infos}
        assert json.loads(metadata["spec"]) == json.loads(SPEC.to_json())
    save_file(tensors, path, {name: value for name, value in metadata.items() if name != "sha256"})
    assert run_write(path, "torch", "--test", "reference") == 0
    check_written(Path("attention.py"), "torch", tensors)
    assert "PWNED" not in Path("test_attention.py").read_text()


def values_within(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each value in nested dicts."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from values_within(part, (*path, name))
    else:
        yield path


def test_spec_in_metadata_has_no_text(folder, capsys):
    """Text instead of any value of a specification in metadata exits
    with 2, one line of error and no module.
    """
    spec = json.loads(SPEC.to_json())
    path = folder / "w.safetensors"
    parity.save(path, parity.random_weights(SPEC), SPEC, LAYOUT, prefix="layers.0")
    with parity.measure.files.open_tensors(path) as file:
        metadata = {name: value for name, value in file.metadata.items() if name != "sha256"}
        tensors = {name: file.read(name) for name in file.infos}
    assert json.loads(metadata["spec"]) == spec
    for path_of_value in values_within(spec):
        changed = json.loads(json.dumps(spec))
        inner = changed
        for name in path_of_value[:-1]:
            inner = inner[name]
        inner[path_of_value[-1]] = HOSTILE["known expression"]
        save_file(tensors, path, {**metadata, "spec": json.dumps(changed)})
        assert run_write(path, "torch") == 2, path_of_value
        assert capsys.readouterr().err.count("\n") == 1
        assert not Path("attention.py").exists()


@pytest.mark.parametrize(
    "name", [*CONFIG, "rope_theta", "rope_scaling", "torch_dtype", "hidden_act", "_name_or_path"]
)
def test_configuration_text_stays_data(folder, capsys, name):
    """Text in a key or value of a configuration stays data,
    or exits with 2, one error and no module.
    """
    save(folder / "model.safetensors", tensors_of(LAYER))
    code, lines = HOSTILE["known expression"], f"\n\u2028\u0085\r'''{SYSTEM}"
    for text, value in ((code, code), (lines, {"rope_type": lines, lines: [lines]})):
        (folder / "config.json").write_text(json.dumps({**CONFIG, name: value, text: text}))
        Path("attention.py").unlink(missing_ok=True)
        status = run_write(folder, "torch")
        error = capsys.readouterr().err
        assert status in (0, 2), error
        assert Path("attention.py").exists() == (status == 0)
        if status == 0:
            check_written(Path("attention.py"), "torch", tensors_of(LAYER))
        else:
            assert error.count("mha-parity: error: ") == 1


# ---- At random -----------------------------------------------------------------------------------

PIECES = [
    *(
        '"""',
        "'''",
        '"',
        "'",
        "\\",
        "{",
        "}",
        "{i}",
        "#",
        "%",
        "$(touch PWNED)",
        "`",
        ";",
        ":",
        "[",
        "]",
        "(",
        ")",
    ),
    *(
        " ",
        ",",
        "=",
        "+",
        "tensors",
        "spec",
        "call",
        "ABOUT",
        "TITLE",
        "é",
        "\u2028",
        "\n",
        "\r",
        "\u0085",
        "\t",
        "\x00",
    ),
    *(
        SYSTEM,
        FROM_SPEC,
        "\\N{LF}",
        "\\x22",
        "\\\n",
        "\ufeff",
        "\u200b",
        "f'{",
        "return",
        "lambda: 0",
        "...",
        "0",
        "x",
    ),
]


def test_random_names_stay_data(folder, capsys):
    """A name of random pieces yields a module that parses and loads, or exits
    with 2, one line of error and no module.
    """
    drawn = random.Random(0)
    written = 0
    for number in range(30):
        text = "".join(drawn.choices(PIECES, k=drawn.randint(1, 8)))
        source, framework = folder / "weights.npz", ("torch", "jax", "ttnn")[number % 3]
        prefix = f"{text}.layers.0" if number % 2 else f"layers.0.{text}"
        tensors = tensors_of(prefix)
        try:
            np.savez(source, **tensors)  # pyright: ignore[reportArgumentType]
        except (ValueError, OSError, UserWarning):  # NumPy cannot write such names
            continue
        Path("attention.py").unlink(missing_ok=True)
        status = run_write(
            source, framework, "--from", LAYOUT, "--prefix", prefix, "--num-heads", "2"
        )
        error = capsys.readouterr().err
        if status == 0:
            check_written(Path("attention.py"), framework, tensors)
            written += 1
        else:
            assert status == 2, error
            assert error.count("\n") == 1
            assert not Path("attention.py").exists()
    assert written > 7


# ---- The parts -----------------------------------------------------------------------------------


def test_literal_is_text_in_printable_ascii():
    """A literal of any text is printable ASCII and evaluates to the text."""
    drawn = random.Random(1)
    characters = [chr(drawn.randrange(0x110000)) for _ in range(2000)] + [
        chr(code) for code in range(0x300)
    ]
    for text in (*HOSTILE.values(), *LINE_ENDS, *PIECES, "".join(characters), *characters):
        literal = string_literal(text)
        assert literal.isascii()
        assert literal.isprintable()
        assert ast.literal_eval(literal) == text


@pytest.mark.parametrize(
    "source",
    [
        'x = tensors["a"]\ny = "a"\n',
        'x = tensors["b"]\n',
        'x = tensors["a"] + 1\n',
        "x = tensors[0]\n",
        '"""a"""\nx = tensors["a"]\n',
        'x = tensors["a"\n',
        'x = tensors["a" + "a"]\n',
    ],
)
def test_name_outside_of_keys_raises(source):
    """A name outside of a key of `tensors`, or a wrong key, raises an error."""
    check_keys('x = tensors["a"]\n', "x = tensors[0]\n", ["a"])
    with rejects("a written module", ""):
        check_keys(source, "x = tensors[0]\n", ["a"])


@pytest.mark.parametrize(
    "text",
    [
        FROM_SPEC,
        "spec.__class__",
        "spec._positional",
        "''.join",
        "'{0.__class__}'.format(spec)",
        "(lambda: 0)()",
        "[x for x in (1,) for y in (2,)]",
        "f'{spec}'",
        "spec.replace(d_model=3)",
        "(x := 1)",
        "{1: 2}",
        "[*(1, 2)]",
    ],
)
def test_private_template_expression_raises(text):
    """Private attributes, methods, formatting and other syntax in
    expressions of a template raise an error.
    """
    with rejects("a template", ""):
        value_of(ast.parse(text, mode="eval").body, {"spec": SPEC, **FUNCTIONS})


@pytest.mark.parametrize(
    "text",
    [
        "1 if spec.rope is None else 2",
        "spec.num_heads // 2 + 3 * 4 - 1 > 2 < 9 != 4 <= 4 >= 1",
        "not spec.sinks and spec.rope or 3",
        "0 or () or spec",
        "1 in (1, 2) and 3 not in (1, 2)",
        "tuple(int(x) for x in spec.qkv_biases if not x)",
        "{x for x in spec.qkv_biases}",
        "[len((x, x)) for x in spec.qkv_biases]",
        "-2**-spec.num_heads % 7 / 3",
        "spec.qkv_biases[0]",
        "isinstance(spec.rope, Rope)",
        "any(spec.qkv_biases) is True is not None",
        "spec.rope.exponents(spec.head_dim)[0]",
    ],
)
def test_expressions_evaluate_as_in_python(text):
    """Expressions that templates support have the values of Python's `eval`."""
    known = {"spec": SPEC, "Rope": Rope, **FUNCTIONS}
    assert value_of(ast.parse(text, mode="eval").body, known) == eval(text, known)


def test_no_code_of_ours_evaluates_text():
    """Neither file text nor a template is code: the packages call none of Python's functions that
    run text.
    """
    root = Path(parity.__file__).parent.parent
    for package in (
        "mha_spec",
        "mha_jax",
        "mha_torch",
        "mha_tt",
        "ttnn_mock",
        "parity",
        "parity_lab",
    ):
        for path in (root / package).rglob("*.py"):
            text = path.read_text()
            if not re.search(r"\b(eval|exec|compile|__import__)\(", text):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in ("eval", "exec", "compile", "__import__"), (
                        f"{path}:{node.lineno}"
                    )
