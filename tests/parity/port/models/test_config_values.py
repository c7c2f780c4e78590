"""Invalid values in configurations: the message names the key, and contains no exception of
Python.
"""

import copy
import json
import math
import re
import warnings
import zlib

import pytest
import transformers
from helpers.input_errors import rejects

from mha_spec import InputError
from parity.port.models.config import Config, MissingKeyError
from parity.port.models.families import FAMILIES
from parity.port.models.keys import KINDS
from parity.port.models.specs import read_layers, specs_of
from parity.use.cli.main import main

BAD = (
    0,
    -1,
    "4",
    None,
    [],
    {},
    True,
    1e308,
    math.nan,
    math.inf,
    10**400,
    [1],
    [None],
    {"a": 1},
    "",
    1.5,
)

POPULAR = (
    *(
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "gemma4_text",
        "phi3",
        "gpt_oss",
        "deepseek_v3",
    ),
    *(
        "gpt2",
        "gpt_neox",
        "gpt_neo",
        "falcon",
        "mpt",
        "bert",
        "modernbert",
        "t5",
        "whisper",
        "llama4_text",
        "beit",
    ),
)

OF_LENGTH = {"factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "yarn": {
        **OF_LENGTH,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "llama3": {**OF_LENGTH, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "longrope": {**OF_LENGTH, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}

OF_PYTHON = re.compile(
    r"\w+Error\b|unsupported operand|NoneType|not (iterable|subscriptable|supported "
    r"between|callable)|no attribute|"
    r"cannot convert|too large|unpack|out of range|unhashable|division|indices|takes \d"
)
"""Text of exceptions that Python raises by itself."""


def values_of(family):
    with warnings.catch_warnings(action="ignore"):
        return {**transformers.CONFIG_MAPPING[family]().to_dict(), "model_type": family}


def with_scaling(kind):
    values = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "rope_theta": 1e4,
    }
    return {**values, "rope_scaling": {"rope_type": kind, **SCALINGS[kind]}}


def keys_read(values, monkeypatch):
    """Return the keys that rules look up, each with its section."""
    keys = set()
    find = Config.find

    def noting(self, *names):
        keys.update((self.where, name) for name in names)
        return find(self, *names)

    with monkeypatch.context() as patch:
        patch.setattr(Config, "find", noting)
        read_layers(values)
    return sorted(keys)


def message_of(values):
    """Return the error message for a configuration, or an empty text if it is valid."""
    try:
        specs_of(values)
    except InputError as error:
        return str(error)
    return ""


def check_each_value(values, monkeypatch, every=1):
    """Check bad values of each key that is read: all, or one in `every`, with a start that depends
    on the names.
    """
    num_rejected = 0
    for where, name in keys_read(values, monkeypatch):
        start = zlib.crc32(f"{values['model_type']} {name}".encode()) % every
        for bad in BAD[start::every]:
            changed = copy.deepcopy(values)
            section = changed
            for word in filter(None, where.split(".")):
                section = section.get(word, {})
            section[name] = bad
            message = message_of(changed)
            num_rejected += message != ""
            assert not OF_PYTHON.search(message), (name, bad)
            # A key of null, or a section without values, is missing: the message names all keys
            # that may replace it.
            is_missing = bad is None or isinstance(bad, dict)
            if message and not is_missing:
                assert name in message, (name, bad)
    assert num_rejected > 50 // every


@pytest.mark.parametrize("family", POPULAR)
def test_bad_values_name_their_key(family, monkeypatch):
    """A message about a bad value names its key. The first family has all values, as a key has one
    kind in all families; others have one in three.
    """
    check_each_value(values_of(family), monkeypatch, every=1 if family == POPULAR[0] else 3)


@pytest.mark.parametrize("kind", SCALINGS)
def test_bad_scaling_values_name_their_key(kind, monkeypatch):
    """A message about a bad value in any kind of RoPE scaling names its key."""
    check_each_value(with_scaling(kind), monkeypatch)


def test_default_values_have_their_kind():
    """All defaults of transformers, more than 1000, pass the check of the kind of their key."""
    rejected, num_checked = [], 0
    for family in [family for family in FAMILIES if family in transformers.CONFIG_MAPPING]:
        for name, value in values_of(family).items():
            if name in KINDS and value is not None:
                num_checked += 1
                try:
                    KINDS[name](name, value)
                except InputError as error:
                    rejected.append(f"{family}: {error}")
    assert rejected == []
    assert num_checked > 1000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", "4"),
        ("hidden_size", 2**63),
        ("rope_theta", math.nan),
        ("architectures", 3),
        ("sliding_window", "wide"),
    ],
)
def test_message_has_key_and_value(name, value):
    """The message about a bad value contains the key and the value."""
    message = message_of({"model_type": "mistral", "rope_theta": 1e4, name: value})
    assert f"{name} " in message
    assert f"got {value!r}" in message


def test_zero_heads_on_the_command_line(tmp_path, capsys):
    """A model of 0 heads exits with 2 and names its key, without a `ZeroDivisionError`."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 0}')
    assert main(["spec", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "num_attention_heads" in printed
    assert "got 0;" in printed
    assert "ZeroDivisionError" not in printed


def test_missing_window_names_its_key():
    """A sliding layer without a window raises an error whose hint names both keys that set it."""
    with rejects("layer 0", hint="sliding_window or sliding_window_size sets it"):
        specs_of({**values_of("gemma2"), "sliding_window": None})


def test_huge_pattern_repeat_raises():
    """A pattern of layers repeated 10^12 times raises an error instead of filling the memory."""
    values = {
        **values_of("gpt_neo"),
        "attention_layers": None,
        "attention_types": [[["global"], 10**12]],
    }
    with pytest.raises(InputError, match="attention_types"):
        specs_of(values)


def test_many_pattern_repeats_raise():
    """Patterns that are short enough one by one raise an error if their sum is too large."""
    values = {
        **values_of("gpt_neo"),
        "attention_layers": None,
        "attention_types": [[["global", "local"], 3_000]] * 2,
    }
    with rejects("attention_types", "12000"):
        specs_of(values)


@pytest.mark.parametrize("alibi", [False, True])
def test_falcon_rope_needs_its_keys(alibi):
    """RoPE of Falcon whose configuration lacks a key raises an error, unless it has ALiBi."""
    values = {**values_of("falcon"), "alibi": alibi}
    values["rope_parameters"] = {"rope_type": "linear", "rope_theta": 1e4}
    if alibi:
        assert specs_of(values)[0].spec.rope is None
        return
    with pytest.raises(MissingKeyError, match="factor"):
        specs_of(values)


SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
HUGE = ("y" * 100_000, ["z"] * 100_000)
ROUGH = (0, -1, "x", {}, [], math.inf, 1e-300, None, True, {"a": 1}, *HUGE)


@pytest.fixture
def small_llama(tmp_path):
    """Save a small model, and return its folder."""
    folder = tmp_path / "model"
    transformers.AutoModel.from_config(transformers.LlamaConfig(**SMALL)).save_pretrained(folder)
    return folder


def statuses_of(folder, values, capsys):
    """Return the exit statuses of two commands on a folder with a given configuration, and their
    errors.
    """
    (folder / "config.json").write_text(json.dumps(values))  # infinity is written as Infinity
    target = str(folder.parent / f"{folder.name}.safetensors")
    run = ["run", "--model", str(folder), "--against", "transformers", "--backends", "torch"]
    convert = ["convert", str(folder), target, "--to", "canonical", "--rest", "drop", "--force"]
    capsys.readouterr()
    statuses = [main(run), main(convert)]
    return statuses, [line for line in capsys.readouterr().err.splitlines() if "error:" in line]


@pytest.mark.thorough
def test_rough_value_has_one_line_of_error(small_llama, capsys):
    """Each key has one rough value, a different one per key; commands exit with 0, 1 or 2, and each
    status 2 has one printable line of error with less than 1000 characters.
    """
    values = json.loads((small_llama / "config.json").read_text())
    num_rejected = 0
    for index, name in enumerate(sorted(values)):
        rough = ROUGH[index % len(ROUGH)]
        statuses, errors = statuses_of(small_llama, {**values, name: rough}, capsys)
        assert set(statuses) <= {0, 1, 2}, (name, errors)
        assert len(errors) == statuses.count(2), (name, errors)
        assert all(len(error) < 1000 and error.isprintable() for error in errors), (name, errors)
        num_rejected += len(errors)
    assert num_rejected > 5


@pytest.mark.parametrize(
    ("family", "changes", "reasons"),
    [
        ("llama", {"num_attention_heads": {"a": 1}}, ["num_attention_heads", "got {'a': 1}"]),
        ("llama", {"attention_dropout": "x"}, ["attention_dropout", "got 'x'"]),
        ("llama", {"hidden_size": math.inf}, ["hidden_size", "got inf"]),
        ("llama", {"hidden_size": 0, "num_attention_heads": 0}, ["got 0"]),
        ("qwen2", {"layer_types": 1e-300}, ["layer_types", "got 1e-300"]),
        ("qwen2", {"layer_types": ["z"] * 100_000}, ["layer_types"]),
        ("llama", {"use_cache": [1]}, ["StrictDataclass"]),
        ("no_such_family", {}, ["be a model that transformers loads"]),
    ],
)
def test_our_reason_precedes_transformers(small_llama, capsys, family, changes, reasons):
    """`run --model` exits with 2, and our reason comes before the reason of transformers."""
    values = json.loads((small_llama / "config.json").read_text())
    statuses, errors = statuses_of(small_llama, {**values, "model_type": family, **changes}, capsys)
    assert statuses[0] == 2
    first, *_ = errors[0].split("transformers does not load it either")
    assert all(reason in first for reason in reasons), errors[0]


def test_overflow_of_two_values_names_them():
    """A base of 1e300 and an alpha of 1e308 together raise an error that names `alpha`."""
    scaling = {"type": "dynamic", "factor": 1.0, "alpha": 1e308}
    values = {
        "model_type": "hunyuan_v1_dense",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
    }
    with pytest.raises(InputError, match="alpha"):
        specs_of({**values, "head_dim": 4, "rope_theta": 1e300, "rope_scaling": scaling})
