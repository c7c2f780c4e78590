"""Tests of convert, inspect, compare and `run --weights`: status, files, printed text."""

import json
import math
import os
import re
import shlex
import sys
import warnings

import numpy as np
import pytest
import torch
from helpers import ROOT
from helpers.command_line import run_in_pipe
from helpers.input_errors import Misuse, rejects

import parity
from mha_spec import Llama3Scaling, Rope
from parity import AttentionSpec, random_weights
from parity.measure.files import open_tensors, write_tensors
from parity.port.conversion.convert import save
from parity.port.conversion.layouts import LAYOUTS, from_canonical
from parity.port.conversion.layouts.layout import CARRIED, RULES
from parity.use.cli.main import main

SPEC = AttentionSpec(
    16, 4, num_kv_heads=2, head_dim=6, qkv_bias=False, out_bias=False, rope=Rope(500.0)
)
PREFIX = "model.layers.{i}.self_attn"
HEADS = ["--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "6", "--rope-theta", "500"]


@pytest.fixture
def source(tmp_path):
    """A checkpoint of two layers and two other tensors."""
    tensors = {"embed.weight": np.ones((3, 16), np.float32), "step": np.array(7, np.int64)}
    for i in range(2):
        laid_out = from_canonical(random_weights(SPEC, seed=i), SPEC, LAYOUTS["transformers.LLaMA"])
        tensors |= {f"model.layers.{i}.self_attn.{name}": x for name, x in laid_out.items()}
    write_tensors(
        tmp_path / "source.safetensors",
        {n: (x.shape, x.dtype) for n, x in tensors.items()},
        tensors.__getitem__,
    )
    return str(tmp_path / "source.safetensors")


def convert(source, target, *others):
    return [
        "convert",
        source,
        str(target),
        "--from",
        "transformers.LLaMA",
        "--prefix",
        PREFIX,
        *HEADS,
        *others,
    ]


def names_in(path):
    with open_tensors(path) as file:
        return list(file.infos)


def is_plain(text):
    return (
        "\x1b" not in text
        and "│" not in text
        and all(line.isprintable() for line in text.splitlines())
    )


# ---- convert -------------------------------------------------------------------------------------


def test_convert_prints_one_line_summary(source, tmp_path, capsys):
    """`convert` prints one line with layers, heads, layouts, numbers of other tensors and the
    target; standard error is empty.
    """
    target = tmp_path / "target.safetensors"
    assert main(convert(source, target, "--to", "meta.LLaMA")) == 0
    captured = capsys.readouterr()
    assert captured.out == (
        "converted 2 attention layers (4 heads x 6, 2 key/value heads) from transformers.LLaMA "
        "to meta.LLaMA; copied 2 other tensors; "
        f"wrote {target}\n"
    )
    assert captured.err == ""


def test_convert_back_needs_no_flags(source, tmp_path):
    """A converted file can be converted back without flags for its layout and heads, to
    tensors with the same SHA-256 as the source.
    """
    target, back = tmp_path / "target.npz", tmp_path / "back.safetensors"
    assert main(convert(source, target, "--to", "qkv_proj")) == 0
    assert main(["convert", str(target), str(back), "--to", "transformers.LLaMA"]) == 0
    with open_tensors(source) as one, open_tensors(back) as other:
        assert one.sha256() == other.sha256()


def test_convert_drops_rest_and_renames(source, tmp_path, capsys):
    """`--rest drop --to-prefix l{i}.att` writes only attention weights, under that prefix;
    the summary counts 2 dropped tensors.
    """
    target = tmp_path / "target.npz"
    assert (
        main(convert(source, target, "--to", "W_q", "--rest", "drop", "--to-prefix", "l{i}.att"))
        == 0
    )
    assert names_in(target) == [
        f"l{i}.att.W_{letter}.weight" for i in range(2) for letter in "qkvo"
    ]
    assert "copied 0 other tensors and dropped 2;" in capsys.readouterr().out


def test_convert_writes_shards(source, tmp_path):
    """`--max-shard-gib` divides the target into more than one shard, all listed in the index."""
    target = tmp_path / "target.safetensors"
    assert main(convert(source, target, "--to", "W_q", "--max-shard-gib", "0.000002")) == 0
    assert not target.exists()
    shards = set(
        json.loads((tmp_path / "target.safetensors.index.json").read_text())["weight_map"].values()
    )
    assert len(shards) > 1
    assert all((tmp_path / shard).exists() for shard in shards)


def test_convert_needs_force_to_replace(source, tmp_path, capsys):
    """`convert` to an existing file exits with status 2 and leaves it unchanged; with
    --force, it replaces the file.
    """
    target = tmp_path / "target.npz"
    assert main(convert(source, target, "--to", "W_q")) == 0
    old = target.read_bytes()
    assert main(convert(source, target, "--to", "qkv_proj")) == 2
    assert (
        capsys.readouterr().err
        == f"mha-parity: error: {target} exists; pass --force to replace it\n"
    )
    assert target.read_bytes() == old
    assert main(convert(source, target, "--to", "qkv_proj", "--force")) == 0
    assert target.read_bytes() != old


def test_force_keeps_non_checkpoint_folder(source, tmp_path, capsys):
    """Even with --force, a target folder that is not a checkpoint exits with status 2 and
    keeps its content.
    """
    (tmp_path / "run.orbax" / "1000").mkdir(parents=True)
    assert main(convert(source, tmp_path / "run.orbax", "--to", "W_q", "--force")) == 2
    assert rejects("…/run.orbax", "['1000']").is_printed_in(capsys.readouterr().err)
    assert os.listdir(tmp_path / "run.orbax") == ["1000"]


@pytest.mark.parametrize("same", ["itself", "dot", "link"])
def test_convert_rejects_source_as_target(source, tmp_path, capsys, same):
    """A target that is the source, also by another path or a link, exits with status 2 even
    with --force; the source is unchanged.
    """
    target = tmp_path / "source.safetensors"
    old = target.read_bytes()
    if same == "dot":
        target = f"{tmp_path}/./source.safetensors"
    elif same == "link":
        target = tmp_path / "link.safetensors"
        target.symlink_to("source.safetensors")
    assert main(convert(source, target, "--to", "W_q", "--force")) == 2
    source = {"--from": tmp_path / "source.safetensors"}
    assert rejects("the target", {"path": ...} | source).is_printed_in(capsys.readouterr().err)
    assert (tmp_path / "source.safetensors").read_bytes() == old


@pytest.mark.parametrize("other", ["SRC", "DST"])
def test_json_path_may_not_be_src_or_dst(source, tmp_path, capsys, other):
    """A --json path that is the source or the target exits with status 2, and no file is
    written.
    """
    path = source if other == "SRC" else tmp_path / "b.npz"
    assert main(convert(source, tmp_path / "b.npz", "--to", "W_q", "--json", str(path))) == 2
    assert rejects("--json", {"--json": str(path), other: ...}).is_printed_in(
        capsys.readouterr().err
    )
    assert os.listdir(tmp_path) == ["source.safetensors"]


def test_convert_writes_json_report(source, tmp_path):
    """The JSON of `convert` has the documented keys, with source layout, layers, spec, and
    kept and dropped tensors; other lists are empty.
    """
    arguments = convert(
        source, tmp_path / "b.npz", "--to", "W_q", "--json", str(tmp_path / "r.json")
    )
    assert main(arguments) == 0
    content = json.loads((tmp_path / "r.json").read_text())
    assert content.pop("path") == str(tmp_path / "b.npz")
    others = {
        "heads_from",
        "left_out",
        "unconverted",
        "optimizer_state",
        "ignored_settings",
        "dequantized",
        "missing",
    }
    others |= {"joined", "metadata_left_out", "plan"}
    assert content.keys() == {
        "schema",
        "version",
        "source",
        "layers",
        "spec",
        "copied",
        "dropped",
        *others,
    }
    assert not any(content[name] for name in others)
    assert content["schema"] == "mha-parity/convert"
    assert content["source"] == "transformers.LLaMA"
    assert content["layers"] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert AttentionSpec.from_json(json.dumps(content["spec"])) == SPEC
    assert (sorted(content["copied"]), content["dropped"]) == (["embed.weight", "step"], [])


def test_convert_summary_of_one_layer(tmp_path, capsys):
    """The summary for one layer has '1 attention layer', in the singular."""
    save(tmp_path / "a.npz", random_weights(SPEC), SPEC)
    assert main(["convert", str(tmp_path / "a.npz"), str(tmp_path / "b.npz"), "--to", "ttnn"]) == 0
    assert capsys.readouterr().out.startswith(
        "converted 1 attention layer (4 heads x 6, 2 key/value heads) from canonical to ttnn; "
        "copied 0 other tensors; wrote "
    )


def test_undetermined_heads_name_flags(source, tmp_path, capsys):
    """If the shapes do not determine the heads, one error line has the layer, possible heads,
    and the flags that decide.
    """
    arguments = [
        "convert",
        source,
        str(tmp_path / "b.npz"),
        "--from",
        "transformers.LLaMA",
        "--prefix",
        PREFIX,
    ]
    assert main([*arguments, "--to", "W_q"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert rejects("the heads", where="model.layers.0.self_attn").is_printed_in(captured.err)
    assert captured.err.endswith("; --num-heads or --num-kv-heads or --head-dim decides\n")
    assert "4 x 6 (key/value 2)" in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("others", "input_error"),
    [
        (["--to", "meta"], rejects("--to", {"--to": "meta"})),
        (["--to", "flax.linen"], rejects("the layer", {"--num-heads": 4, "--num-kv-heads": 2})),
        (
            ["--to", "W_q", "--to-prefix", "{i}.{i}"],
            rejects("--to-prefix", {"--to-prefix": "{i}.{i}"}),
        ),
        (
            ["--to", "W_q", "--prefix", "encoder.{i}"],
            rejects(
                "--prefix",
                {"--prefix": "encoder.{i}"},
                remedy={"--prefix": "model.layers.{i}.self_attn"},
            ),
        ),
        (
            ["--to", "W_q", "--from", "transformers.GPT2"],
            rejects("tensors", "['c_attn.weight', 'c_proj.weight']"),
        ),
        (["--to", "W_q", "--num-heads", "5"], rejects("the heads", {"--num-heads": 5})),
        *(
            (
                ["--to", "W_q", "--max-shard-gib", size],
                rejects("--max-shard-gib", {"--max-shard-gib": float(size)}),
            )
            for size in ("0", "-1", "inf", "nan", "1e300")
        ),
        (
            ["--to", "W_q", "--rope-theta", "inf"],
            rejects("--rope-theta", {"--rope-theta": math.inf}),
        ),
        (["--to", "W_q", "--rope-theta", "-1"], rejects("--rope-theta", {"--rope-theta": -1.0})),
        (
            ["--to", "W_q", "--json", "/no/such/folder/r.json"],
            rejects("--json", "/no/such/folder/r.json: "),
        ),
    ],
)
def test_invalid_convert_writes_nothing(source, tmp_path, capsys, others, input_error):
    """Invalid arguments exit with status 2 and one error line, and no file is written; a dry
    run prints the same.
    """
    assert main(convert(source, tmp_path / "b.safetensors", *others)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("mha-parity: ")
    assert input_error.is_printed_in(captured.err)
    assert captured.err.count("\n") == 1
    assert os.listdir(tmp_path) == ["source.safetensors"]
    assert main(convert(source, tmp_path / "b.safetensors", *others, "--dry-run")) == 2
    assert capsys.readouterr() == captured


@pytest.mark.parametrize(("name", "got"), [("b.gguf", "'.gguf'"), ("b.txt", "'.txt'"), ("b", "")])
def test_unwritable_format_is_rejected(source, tmp_path, capsys, name, got):
    """A target with the suffix .gguf, .txt or none exits with status 2 and an error with the
    suffix.
    """
    assert main(convert(source, tmp_path / name, "--to", "W_q")) == 2
    assert rejects(str(tmp_path / name), got).is_printed_in(capsys.readouterr().err)


def test_convert_of_missing_file_exits_2(tmp_path, capsys):
    """A source that does not exist exits with status 2 and one error line."""
    assert main(convert(str(tmp_path / "no.safetensors"), tmp_path / "b.npz", "--to", "W_q")) == 2
    assert re.fullmatch(r"mha-parity: .*No such file.*\n", capsys.readouterr().err)


def test_unspecified_layout_is_suggested(source, tmp_path, capsys):
    """If no layout is specified, `convert` exits with status 2, and the error suggests --from
    and --prefix with values that fit, also as a whole command.
    """
    words = ["convert", source, str(tmp_path / "b.npz"), "--to", "W_q"]
    assert main(words) == 2
    message = capsys.readouterr().err
    remedy = {"--from": "transformers.LLaMA", "--prefix": "model.layers.{i}.self_attn"}
    shown = " with ".join(f"{flag} {shlex.quote(value)}" for flag, value in remedy.items())
    for flag, value in remedy.items():
        words += [flag, value]
    command = shlex.join(["mha-parity", *words])
    beginning = f"mha-parity: error: {source} does not record its layout; {shown} fits; "
    assert message.startswith(beginning)
    assert message.endswith(f"; try `{command}`\n")


# ---- convert --dry-run ---------------------------------------------------------------------------


def planned(source, target, *others):
    """Do a dry run, and return the plan in its JSON report, and the rest of the report."""
    report = os.path.join(os.path.dirname(source), "r.json")
    assert main(["convert", source, str(target), *others, "--dry-run", "--json", report]) == 0
    with open(report, encoding="utf-8") as file:
        content = json.load(file)
    os.remove(report)
    return content.pop("plan"), content


def test_dry_run_prints_plan(source, tmp_path, capsys):
    """`--dry-run` prints the target, the origin of layout and heads, renamed tensors and
    dropped ones, and writes nothing.
    """
    assert (
        main(
            convert(source, tmp_path / "b.npz", "--to", "meta.LLaMA", "--rest", "drop", "--dry-run")
        )
        == 0
    )
    out = " ".join(capsys.readouterr().out.split())
    assert os.listdir(tmp_path) == ["source.safetensors"]
    assert out.startswith("would convert 2 attention layers (4 heads x 6, 2 key/value heads) from ")
    assert f"would copy 0 other tensors and drop 2; would write {tmp_path / 'b.npz'}" in out
    assert (
        f"{PREFIX} 2 transformers.LLaMA: the caller num_heads 4: the caller; num_kv_heads 2: the "
        f"caller" in out
    )
    assert f"{PREFIX}.q_proj.weight {PREFIX}.wq.weight 2" in out
    assert "dropped: step, embed.weight" in out


@pytest.mark.parametrize(
    "others", [[], ["--rest", "drop"], ["--to-prefix", "layers"], ["--to", "qkv_proj"]], ids=str
)
def test_dry_run_plan_matches_conversion(source, tmp_path, others):
    """The plan has the tensors, their size in bytes and the layers that a conversion then
    writes; the reports are otherwise equal.
    """
    arguments = convert(source, tmp_path / "b.npz", "--to", "meta.LLaMA", *others)[3:]
    plan, report = planned(source, tmp_path / "b.npz", *arguments)
    assert os.listdir(tmp_path) == ["source.safetensors"]
    assert (
        main(
            [
                "convert",
                source,
                str(tmp_path / "b.npz"),
                *arguments,
                "--json",
                str(tmp_path / "r.json"),
            ]
        )
        == 0
    )
    assert json.loads((tmp_path / "r.json").read_text()) == {**report, "plan": None}
    with open_tensors(tmp_path / "b.npz") as file:
        assert plan["tensors"].keys() == file.infos.keys()
        assert plan["size"] == sum(info.nbytes for info in file.infos.values())
    converted = {name for name in names_in(source) if "self_attn" in name}
    assert {name for names in plan["tensors"].values() for name in names} == converted | {
        *report["copied"]
    }
    assert [layer["label"] for layer in plan["layers"]] == report["layers"]


LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rope_theta": 500.0,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.parametrize(
    ("config", "others", "origins"),
    [
        (
            LLAMA,
            [],
            dict.fromkeys(["num_heads", "num_kv_heads", "head_dim", "rope"], "config.json"),
        ),
        (LLAMA, ["--rope-theta", "1e4"], {"num_heads": "config.json", "rope": "the caller"}),
        (
            {"model_type": "unseen", "num_attention_heads": 4, "rope_theta": 500.0},
            [],
            {
                "num_heads": "config.json",
                "num_kv_heads": "the shapes",
                "head_dim": "the shapes",
                "rope": "config.json",
            },
        ),
        (
            {"model_type": "unseen", "num_attention_heads": 4, "rope_theta": 500.0},
            ["--num-kv-heads", "2"],
            {"num_heads": "the shapes", "num_kv_heads": "the caller", "rope": "config.json"},
        ),
    ],
    ids=["family", "family, told", "plain", "plain, told"],
)
def test_dry_run_names_hint_sources(source, tmp_path, config, others, origins):
    """The plan has the origin of the layout and of each hint of a layer: config.json, the
    caller or the shapes.
    """
    (tmp_path / "config.json").write_text(json.dumps(config))
    hints = [] if config is LLAMA else ["--from", "transformers.LLaMA", "--prefix", PREFIX]
    plan, _ = planned(source, tmp_path / "b.npz", "--to", "meta.LLaMA", *hints, *others)
    assert plan["layers"]
    for layer in plan["layers"]:
        assert origins.items() <= layer["hints"].items()
        assert layer["layout_from"] == ("config.json" if config is LLAMA else "the caller")


def test_dry_run_names_own_metadata(source, tmp_path):
    """For a file that `convert` wrote, the plan names the file's metadata as the origin of
    the layout and of all hints.
    """
    assert main(convert(source, tmp_path / "b.npz", "--to", "meta.LLaMA")) == 0
    plan, _ = planned(str(tmp_path / "b.npz"), tmp_path / "c.npz", "--to", "W_q", "--drop", "rope")
    assert plan["left_out"] == ["rope"]
    for layer in plan["layers"]:
        assert {layer["layout_from"], *layer["hints"].values()} == {"the file's metadata"}


@pytest.mark.parametrize("case", ["there", "no folder", "no format", "NaN", "ranks"])
def test_dry_run_fails_like_conversion(source, tmp_path, capsys, case):
    """Where a conversion exits with status 2, such as for NaN or an existing target, a dry
    run prints the same and writes nothing.
    """
    target, others = (
        {"no folder": "no/b.npz", "no format": "b.txt"}.get(case, "b.npz"),
        ["--to", "W_q"],
    )
    if case == "there":
        (tmp_path / target).write_bytes(b"PK")
    if case == "ranks":
        others += ["--ranks", "2"]
    if case == "NaN":
        with open_tensors(source) as file:
            tensors = {name: file.read(name).copy() for name in file.infos}
        tensors["model.layers.1.self_attn.v_proj.weight"][0, 0] = np.nan
        write_tensors(
            source, {n: (x.shape, x.dtype) for n, x in tensors.items()}, tensors.__getitem__
        )
    before = sorted(os.listdir(tmp_path))
    assert main(convert(source, tmp_path / target, *others, "--dry-run")) == 2
    dry = capsys.readouterr()
    assert sorted(os.listdir(tmp_path)) == before
    assert main(convert(source, tmp_path / target, *others)) == 2
    assert capsys.readouterr() == dry


def test_dry_run_checks_files_of_ranks(source, tmp_path, capsys, monkeypatch):
    """A dry run with --ranks 2 writes nothing; without torch, which writes such files, it
    fails as the conversion does.
    """
    arguments = convert(
        source, tmp_path / "b", "--to", "meta.LLaMA", "--rest", "drop", "--ranks", "2"
    )
    assert main([*arguments, "--dry-run"]) == 0
    assert os.listdir(tmp_path) == ["source.safetensors"]
    monkeypatch.setitem(sys.modules, "torch", None)  # which writes such files
    capsys.readouterr()
    for more in (["--dry-run"], []):
        assert main([*arguments, *more]) != 0
        assert "torch" in capsys.readouterr().err
        assert os.listdir(tmp_path) == ["source.safetensors"]


def test_dry_run_allows_uneven_heads(tmp_path):
    """A layer of width 10 with 3 heads of 4 is planned; its hints are num_heads, num_kv_heads
    and head_dim.
    """
    spec = AttentionSpec(10, 3, head_dim=4)
    save(tmp_path / "a.npz", random_weights(spec), spec)
    plan, _ = planned(str(tmp_path / "a.npz"), tmp_path / "b.npz", "--to", "W_q")
    assert plan["layers"][0]["hints"].keys() == {"num_heads", "num_kv_heads", "head_dim"}


def test_unnestable_names_are_rejected(source, tmp_path, capsys):
    """For a nested target, tensors x and x.y exit with status 2, in a dry run and in a
    conversion.
    """
    with open_tensors(source) as file:
        tensors = {name: file.read(name).copy() for name in file.infos} | {
            "x": np.ones(1),
            "x.y": np.ones(1),
        }
    write_tensors(source, {n: (x.shape, x.dtype) for n, x in tensors.items()}, tensors.__getitem__)
    for more in (["--dry-run"], []):
        assert main(convert(source, tmp_path / "b.msgpack", "--to", "W_q", *more)) == 2
        assert "no name may be a level of another one" in capsys.readouterr().err


def test_nested_config_rope_is_not_lost(source, tmp_path, capsys):
    """RoPE of a configuration with attention settings in text_config only is read: a target
    that cannot carry it exits with status 2, and the error suggests --drop rope.
    """
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": LLAMA}))
    assert main(["convert", source, str(tmp_path / "b.npz"), "--to", "W_q"]) == 2
    remedy = {"--drop": "rope"}
    assert rejects("the layer", {"rope": ...}, remedy=remedy).is_printed_in(capsys.readouterr().err)


# ---- layouts -------------------------------------------------------------------------------------


def test_layouts_lists_all_layouts(capsys):
    """`inspect --layouts` prints the name of every layout."""
    assert main(["inspect", "--layouts"]) == 0
    words = capsys.readouterr().out.split()
    assert LAYOUTS.keys() <= set(words)


def test_layout_is_shown_completely(capsys):
    """`inspect LAYOUT` prints all tensors, rules and prefixes of a layout, its RoPE pairs, and
    how it packs heads.
    """
    for name, layout in LAYOUTS.items():
        assert main(["inspect", name]) == 0
        out = capsys.readouterr().out
        assert all(tensor.name in out for tensor in layout.tensors), name
        assert all(f"rule: {RULES[rule].words}" in out for rule in layout.rules), name
        assert all(f"prefix: {prefix}" in out for prefix in layout.prefixes), name
        assert (
            f"RoPE pairs: {'(i, i + H/2)' if layout.rope == 'half' else '(2 i, 2 i + 1)'}" in out
        ), name
        packed = [tensor for tensor in layout.tensors if len(tensor.parts) > 1]
        assert ("heads in a packed tensor: " in out) == any(
            not tensor.is_shared for tensor in packed
        ), name
        assert ("one projection for keys and values: " in out) == any(
            tensor.is_shared for tensor in packed
        ), name
        assert all(tensor.name in out and tensor.holds in out for tensor in layout.others), name
        assert ("stores every setting of a specification" in out) == (
            set(layout.carries) == {*CARRIED}
        ), name


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("canonical", "q_proj.weight q_proj.weight [heads x head_dim | input]"),
        ("transformers.GPT2", "c_proj.weight out_proj.weight [heads x head_dim | output]"),
        ("flax.nnx", "out.kernel out_proj.weight [heads | head_dim | output]"),
        ("ttnn", "out_proj.bias out_proj.bias [1 | output]"),
        ("heads.W_query", "heads.{n}.W_key.weight k_proj.weight [head_dim | input]"),
        (
            "tunix.Gemma",
            "kv_einsum.w k_proj.weight, v_proj.weight [projections | heads | input | head_dim]",
        ),
    ],
)
def test_axes_are_shown_outermost_first(name, line, capsys):
    """`inspect LAYOUT` prints a tensor with its axes, outermost first."""
    assert main(["inspect", name]) == 0
    assert line in [" ".join(shown.split()) for shown in capsys.readouterr().out.splitlines()]


def test_layouts_writes_json(tmp_path):
    """`inspect --json` has all layouts or the requested one, with the same record and the
    axes of its tensors.
    """
    assert main(["inspect", "--layouts", "--json", str(tmp_path / "all.json")]) == 0
    assert main(["inspect", "ttnn", "--json", str(tmp_path / "one.json")]) == 0
    every, one = (json.loads((tmp_path / name).read_text()) for name in ("all.json", "one.json"))
    assert [layout["name"] for layout in every["layouts"]] == list(LAYOUTS)
    (ttnn,) = one["layouts"]
    assert ttnn in every["layouts"]
    qkv = {
        "name": "qkv_proj.weight",
        "holds": "qkv",
        "kind": "weight",
        "axes": "d (n h)",
        "is_shared": False,
    }
    assert ttnn["forms"][0][0] == qkv


def test_unknown_layout_suggests_names(capsys):
    """An unknown layout exits with status 2 and one error line that suggests layouts with
    similar names.
    """
    assert main(["inspect", "llama"]) == 2
    message = capsys.readouterr().err
    assert rejects("layout", layout="llama").is_printed_in(message)
    assert "did you mean transformers.LLaMA or " in message
    assert message.count("\n") == 1


# ---- inspect -------------------------------------------------------------------------------------


def test_inspect_shows_tensors_and_layouts(source, capsys):
    """`inspect` prints tensors with shape, dtype and number, and layers with the layout and
    heads that fit.
    """
    assert main(["inspect", source, *HEADS]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"{source}: safetensors, 10 tensors" in " ".join(lines[:3])
    assert "model.layers.{i}.self_attn.q_proj.weight 24 x 16 float32 2" in lines
    assert "step scalar int64 1" in lines
    assert "model.layers.{i}.self_attn 2 transformers.LLaMA 4 x 6, key/value 2" in lines


def test_inspect_names_deciding_flags(source, capsys):
    """If the shapes do not determine the heads, `inspect` prints --num-heads as a flag that
    does.
    """
    assert main(["inspect", source]) == 0
    assert "--num-heads" in " ".join(capsys.readouterr().out.split())


def test_inspect_suggests_fitting_heads(tmp_path, capsys):
    """If 5 heads do not fit a width of 32, `inspect` prints heads that do, and the given
    number; the status is 0.
    """
    np.savez(
        tmp_path / "y.npz",
        **{name: x.numpy() for name, x in torch.nn.MultiheadAttention(32, 4).state_dict().items()},
    )
    assert main(["inspect", str(tmp_path / "y.npz"), "--num-heads", "5"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "4 x 8 (key/value 4)" in shown
    assert "got num_heads=5" in shown
    assert "No attention layer" not in shown


def test_inspect_writes_json(source, tmp_path):
    """The JSON of `inspect` has the documented keys, the tensors and a record of the layers
    with their layout.
    """
    assert main(["inspect", source, *HEADS, "--json", str(tmp_path / "r.json")]) == 0
    content = json.loads((tmp_path / "r.json").read_text())
    assert content.keys() == {
        *("schema", "version", "file_format", "metadata", "tensors", "layers"),
        "proposed_layout",
    }
    assert content["file_format"] == "safetensors"
    assert content["tensors"]["embed.weight"] == {"shape": [3, 16], "dtype": "float32"}
    assert content["layers"] == [
        {
            "prefix": PREFIX,
            "layers": 2,
            "layout": "transformers.LLaMA",
            "heads": "4 x 6, key/value 2",
            "dtype": "float32",
            "is_stacked": False,
            "packing": "",
            "unread": [],
        }
    ]


def test_inspect_reports_no_attention(tmp_path, capsys):
    """For a file without attention, `inspect` exits with status 0 and prints that no layout
    fits.
    """
    write_tensors(
        tmp_path / "a.npz", {"x": ((2,), np.float32)}, lambda name: np.ones(2, np.float32)
    )
    assert main(["inspect", str(tmp_path / "a.npz")]) == 0
    assert "No attention layer that a layout fits" in capsys.readouterr().out


NEBULA = {"blk.0.mix": np.ones((24, 48), np.float32), "blk.0.back": np.ones((24, 24), np.float32)}
"""A layer in an unknown layout: no layout has its names or its shapes."""


@pytest.mark.parametrize("command", [["inspect"], ["convert", "out.npz", "--to", "mha_jax"]])
def test_unlisted_layout_points_to_docs(command, tmp_path, capsys):
    """For a layer in an unknown layout, the message leads to a section of a page, whose code
    test_docs runs.
    """
    np.savez(tmp_path / "nebula.npz", **NEBULA)
    name, *others = command
    status = main([name, str(tmp_path / "nebula.npz"), *others])
    assert status == {"inspect": 0, "convert": 2}[name]
    text = "".join(capsys.readouterr())
    assert "`mha-parity inspect`" not in text
    section = text.partition("shows under '")[2].partition("'")[0]
    page = ROOT / text.partition(" as ")[2].partition(" shows")[0]
    assert f"\n## {section}\n" in page.read_text("utf-8")


def test_inspect_of_damaged_file_exits_2(source, tmp_path, capsys):
    """A truncated file exits with status 2 and one error line with its name."""
    data = (tmp_path / "source.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:-3])
    assert main(["inspect", str(tmp_path / "cut.safetensors")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert rejects("…/cut.safetensors").is_printed_in(captured.err)
    assert captured.err.count("\n") == 1


# ---- verify --------------------------------------------------------------------------------------


def saved(path, weights, layout="canonical", prefix="", spec=SPEC):
    save(path, weights, spec, layout, prefix=prefix)
    return str(path)


def test_verify_accepts_same_layer(tmp_path, capsys):
    """The same layer in two layouts and formats exits with status 0 and is reported as the
    same, bit for bit.
    """
    weights = random_weights(SPEC)
    files = [
        saved(tmp_path / "a.npz", weights),
        saved(tmp_path / "b.pt", weights, "meta.LLaMA", "layers.0"),
    ]
    assert main(["compare", *files]) == 0
    assert (
        f"{files[0]} and {files[1]} hold the same attention: weights the same, bit for bit"
        in capsys.readouterr().out
    )


def test_verify_accepts_rounded_weights(tmp_path, capsys):
    """Weights rounded to float16 exit with status 0 and are reported as the same up to
    rounding in float16.
    """
    weights = random_weights(SPEC)
    rounded = {name: x.astype(np.float16) for name, x in weights.items()}
    assert (
        main(["compare", saved(tmp_path / "a.npz", weights), saved(tmp_path / "b.npz", rounded)])
        == 0
    )
    assert "weights the same up to rounding in float16" in capsys.readouterr().out


def test_verify_names_first_wrong_stage(tmp_path, capsys):
    """Swapped key and value weights exit with status 1 and are reported at stage k; the JSON
    has all stages: q passed, k and v failed.
    """
    weights = random_weights(SPEC)
    other = {
        **weights,
        "k_proj.weight": weights["v_proj.weight"],
        "v_proj.weight": weights["k_proj.weight"],
    }
    files = [saved(tmp_path / "a.npz", weights), saved(tmp_path / "b.npz", other)]
    assert main(["compare", *files, "--json", str(tmp_path / "r.json")]) == 1
    out = capsys.readouterr().out
    assert "verify/k: the other differs from the reference" in out
    assert f"{files[0]} and {files[1]} do NOT hold the same attention" in out
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [result["stage"] for result in results] == [
        "q",
        "k",
        "v",
        "scores",
        "attn_weights",
        "context",
        "output",
    ]
    assert [result["status"] for result in results][:3] == ["passed", "failed", "failed"]


def test_verify_accepts_flags_of_each_file(source, tmp_path, capsys):
    """With --from and --prefix given twice, `compare` applies the first to the first file and
    the second to the second.
    """
    other = saved(tmp_path / "b.npz", random_weights(SPEC, seed=1), "meta.LLaMA", "att")
    arguments = ["compare", source, other, "--from", "transformers.LLaMA", "--from", "meta.LLaMA"]
    arguments += ["--prefix", "model.layers.1.self_attn", "--prefix", "att", *HEADS]
    assert main(arguments) == 0
    assert "bit for bit" in capsys.readouterr().out


def test_verify_shares_one_layout_flag(source):
    """With --from and --prefix given once, `compare` applies them to both files."""
    arguments = [
        "compare",
        source,
        source,
        "--from",
        "transformers.LLaMA",
        "--prefix",
        "model.layers.1.self_attn",
    ]
    assert main([*arguments, *HEADS]) == 0


def test_verify_detects_wrong_rope_pairs(tmp_path, capsys):
    """Weights with meta.LLaMA's order of RoPE pairs, but canonical names, exit with status 1
    and are reported at stage q.
    """
    weights = random_weights(SPEC)
    wrong = dict(from_canonical(weights, SPEC, LAYOUTS["meta.LLaMA"]))
    names = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "out_proj"}
    other = {f"{names[name[:2]]}.weight": x for name, x in wrong.items()}
    assert (
        main(["compare", saved(tmp_path / "a.npz", weights), saved(tmp_path / "b.npz", other)]) == 1
    )
    assert "verify/q: " in capsys.readouterr().out


def test_verify_requires_equal_heads(tmp_path, capsys):
    """Layers with 4 and 2 heads exit with status 2 and one error line with both numbers."""
    other = AttentionSpec(16, 2, head_dim=6)
    files = [
        saved(tmp_path / "a.npz", random_weights(SPEC)),
        saved(tmp_path / "b.npz", random_weights(other), spec=other),
    ]
    assert main(["compare", *files]) == 2
    message = capsys.readouterr().err
    assert rejects("the layers", "num_heads=4 and 2").is_printed_in(message)
    assert message.count("\n") == 1


def test_verify_compares_all_layers(source, tmp_path, capsys):
    """Two numbered layers and a stack of them are reported as the same, bit for bit; the JSON
    has each pair of layers.
    """
    stack, report = str(tmp_path / "b.npz"), tmp_path / "r.json"
    assert main(convert(source, stack, "--to", "mha_jax", "--to-prefix", "layers.attn")) == 0
    assert "2 attention layers" in capsys.readouterr().out
    arguments = [
        "compare",
        source,
        stack,
        "--from",
        "transformers.LLaMA",
        "--from",
        "mha_jax",
        *HEADS,
    ]
    arguments += ["--prefix", PREFIX, "--prefix", "layers.attn", "--json", str(report)]
    assert main(arguments) == 0
    assert (
        "hold the same attention in all 2 layers: 2 the same, bit for bit; 0 the"
        in capsys.readouterr().out
    )
    layers = json.loads(report.read_text())["layers"]
    assert [layer["layers"] for layer in layers] == [
        [PREFIX.replace("{i}", str(i)), f"layers.attn[{i}]"] for i in range(2)
    ]


def test_verify_names_differing_layers(source, tmp_path, capsys):
    """If one of two layers has other values, `compare` exits with status 1 and prints that
    layer, its first stage v, and how many agree.
    """
    with open_tensors(source) as file:
        tensors = {name: file.read(name) for name in file.infos}
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 2
    infos = {name: (x.shape, x.dtype) for name, x in tensors.items()}
    other = str(write_tensors(tmp_path / "other.npz", infos, tensors.__getitem__))
    arguments = [
        "compare",
        source,
        other,
        "--from",
        "transformers.LLaMA",
        "--prefix",
        PREFIX,
        *HEADS,
    ]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "model.layers.1.self_attn and model.layers.1.self_attn differ first at v" in out
    assert "model.layers.1.self_attn/v: the other differs from the reference" in out
    assert "do NOT hold the same attention in all 2 layers: 1 the same, bit for bit; 0 the" in out


def test_verify_requires_equal_layer_counts(source, tmp_path, capsys):
    """Files with two layers and one layer exit with status 2 and an error with the name of
    the layer.
    """
    weights = random_weights(SPEC)
    other = saved(tmp_path / "b.npz", weights, "transformers.LLaMA", "model.layers.7.self_attn")
    arguments = [
        "compare",
        source,
        other,
        "--from",
        "transformers.LLaMA",
        "--prefix",
        PREFIX,
        *HEADS,
    ]
    assert main(arguments) == 2
    assert rejects("both files", "model.layers.7.self_attn").is_printed_in(capsys.readouterr().err)


# ---- run, with the layer of a file ---------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_run_accepts_layer_of_any_file(source, tmp_path, capsys, suffix):
    """`run --weights` runs one layer of an original or converted checkpoint; with two layers
    it requires --prefix, and --prefix requires --weights.
    """
    target = str(tmp_path / f"b.{suffix}")
    assert main(convert(source, target, "--to", "canonical")) == 0
    run = ["run", "--backends", "torch", "--weights"]
    assert main([*run, target, "--prefix", "model.layers.1.self_attn"]) == 0
    arguments = [
        source,
        "--prefix",
        "model.layers.1.self_attn",
        "--from",
        "transformers.LLaMA",
        *HEADS,
    ]
    assert main([*run, *arguments]) == 0
    capsys.readouterr()
    assert main([*run, target]) == 2
    assert rejects("--prefix", f"2 in {target}").is_printed_in(capsys.readouterr().err)
    assert main(["run", "--prefix", "a", "--num-heads", "3"]) == 2
    assert Misuse("--prefix and --num-heads require --weights or --model").is_printed_in(
        capsys.readouterr().err
    )


# ---- Warnings and errors -------------------------------------------------------------------------


def training_checkpoint(path):
    """Save weights, their average, an optimizer and a step as in training; return the path."""
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(16, 4, 8), 2, enable_nested_tensor=False
    )
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    state = model.state_dict()
    torch.save({"model": state, "ema": state, "opt": optimizer.state_dict(), "step": 50}, path)
    return str(path)


def test_convert_warns_of_skipped_content(tmp_path, capsys):
    """`convert` prints one short warning each about values that are not tensors, layers in
    the old layout and optimizer state; the JSON lists them.
    """
    source, report = training_checkpoint(tmp_path / "train.pt"), tmp_path / "r.json"
    arguments = [
        "convert",
        source,
        str(tmp_path / "b.pt"),
        "--to",
        "flax.nnx",
        "--json",
        str(report),
    ]
    arguments += [
        "--from",
        "torch.nn.MultiheadAttention",
        "--prefix",
        "model.layers.{i}.self_attn",
        "--num-heads",
        "4",
    ]
    assert main(arguments) == 0
    content = json.loads(report.read_text())
    assert {"step", "opt.param_groups.0.lr"} <= set(content["left_out"])
    assert content["unconverted"] == ["ema.layers.{i}.self_attn"]
    assert "opt.state.0.exp_avg" in content["optimizer_state"]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 3
    assert all(line.startswith("mha-parity: warning: ") and len(line) < 400 for line in warnings)
    assert "not tensors" in warnings[0]
    assert f"({len(content['left_out'])})" in warnings[0]
    assert "ema.layers.{i}.self_attn" in warnings[1]
    assert "exp_avg" in warnings[2]


@pytest.mark.parametrize(
    "prefix", [[], ["--prefix", "layers.*.self_attn"], ["--prefix", "model.layers.{i}.self_attn."]]
)
@pytest.mark.parametrize("layout", [[], ["--from", "torch.nn.MultiheadAttention"]])
def test_wrong_prefix_suggests_one_that_fits(tmp_path, capsys, prefix, layout):
    """Without a valid --prefix, convert, verify and run exit with status 2 and one short
    error line with a prefix that fits.
    """
    source = training_checkpoint(tmp_path / "train.pt")
    heads = ["--num-heads", "4"]
    for arguments in (
        ["convert", source, str(tmp_path / "b.npz"), "--to", "W_q", *layout, *prefix, *heads],
        ["compare", source, source, *layout, *prefix, *heads],
        ["run", "--weights", source, *layout, *prefix, *heads],
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert "--prefix 'model.layers.{i}.self_attn'" in error
        assert error.count("\n") == 1
        assert len(error) < 400 + len(source)


# ---- Heads from config.json ----------------------------------------------------------------------


def config_beside(path, **others):
    config = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "rope_theta": 500,
        **others,
    }
    (path.parent / "config.json").write_text(json.dumps(config))


def test_config_json_determines_heads(source, tmp_path, capsys):
    """Heads and RoPE come from the config.json in the folder of the file; `convert` and
    `inspect` print so, and the target has the spec.
    """
    config_beside(tmp_path / "source.safetensors")
    arguments = [
        source,
        str(tmp_path / "b.npz"),
        "--from",
        "transformers.LLaMA",
        "--prefix",
        PREFIX,
    ]
    assert main(["convert", *arguments, "--to", "meta.LLaMA"]) == 0
    heads = "(4 heads x 6, 2 key/value heads, RoPE theta 500, from config.json)"
    assert heads in capsys.readouterr().out
    with open_tensors(tmp_path / "b.npz") as file:
        assert AttentionSpec.from_json(file.metadata["spec"]) == SPEC
    assert main(["inspect", source]) == 0
    assert "4 x 6, key/value 2 (config.json)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "others",
    [
        {"num_attention_heads": 5},
        {"num_attention_heads": "4"},
        {"num_attention_heads": True},
        {"num_attention_heads": None},
    ],
)
def test_unfit_config_json_is_ignored(source, tmp_path, capsys, others):
    """If num_attention_heads of config.json does not fit or is not an integer, `convert`
    exits with status 2 since heads are undetermined.
    """
    config_beside(tmp_path / "source.safetensors", **others)
    arguments = [
        source,
        str(tmp_path / "b.npz"),
        "--from",
        "transformers.LLaMA",
        "--prefix",
        PREFIX,
    ]
    assert main(["convert", *arguments, "--to", "meta.LLaMA"]) == 2
    assert rejects("the heads").is_printed_in(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("rope", "drop"),
    [
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 500}}, "rope_type"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_theta": float("inf")}, "rope_theta"),
    ],
)
def test_inexpressible_rope_requires_drop(source, tmp_path, capsys, rope, drop):
    """RoPE settings of config.json that a specification cannot express exit with status 2;
    with --drop, the layer is converted without RoPE.
    """
    config_beside(tmp_path / "source.safetensors", **rope)
    arguments = [
        source,
        str(tmp_path / "b.npz"),
        "--from",
        "transformers.LLaMA",
        "--prefix",
        PREFIX,
    ]
    assert main(["convert", *arguments, "--to", "meta.LLaMA"]) == 2
    assert main(["convert", *arguments, "--to", "meta.LLaMA", "--drop", drop]) == 0
    assert ", from config.json) from " in capsys.readouterr().out


ROPE_NOT_CARRIED = {
    "rope_scaling={'rope_type': 'llama3'}": {"rope_scaling": {"rope_type": "llama3"}},
    "rope_type=yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500}},
    "partial_rotary_factor=0.25": {"partial_rotary_factor": 0.25},
    "rotary_pct=0.25": {"rotary_pct": 0.25},
}


@pytest.mark.parametrize("words", ROPE_NOT_CARRIED)
def test_unread_rope_is_warned_of_once(source, tmp_path, capsys, words):
    """convert, inspect and run print one warning about a RoPE setting that no specification
    expresses, and none with --rope-theta; the JSON of `convert` has it.
    """
    config_beside(tmp_path / "source.safetensors", **ROPE_NOT_CARRIED[words])
    layer = [source, "--from", "transformers.LLaMA", "--prefix", PREFIX]
    convert = ["convert", source, str(tmp_path / "b.npz"), *layer[1:], "--to", "meta.LLaMA"]
    convert += ["--drop", words.partition("=")[0]]
    commands = [
        [*convert, "--json", str(tmp_path / "c.json")],
        ["inspect", source],
        [
            "run",
            "--weights",
            source,
            *layer[1:3],
            "--prefix",
            PREFIX.replace("{i}", "0"),
            "--backends",
            "torch",
        ],
    ]
    for command in commands:
        assert main(command) == 0
        error = capsys.readouterr().err
        assert (
            error.count(f"warning: config.json sets {words}, which no specification expresses") == 1
        )
        assert error.count("\n") == 1
        assert (
            main(
                [*command, *(["--force"] if command[0] == "convert" else []), "--rope-theta", "500"]
            )
            == 0
        )
        assert capsys.readouterr().err == ""
    main([*commands[0], "--force"])
    assert json.loads((tmp_path / "c.json").read_text())["ignored_settings"] == [words]


def test_load_warns_of_unread_rope(source, tmp_path):
    """`parity.load` warns of a RoPE setting that it does not read and returns a spec without
    RoPE; given `rope`, it returns that without a warning.
    """
    config_beside(tmp_path / "source.safetensors", rope_scaling={"rope_type": "llama3"})
    with pytest.warns(parity.IgnoredSettingsWarning, match="config.json sets rope_scaling="):
        _, spec = parity.load(source, "transformers.LLaMA", prefix=PREFIX.replace("{i}", "0"))
    assert spec.rope is None
    rope = Rope(500.0, scaling=Llama3Scaling(8.0, 64))
    with warnings.catch_warnings(action="error"):
        _, spec = parity.load(
            source, "transformers.LLaMA", prefix=PREFIX.replace("{i}", "0"), rope=rope
        )
    assert spec.rope == rope


def test_flags_override_config_json(source, tmp_path, capsys):
    """--num-heads 2 overrides the 4 heads of config.json: the layer has heads 2 x 12 and one
    key/value head.
    """
    config_beside(tmp_path / "source.safetensors", rope_theta=None)
    arguments = [
        source,
        str(tmp_path / "b.npz"),
        "--from",
        "transformers.LLaMA",
        "--prefix",
        PREFIX,
        "--num-heads",
        "2",
    ]
    assert main(["convert", *arguments, "--to", "meta.LLaMA"]) == 0
    assert "(2 heads x 12, 1 key/value head)" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--from", "--prefix"])
def test_verify_rejects_third_layout_flag(source, capsys, flag):
    """A third --from or --prefix exits with status 2 and an error with all three values."""
    assert main(["compare", source, source, flag, "a", flag, "b", flag, "c"]) == 2
    assert rejects(flag, {flag: ["a", "b", "c"]}).is_printed_in(capsys.readouterr().err)


# ---- All commands --------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.costly("whether output is a terminal")
def test_output_in_a_pipe_is_plain(source, tmp_path):
    """In a pipe, the output of `convert`, which has a progress bar on a terminal, and the
    table of `inspect` are plain text.
    """
    target = str(tmp_path / "b.npz")
    for arguments in (convert(source, target, "--to", "qkv_proj"), ["inspect", source, *HEADS]):
        result = run_in_pipe(*arguments)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout
        assert is_plain(result.stdout)
