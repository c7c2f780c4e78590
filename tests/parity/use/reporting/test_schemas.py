"""Tests of the keys that other programs read: JSON of commands, metadata of files, JUnit XML."""

import json
import sys
from xml.etree import ElementTree

import jsonschema
import numpy as np
import pytest
import rich.progress
import torch
import transformers
from helpers import DATA
from helpers.json_schemas import FOLDER, json_schema, path_of
from helpers.ranks import of_heads
from helpers.samples import sample

import mha_torch
import parity
import parity_lab.bench
from parity.measure.core.compare import Label, failure
from parity.measure.core.weights import FORMAT, load_tensors, save_tensors, save_weights
from parity.use.cli.main import COMMANDS, main
from parity.use.reporting.junit import junit_xml
from parity.use.reporting.schemas import FILES, JUNIT, SCHEMAS, meanings_of
from parity.use.running.report import Report, SkippedCase
from parity_lab.bench.work import Work

RECORDED = json.loads((DATA / "schemas.json").read_text("utf-8"))
"""Keys of each version of each schema and its records. Entries are added, never changed."""

OWN = """import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModel


def attend(q, k, v):
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def layer(x):
    return x


def live():
    return AutoModel.from_pretrained("model").eval(), {"input_ids": torch.arange(16).reshape(2, 8)}
"""

TESTS = """import torch
from own import attend

q = torch.randn(1, 2, 4, 8)
assert attend(q, q, q).shape == q.shape
"""

TRACE = "traces/gqa-causal-float32-torch.safetensors"

CALLS = {
    "run": ["--cases gqa-causal --backends torch --dtypes float32", "--list"],
    "compare": [
        f"{TRACE} --junit traces.xml",
        "tap.safetensors --model model",
        "tap.safetensors other.safetensors",
        "layer.safetensors wrong.safetensors",
    ],
    "doctor": [""],
    "bugs": ["", "--all", "rope-pairs"],
    "cache-size": ["--num-kv-heads 2 --head-dim 8 --capacity 16"],
    "convert": [
        "layer.safetensors converted.safetensors --to mha_jax",
        "layer.safetensors planned.safetensors --to mha_jax --dry-run",
    ],
    "spec": ["model", "--families", "--live own:live"],
    "inspect": ["layer.safetensors", "canonical", "--layouts"],
    "write": ["layer.safetensors --to torch", "layer.safetensors --to torch --output attention.py"],
    "plot": [f"{TRACE} heads.svg"],
    "conformance": ["own:attend --checks attends"],
    "mutate": ["own:attend --only scale-missing -- python test_own.py"],
    "diagnose": [
        "own:layer --weights layer.safetensors",
        TRACE,
        "layer.safetensors wrong.safetensors",
        "tap.safetensors --model model",
        "tap.safetensors other.safetensors",
        "--mesh tensor=2 --case gqa-causal rank0.safetensors rank1.safetensors",
    ],
    "bench": ["--suites cores --backends torch --quick"],
    "selftest": ["--backends torch --cases mha"],
    "mesh": ["data=1 --backends jax --cases gqa-causal"],
}
"""Arguments of each command, for each form of its result."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write the files that the commands read, and return their folder."""
    folder = tmp_path_factory.mktemp("schemas")
    (folder / "own.py").write_text(OWN)
    (folder / "test_own.py").write_text(TESTS)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, **sizes)).eval()
    model.save_pretrained(folder / "model")
    with torch.no_grad(), parity.tap(model) as tapped:
        model(torch.arange(4)[None])
    tapped.save(folder / "tap.safetensors")
    values = tapped.layers[0].calls[0].values
    values["output"] = values["output"] + 1
    tapped.save(folder / "other.safetensors")
    traces = ["--backends", "torch", "--dtypes", "float32", "--save-traces", str(folder / "traces")]
    assert main(["run", "--cases", "gqa-causal", *traces]) == 0
    problem = parity.make_problem("gqa-causal", "float32")
    save_weights(folder / "layer.safetensors", problem.weights, problem.spec)
    wrong = {**problem.weights, "k_proj.weight": -problem.weights["k_proj.weight"]}
    save_weights(folder / "wrong.safetensors", wrong, problem.spec)
    ranks = of_heads(problem, 2)
    ranks[1] = ranks[1] | {"v": -ranks[1]["v"]}
    for rank, stages in enumerate(ranks):
        arrays = {name: parity.to_numpy(x) for name, x in stages.items()}
        save_tensors(folder / f"rank{rank}.safetensors", arrays, {})
    return folder


@pytest.fixture
def written(folder, monkeypatch):
    """Return a function that runs a command in the folder and returns its JSON."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    tiny = Work("cores", "core", 1, 8, is_causal=True, num_heads=2, head_dim=8)
    monkeypatch.setattr(parity_lab.bench, "plan", lambda groups, *a, **o: [tiny])

    def written(command, words):
        path = folder / "result.json"
        path.unlink(missing_ok=True)
        words = words.replace(" python ", f" {sys.executable} ").split()
        assert main([command, "--json", str(path), *words]) in (0, 1)
        return json.loads(path.read_text("utf-8"))

    return written


def records_in(content):
    """Return the keys of records in lists, such as `results[].case`."""
    return {
        f"{name}[].{key}"
        for name, value in content.items()
        for record in (value if isinstance(value, list) else [])
        for key in (record if isinstance(record, dict) else {})
    }


def test_every_command_has_a_schema():
    """Schemas and calls below have all commands, and each command has at least one call per
    form of its result.
    """
    assert SCHEMAS.keys() == CALLS.keys() == COMMANDS.keys()
    assert all(len(CALLS[name]) >= len(schema.forms) for name, schema in SCHEMAS.items())


def test_json_schemas_are_recorded():
    """The JSON Schema of each command is generated from its record. A change of a key or of its
    type requires a new version: files of old ones stay.
    """
    for command in SCHEMAS:
        recorded = json.loads(path_of(command).read_text("utf-8"))
        advice = "raise its version, and run `python -m helpers.json_schemas`"
        assert recorded == json_schema(command), f"{command}: {advice}"
    versions = {path_of(command).stem for command in SCHEMAS}
    assert versions <= {path.stem for path in FOLDER.iterdir()}


def untyped_lists(schema):
    """Return the paths of lists in a JSON Schema whose items are objects without named keys."""
    paths = []
    if schema.get("type") == "array" and schema.get("items") == {"type": "object"}:
        paths.append("")
    for key, part in schema.items():
        for name, child in [(key, part), *enumerate(part if isinstance(part, list) else [])]:
            if isinstance(child, dict):
                paths += [f".{name}{path}" for path in untyped_lists(child)]
    return paths


def test_lists_of_records_have_types():
    """Each list of records in JSON has the keys of its records and their types."""
    untyped = {"type": "array", "items": {"type": "object"}}
    assert untyped_lists({"properties": {"rows": {"anyOf": [untyped]}}}) == [".properties.rows.0"]
    for command in SCHEMAS:
        assert untyped_lists(json_schema(command)) == [], command


def test_other_json_is_not_valid():
    """A wrong type, an additional key or a missing one is not valid."""
    head = {"schema": "mha-parity/cache-size", "version": SCHEMAS["cache-size"].version}
    validator = jsonschema.Draft202012Validator(json_schema("cache-size"))
    assert validator.is_valid({**head, "nbytes": 8})
    for content in ({"nbytes": "8"}, {"nbytes": 8, "bytes": 8}, {}):
        assert not validator.is_valid({**head, **content}), content


SLOW = ("bench", "diagnose", "mutate", "selftest")
"""Commands that take a second."""


@pytest.mark.costly("each command runs as a user calls it")
@pytest.mark.parametrize(
    "command",
    [
        *(name for name in CALLS if name not in SLOW),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in SLOW),
    ],
)
def test_command_writes_keys_of_its_schema(command, written):
    """The JSON of a command is valid by its JSON Schema and has the keys of one of its forms; all
    forms occur, and the recorded keys are the same.
    """
    schema, records, forms = SCHEMAS[command], set(), []
    validator = jsonschema.Draft202012Validator(json_schema(command))
    known_forms = [meanings_of(form).keys() for form in schema.forms.values()]
    for words in CALLS[command]:
        content = written(command, words)
        error = jsonschema.exceptions.best_match(validator.iter_errors(content))
        assert error is None, f"{error.json_path}: {error.message}"
        assert list(content)[:2] == ["schema", "version"]
        assert content.pop("schema") == f"mha-parity/{command}"
        assert content.pop("version") == schema.version
        assert content.keys() in known_forms, words
        forms.append(content.keys())
        records |= records_in(content)
    assert all(keys in forms for keys in known_forms)
    recorded = RECORDED[f"{command} {schema.version}"]
    assert sorted({*schema.keys, *records}) == recorded, (
        "raise the version of the schema, and record its keys"
    )


@pytest.mark.costly("each command that may take long runs as a user calls it")
@sample(4)
@pytest.mark.parametrize(
    "words",
    [
        "doctor",
        "inspect layer.safetensors",
        "write layer.safetensors --to torch",
        f"plot {TRACE} heads.svg",
        f"compare {TRACE}",
        "compare tap.safetensors other.safetensors",
        "compare layer.safetensors wrong.safetensors",
        "diagnose layer.safetensors wrong.safetensors",
        "diagnose --mesh tensor=2 --case gqa-causal rank0.safetensors rank1.safetensors",
    ],
)
def test_slow_commands_show_progress(words, folder, monkeypatch):
    """Each command that may take more than two seconds shows its progress, on a terminal only."""
    monkeypatch.chdir(folder)
    shown = []
    add_task = rich.progress.Progress.add_task

    def noted(progress, description, **options):
        shown.append(progress.console.stderr)
        return add_task(progress, description, **options)

    monkeypatch.setattr(rich.progress.Progress, "add_task", noted)
    assert main(words.split()) in (0, 1)
    assert shown
    assert all(shown)


def test_files_have_metadata_of_their_kind(folder):
    """Weights, caches, traces and recordings have the metadata keys of their kind and the
    format version.
    """
    parity.save_cache(folder / "cache.safetensors", mha_torch.init_cache(1, 2, 3, 4))
    kinds = {
        "weights": "layer.safetensors",
        "cache": "cache.safetensors",
        "trace": TRACE,
        "recording": "tap.safetensors",
    }
    assert kinds.keys() == FILES.keys()
    for kind, path in kinds.items():
        metadata = load_tensors(folder / path)[1]
        assert metadata.keys() == FILES[kind].keys()
        assert metadata["format"] == FORMAT


def test_junit_has_documented_elements():
    """JUnit XML has the elements and attributes of JUNIT, in this order of attributes."""
    labels = [
        Label("case", "torch", dtype, stage)
        for dtype, stage in {"float32": "output", "float16": "run"}.items()
    ]
    wrong = [failure(np.ones(2), "reason", label) for label in labels]
    elsewhere = SkippedCase("other", "float32", "torch", "reason")
    report = Report(
        wrong, {"jax": "reason"}, {"python": "3"}, ["a warning"], [elsewhere], missing=[elsewhere]
    )
    elements = {
        element.tag: tuple(element.attrib)
        for element in ElementTree.fromstring(junit_xml(report)).iter()
    }
    assert elements == JUNIT
