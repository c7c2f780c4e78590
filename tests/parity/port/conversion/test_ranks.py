"""Checkpoints with one file per rank: read as one, written, rejected if a rank is missing."""

import shutil
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.input_errors import rejects
from helpers.samples import sample

import parity
from mha_spec import AttentionSpec, Gate, Norm, Rope
from parity import ShardPlan, random_weights, shard
from parity.measure.files import open_tensors
from parity.port.conversion.convert import convert_file
from parity.port.conversion.layouts import LAYOUTS, from_canonical, to_canonical
from parity.port.conversion.ranks import open_checkpoint
from parity.use.cli.main import main

META = AttentionSpec(32, 8, num_kv_heads=4, qkv_bias=False, out_bias=False, rope=Rope(500.0))
GPT = AttentionSpec(32, 8, num_kv_heads=4, rope=Rope(10000.0))
WIDTH = replace(GPT, qk_norm=Norm("layer", over="width", bias=True))
EACH_HEAD = replace(GPT, qk_norm=Norm(per_head=True))
GATED = replace(GPT, gate=Gate(bias=True), qk_norm=Norm(), sinks=True)
HEADS = {"num_heads": 8, "num_kv_heads": 4, "rope": Rope(500.0)}

PREFIXES = {"meta.LLaMA": "layers.{i}.attention", "megatron": "decoder.layers.{i}.self_attention"}
PREFIXES["megatron.gate"] = PREFIXES["megatron"]

PATHS = {"meta.LLaMA": "consolidated.{:02}.pth", "megatron": "mp_rank_{:02}/model_optim_rng.pt"}


def rest_of_meta(rank, ranks, *, by_vocabulary):
    """Tensors of a rank outside attention as in Meta's files, for one layer of width 32."""
    copied, own = np.random.default_rng(0), np.random.default_rng([1, rank])
    vocabulary = (24 // ranks, 32) if by_vocabulary else (24, 32 // ranks)
    return {
        "tok_embeddings.weight": own.standard_normal(vocabulary),
        "output.weight": own.standard_normal((24 // ranks, 32)),
        "layers.0.feed_forward.w1.weight": own.standard_normal((64 // ranks, 32)),
        "layers.0.feed_forward.w2.weight": own.standard_normal((32, 64 // ranks)),
        "layers.0.feed_forward.w3.weight": own.standard_normal((64 // ranks, 32)),
        "layers.0.attention_norm.weight": copied.standard_normal(32),
        "norm.weight": copied.standard_normal(32),
        "rope.freqs": copied.standard_normal(2),
    }


def rest_of_megatron(rank, ranks, *, gated):
    """The same for Megatron-LM."""
    copied, own = np.random.default_rng(0), np.random.default_rng([1, rank])
    width = (2 if gated else 1) * 64 // ranks
    return {
        "embedding.word_embeddings.weight": own.standard_normal((24 // ranks, 32)),
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": copied.standard_normal(32),
        "decoder.layers.0.mlp.linear_fc1.weight": own.standard_normal((width, 32)),
        "decoder.layers.0.mlp.linear_fc1.bias": own.standard_normal(width),
        "decoder.layers.0.mlp.linear_fc2.weight": own.standard_normal((32, 64 // ranks)),
        "decoder.layers.0.mlp.linear_fc2.bias": copied.standard_normal(32),
        "decoder.final_layernorm.weight": copied.standard_normal(32),
    }


def tensors_of_ranks(layout, spec, weights, ranks, rest=lambda rank: {}):
    """Torch tensors of each rank, made by `parity.shard` and the layout, as programs save them."""
    of_ranks = []
    for rank in range(ranks):
        share, own = shard(weights, spec, ShardPlan(ranks), rank, alone=False)
        if spec.out_bias:  # these programs keep it on every rank, and add it once
            share, own = (
                share | {"out_proj.bias": weights["out_proj.bias"]},
                replace(own, out_bias=True),
            )
        prefix = PREFIXES[layout].format(i=0)
        tensors = {
            f"{prefix}.{name}": x for name, x in from_canonical(share, own, LAYOUTS[layout]).items()
        }
        tensors |= {name: x.astype(np.float32) for name, x in rest(rank).items()}
        of_ranks.append(
            {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in tensors.items()}
        )
    return of_ranks


def save(folder, layout, of_ranks):
    for rank, tensors in enumerate(of_ranks):
        path = folder / PATHS[layout].format(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(tensors, path)
    return folder


def read(path):
    with open_checkpoint(path) as file:
        return {name: file.read(name) for name in file.infos}


def assert_bits_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape), name
        assert actual[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


@pytest.fixture
def meta(tmp_path):
    """A checkpoint of one layer on four of Meta's ranks, and the layer's weights."""
    weights = random_weights(META)
    of_ranks = tensors_of_ranks(
        "meta.LLaMA", META, weights, 4, lambda rank: rest_of_meta(rank, 4, by_vocabulary=True)
    )
    return save(tmp_path / "meta", "meta.LLaMA", of_ranks), weights


# ---- Reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("layout", "spec"), [("meta.LLaMA", META), ("megatron", GPT)])
def test_folder_of_ranks_loads_as_one_layer(tmp_path, layout, spec, ranks):
    """Files of 1, 2 or 4 ranks load as the one layer that they share, bit for bit."""
    weights = random_weights(spec)
    folder = save(tmp_path / "ranks", layout, tensors_of_ranks(layout, spec, weights, ranks))
    options = {
        "prefix": PREFIXES[layout].format(i=0),
        "num_heads": 8,
        "num_kv_heads": 4,
        "rope": spec.rope,
    }
    read_weights, read_spec = parity.load(folder, layout, **options)
    assert read_spec == spec
    assert_bits_equal(read_weights, weights)


def test_gates_norms_and_sinks_are_joined(tmp_path):
    """Gates, norms and sinks of four Megatron-LM ranks, with two sinks each, load bit for bit."""
    weights = random_weights(GATED)
    of_ranks = tensors_of_ranks("megatron.gate", GATED, weights, 4)
    assert of_ranks[0]["decoder.layers.0.self_attention.core_attention.softmax_offset"].shape == (
        2,
    )
    folder = save(tmp_path, "megatron", of_ranks)
    read_weights, _ = parity.load(
        folder, "megatron.gate", prefix="decoder.layers.0.self_attention", spec=GATED
    )
    assert_bits_equal(read_weights, weights)


@pytest.mark.parametrize("spec", [WIDTH, EACH_HEAD])
def test_sharded_norms_are_joined(tmp_path, spec):
    """Norms over the whole width or per head are joined from four ranks bit for bit."""
    weights = random_weights(spec)
    folder = save(tmp_path, "megatron", tensors_of_ranks("megatron", spec, weights, 4))
    assert_bits_equal(
        parity.load(folder, "megatron", prefix=PREFIXES["megatron"].format(i=0), spec=spec)[0],
        weights,
    )


def test_ambiguous_sharded_norms_raise(tmp_path):
    """Norms that may be shards or copies raise an error with rank and tensor if they differ."""
    spec = replace(WIDTH, num_heads=4)
    folder = save(tmp_path, "megatron", tensors_of_ranks("megatron", spec, random_weights(spec), 4))
    with rejects(str(folder), rank=1, tensor=...) as input_error:
        read(folder)
    assert "q_layernorm.weight" in str(input_error.value)


def test_convert_reports_norms_over_ranks(tmp_path, capsys):
    """`convert` says that ranks must add up squares only for a norm over the width on two ranks."""
    for name, spec in {"width": WIDTH, "head": replace(GPT, qk_norm=Norm())}.items():
        parity.save(tmp_path / f"{name}.safetensors", random_weights(spec), spec)
        for ranks in (["--ranks", "1"], ["--ranks", "2"]):
            source, target = tmp_path / f"{name}.safetensors", tmp_path / f"{name}-{ranks[1]}"
            assert main(["convert", str(source), str(target), "--to", "megatron", *ranks]) == 0
            printed = " ".join(capsys.readouterr().err.split())
            assert ("add up the squares of all ranks: q_layernorm.weight" in printed) == (
                "width-2" in target.name
            )


@pytest.mark.parametrize("by_vocabulary", [True, False])
def test_other_meta_tensors_are_joined(tmp_path, by_vocabulary):
    """Embeddings and MLPs of Meta's ranks are concatenated; norms and RoPE are copies."""
    of_ranks = tensors_of_ranks(
        "meta.LLaMA",
        META,
        random_weights(META),
        4,
        lambda r: rest_of_meta(r, 4, by_vocabulary=by_vocabulary),
    )
    whole = read(save(tmp_path, "meta.LLaMA", of_ranks))
    for name, axis in {
        "tok_embeddings.weight": 0 if by_vocabulary else 1,
        "output.weight": 0,
        "layers.0.feed_forward.w1.weight": 0,
        "layers.0.feed_forward.w2.weight": 1,
    }.items():
        np.testing.assert_array_equal(
            whole[name], torch.cat([tensors[name] for tensors in of_ranks], dim=axis).numpy()
        )
    for name in ("norm.weight", "layers.0.attention_norm.weight", "rope.freqs"):
        np.testing.assert_array_equal(whole[name], of_ranks[0][name].numpy())


@pytest.mark.parametrize("gated", [True, False])
def test_other_megatron_tensors_are_joined(tmp_path, gated):
    """MLPs of Megatron-LM's ranks are concatenated; the gates of all ranks come first."""
    of_ranks = tensors_of_ranks(
        "megatron", GPT, random_weights(GPT), 2, lambda r: rest_of_megatron(r, 2, gated=gated)
    )
    whole = read(save(tmp_path, "megatron", of_ranks))
    for leaf in ("weight", "bias"):
        name = f"decoder.layers.0.mlp.linear_fc1.{leaf}"
        parts = [tensors[name] for tensors in of_ranks]
        if gated:  # all gates, and then all rows that they multiply
            halves = [part.chunk(2) for part in parts]
            parts = [half[i] for i in (0, 1) for half in halves]
        np.testing.assert_array_equal(whole[name], torch.cat(parts).numpy())
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    np.testing.assert_array_equal(
        whole[name], torch.cat([tensors[name] for tensors in of_ranks], dim=1).numpy()
    )


def test_single_rank_is_not_converted(meta, tmp_path):
    """Converting one of four ranks raises an error; the folder converts bit for bit."""
    folder, weights = meta
    options = {
        "source": "meta.LLaMA",
        "target": "canonical",
        "prefix": "layers.{i}.attention",
        **HEADS,
    }
    with rejects("…/consolidated.00.pth", "rank 0 alone"):
        convert_file(folder / "consolidated.00.pth", tmp_path / "a.npz", **options)
    converted = convert_file(folder, tmp_path / "a.npz", **options)
    assert (converted.layers, converted.spec) == (["layers.0.attention"], META)
    assert len(converted.copied) == 8
    assert_bits_equal(parity.load(tmp_path / "a.npz", prefix="layers.0.attention")[0], weights)


def test_renamed_rank_file_needs_head_dim(meta, tmp_path):
    """A renamed file of a rank loads as that rank's shard with head_dim, and raises without it."""
    folder, weights = meta
    shutil.copy(folder / "consolidated.01.pth", tmp_path / "a.pth")
    options = {"prefix": "layers.0.attention", "num_kv_heads": 1, "rope": META.rope}
    for num_heads, num_kv_heads in ((4, 2), (2, 1)):
        kv = {"num_kv_heads": num_kv_heads}
        with rejects(
            "head_dim", num_heads=num_heads, head_dim=..., d_model=32, where="layers.0.attention"
        ):
            parity.load(tmp_path / "a.pth", "meta.LLaMA", num_heads=num_heads, **options | kv)
    loaded, own = parity.load(tmp_path / "a.pth", "meta.LLaMA", num_heads=2, head_dim=4, **options)
    expected = shard(weights, META, ShardPlan(4), 1)
    assert own == expected[1]
    assert_bits_equal(loaded, expected[0])


def test_missing_ranks_raise(meta, tmp_path):
    """A folder without rank 2 raises, as does loading a layer from ranks 0 and 1 of four."""
    folder, _ = meta
    (folder / "consolidated.02.pth").rename(tmp_path / "consolidated.02.pth")
    with rejects("…/meta"):
        read(folder)
    with rejects("…/consolidated.02.pth", "rank 2 alone"):
        read(tmp_path / "consolidated.02.pth")
    (folder / "consolidated.03.pth").unlink()  # now only the heads show that there were four
    with rejects("head_dim", num_heads=4, head_dim=4, d_model=32, where="layers.0.attention"):
        parity.load(folder, "meta.LLaMA", prefix="layers.0.attention", num_heads=4, num_kv_heads=2)


def test_inconsistent_ranks_raise(meta):
    """A rank whose norm has other values or a different shape, or that equals another rank,
    raises.
    """
    folder, _ = meta
    last = folder / "consolidated.03.pth"
    tensors = torch.load(last)
    torch.save(tensors | {"norm.weight": tensors["norm.weight"] + 1}, last)
    with rejects(str(folder), tensor="norm.weight", rank=3):
        read(folder)
    torch.save(tensors | {"norm.weight": tensors["norm.weight"][1:]}, last)
    with rejects("…/consolidated.03.pth", "others: norm.weight"):
        read(folder)
    shutil.copy(folder / "consolidated.02.pth", last)
    with rejects(str(folder), ranks=[2, 3]):
        read(folder)


def test_pipeline_stages_raise(tmp_path):
    """A folder with files of pipeline stages raises an error that names one."""
    folder = save(
        tmp_path / "ranks", "megatron", tensors_of_ranks("megatron", GPT, random_weights(GPT), 2)
    )
    shutil.copytree(folder / "mp_rank_01", folder / "mp_rank_01_001")
    with rejects("…/ranks", "mp_rank_01_001"):
        read(folder)


def test_unknown_sharded_tensor_raises(tmp_path, capsys):
    """A tensor with unknown sharding raises an error that suggests `--rest drop`."""
    of_ranks = tensors_of_ranks(
        "meta.LLaMA", META, random_weights(META), 2, lambda r: {"layers.0.other": np.ones(3)}
    )
    folder = save(tmp_path / "ranks", "meta.LLaMA", of_ranks)
    options = {
        "source": "meta.LLaMA",
        "target": "canonical",
        "prefix": "layers.{i}.attention",
        **HEADS,
    }
    with rejects(str(folder)):
        convert_file(folder, tmp_path / "a.npz", **options)
    assert not (tmp_path / "a.npz").exists()
    command = [
        "convert",
        str(folder),
        str(tmp_path / "a.npz"),
        "--from",
        "meta.LLaMA",
        "--to",
        "canonical",
    ]
    heads = ["--num-heads", "8", "--num-kv-heads", "4", "--rope-theta", "500"]
    assert main([*command, "--prefix", "layers.{i}.attention", *heads]) == 2
    assert "; --rest drop leaves out layers.0.other" in capsys.readouterr().err
    assert convert_file(folder, tmp_path / "a.npz", keep_rest=False, **options).dropped == [
        "layers.0.other"
    ]


def test_whole_model_precedes_ranks(meta):
    """If the folder of ranks also has model.safetensors, that file is read instead."""
    folder, weights = meta
    parity.save(folder / "model.safetensors", weights, META)
    assert parity.load(folder)[1] == META


# ---- Writing -------------------------------------------------------------------------------------


@sample(12, ranks=[1, 4])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        ("meta.LLaMA", META),
        ("megatron", GPT),
        ("megatron.gate", GATED),
        ("megatron", WIDTH),
        ("megatron", EACH_HEAD),
        (
            "megatron",
            replace(WIDTH, num_heads=4),
        ),  # with four ranks one head each, as wide as the rank
    ],
)
def test_sharded_round_trip_is_exact(tmp_path, layout, spec, ranks, dtype):
    """Written ranks equal independently sharded tensors, and convert back bit for bit."""
    weights = {name: weight.astype(dtype) for name, weight in random_weights(spec).items()}
    prefix = PREFIXES[layout].format(i=0)
    parity.save(tmp_path / "whole.safetensors", weights, spec, prefix=prefix)
    convert_file(
        tmp_path / "whole.safetensors",
        tmp_path / "ranks",
        target=layout,
        ranks=ranks,
        prefix=prefix,
    )
    files = sorted(path for path in (tmp_path / "ranks").rglob("*") if path.is_file())
    assert files == [
        tmp_path / "ranks" / PATHS[layout.partition(".gate")[0]].format(rank)
        for rank in range(ranks)
    ]
    expected = tensors_of_ranks(
        layout, spec, {name: x.astype(np.float32) for name, x in weights.items()}, ranks
    )
    for path, tensors in zip(files, expected, strict=True):
        tensors_of_file = torch.load(path)
        assert tensors_of_file.keys() == tensors.keys()
        assert all(
            torch.equal(tensors_of_file[name].float(), tensor) for name, tensor in tensors.items()
        )
    convert_file(tmp_path / "ranks", tmp_path / "back.safetensors", target="canonical")
    read_weights, read_spec = parity.load(tmp_path / "back.safetensors")
    assert read_spec == spec
    assert_bits_equal(read_weights, weights)
    assert main(["compare", str(tmp_path / "whole.safetensors"), str(tmp_path / "ranks")]) == 0


def test_other_tensors_survive_resharding(meta, tmp_path):
    """Resharding from four ranks to two and back to four restores every tensor."""
    folder, _ = meta
    options = {
        "source": "meta.LLaMA",
        "target": "meta.LLaMA",
        "prefix": "layers.{i}.attention",
        **HEADS,
    }
    convert_file(folder, tmp_path / "two", ranks=2, **options)
    assert_bits_equal(read(tmp_path / "two"), read(folder))
    convert_file(tmp_path / "two", tmp_path / "four", target="meta.LLaMA", ranks=4)
    for rank in range(4):
        one, other = (
            torch.load(target / f"consolidated.{rank:02}.pth")
            for target in (folder, tmp_path / "four")
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


def test_written_ranks_store_their_count(meta, tmp_path):
    """A written folder that lacks its last rank raises an error, and so does that rank alone."""
    folder, _ = meta
    options = {
        "source": "meta.LLaMA",
        "target": "meta.LLaMA",
        "prefix": "layers.{i}.attention",
        **HEADS,
    }
    convert_file(folder, tmp_path / "ranks", ranks=4, **options)
    (tmp_path / "ranks" / "consolidated.03.pth").rename(tmp_path / "a.pth")
    with rejects("…/ranks", "3"):
        read(tmp_path / "ranks")
    with rejects("…/a.pth", "the file of one"):
        read(tmp_path / "a.pth")


def test_convert_writes_ranks(meta, tmp_path, capsys):
    """`convert --ranks 2` writes two ranks; existing folders and wrong options exit with 2."""
    folder, weights = meta
    layer = [
        "--from",
        "meta.LLaMA",
        "--prefix",
        "layers.{i}.attention",
        "--num-heads",
        "8",
        "--num-kv-heads",
        "4",
    ]
    arguments = [
        "convert",
        str(folder),
        str(tmp_path / "eight"),
        *layer,
        "--to",
        "megatron",
        "--rest",
        "drop",
    ]
    arguments += ["--to-prefix", "decoder.layers.{i}.self_attention", "--rope-theta", "500"]
    assert main([*arguments, "--ranks", "2"]) == 0
    assert sorted(path.name for path in (tmp_path / "eight").iterdir()) == [
        "mp_rank_00",
        "mp_rank_01",
    ]
    assert main(["inspect", str(tmp_path / "eight")]) == 0
    assert "decoder.layers.{i}.self_attention" in capsys.readouterr().out
    assert_bits_equal(
        parity.load(tmp_path / "eight", prefix="decoder.layers.0.self_attention")[0], weights
    )
    assert main([*arguments, "--ranks", "2"]) == 2
    assert f"{tmp_path / 'eight'} exists" in capsys.readouterr().err
    for ranks, input_error in {
        "8": rejects("--ranks", {"--ranks": 8, "--num-kv-heads": 4}),
        "3": rejects("--ranks", {"--ranks": 3, "--num-kv-heads": 4}),
        "0": rejects("--ranks", {"--ranks": 0}),
    }.items():
        assert main([*arguments, "--ranks", ranks]) == 2
        assert input_error.is_printed_in(capsys.readouterr().err)
    other = [*arguments[:2], str(tmp_path / "new"), *arguments[3:], "--ranks", "2"]
    assert main([*other, "--to", "canonical"]) == 2
    assert rejects("--ranks", {"--ranks": 2, "layout.name": "canonical"}).is_printed_in(
        capsys.readouterr().err
    )
    assert main([*other, "--max-shard-gib", "1"]) == 2
    assert not (tmp_path / "new").exists()


def test_unshardable_tensors_raise(meta, tmp_path):
    """Stacked layers and tensors with unknown sharding raise an error, and nothing is written."""
    folder, _ = meta
    options = {
        "source": "meta.LLaMA",
        "target": "meta.LLaMA",
        "prefix": "layers.{i}.attention",
        **HEADS,
    }
    with rejects("ranks", ranks=2, label="layers[0]"):
        convert_file(
            folder, tmp_path / "a", ranks=2, to_prefix="layers", keep_rest=False, **options
        )
    options["target"] = "megatron"
    with rejects("tok_embeddings.weight"):
        convert_file(folder, tmp_path / "a", ranks=2, **options)
    assert not (tmp_path / "a").exists()


def test_layouts_of_ranks_match_programs():
    """Each layout with ranks round-trips a layer and uses the file names of its program."""
    specs = {"meta.LLaMA": META, "megatron": GPT, "megatron.gate": GATED}
    layouts = [layout for layout in LAYOUTS.values() if layout.ranks is not None]
    assert {layout.name for layout in layouts} == specs.keys()
    for layout in layouts:
        spec = specs[layout.name]
        weights = random_weights(spec)
        laid_out = from_canonical(weights, spec, layout)
        assert_bits_equal(to_canonical(laid_out, layout, spec=spec)[0], weights)
        assert layout.ranks.file.format(rank="00") == PATHS[
            layout.name.partition(".gate")[0]
        ].format(0)


def test_ordinary_file_opens_unchanged(tmp_path):
    """open_checkpoint lists the same tensors of an ordinary file as open_tensors."""
    parity.save(tmp_path / "a.safetensors", random_weights(META), META)
    with (
        open_checkpoint(tmp_path / "a.safetensors") as one,
        open_tensors(tmp_path / "a.safetensors") as other,
    ):
        assert one.infos == other.infos
