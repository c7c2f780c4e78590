"""Quantized tensors of GGUF files: their blocks are read as by the gguf package, bit for bit."""

import json
import sys
import tracemalloc
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from helpers.input_errors import rejects
from helpers.samples import sample

from mha_spec import Rope
from parity import AttentionSpec, random_weights
from parity.measure.files import gguf as gguf_format
from parity.measure.files import open_tensors, write_tensors
from parity.measure.files.gguf import BLOCKS, PLAIN, VALUES_AT_ONCE
from parity.port.conversion.convert import load
from parity.port.conversion.layouts import LAYOUTS, from_canonical
from parity.use.cli.main import main

KINDS = gguf.GGMLQuantizationType
ROUNDED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]  # types to which the package quantizes
every_kind = pytest.mark.parametrize("kind", BLOCKS)

SPEC = AttentionSpec(
    64, 4, num_kv_heads=2, head_dim=16, qkv_bias=False, out_bias=False, rope=Rope(500.0)
)
PREFIX, TO_PREFIX = "blk.{i}", "model.layers.{i}.self_attn"
LAYERS = ["--from", "gguf.LLaMA", "--prefix", PREFIX]


def write_gguf(path, tensors, kinds=()):
    """Write a file; tensors in `kinds` are quantized, or are already bytes of that type."""
    kinds = dict(kinds)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(SPEC.d_model)
    writer.add_head_count(SPEC.num_heads)
    writer.add_head_count_kv(SPEC.num_kv_heads)
    writer.add_rope_freq_base(SPEC.rope.theta)
    for name, x in tensors.items():
        if name in kinds:
            kind = KINDS[kinds[name]]
            x = x if x.dtype == np.uint8 else gguf.quants.quantize(x, kind)
            writer.add_tensor(name, x, raw_dtype=kind)
        else:
            writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def any_blocks(kind, *shape):
    """Random bytes of blocks, including scales that are NaN, and the package's values for them."""
    values, length = BLOCKS[kind]
    raw = np.random.default_rng(0).integers(
        0, 256, (*shape[:-1], shape[-1] // values * length), dtype=np.uint8
    )
    with np.errstate(all="ignore"):
        return raw, gguf.quants.dequantize(raw, KINDS[kind])


def is_same(actual, expected):
    return (
        actual.dtype == expected.dtype
        and actual.shape == expected.shape
        and actual.tobytes() == expected.tobytes()
    )


# ---- Reading -------------------------------------------------------------------------------------


def test_block_sizes_match_gguf_package():
    """Sizes of blocks equal the gguf package's, and divide VALUES_AT_ONCE."""
    assert {kind: gguf.GGML_QUANT_SIZES[KINDS[kind]] for kind in BLOCKS} == BLOCKS
    assert all(VALUES_AT_ONCE % values == 0 for values, _ in BLOCKS.values())


@sample(12)
@every_kind
@pytest.mark.parametrize("at_once", [512, VALUES_AT_ONCE])
def test_random_blocks_match_gguf_package(tmp_path, monkeypatch, kind, at_once):
    """Random blocks of each type are read as by the gguf package, bit for bit."""
    monkeypatch.setattr(gguf_format, "VALUES_AT_ONCE", at_once)
    raw, expected = any_blocks(kind, 3, 5, 768)
    path = write_gguf(
        tmp_path / "w.gguf", {"before": np.ones(3, np.float32), "x": raw}, {"x": kind}
    )
    with open_tensors(path) as file:
        assert file.infos["x"] == ((3, 5, 768), np.float32, 3 * 5 * 768 * 4)
        assert file.quantized == {"x": kind}
        assert is_same(file.read("x"), expected)
        assert is_same(file.read_entry("x", 1), expected[1])
        assert file.read("before").tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ROUNDED)
def test_quantization_error_is_below_a_step(tmp_path, kind):
    """Values that the gguf package quantized are read to within one quantization step."""
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    with open_tensors(write_gguf(tmp_path / "w.gguf", {"x": x}, {"x": kind})) as file:
        values = file.read("x")
    assert is_same(
        values, gguf.quants.dequantize(gguf.quants.quantize(x, KINDS[kind]), KINDS[kind])
    )
    step = 2 * np.abs(x).max() / (2 ** int(kind[1]) - 1)  # for a block that spans all values
    assert 0 < np.abs(values - x).max() <= step


def test_dequantization_memory_is_bounded(tmp_path):
    """Reading 2 million Q4_K values peaks at their float32 size plus 32 * VALUES_AT_ONCE bytes."""
    raw, expected = any_blocks("Q4_K", 1024, 2048)
    path = write_gguf(tmp_path / "w.gguf", {"x": raw}, {"x": "Q4_K"})
    with open_tensors(path) as file:
        tracemalloc.start()
        actual = file.read("x")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert is_same(actual, expected)
    assert (
        peak < actual.nbytes + 32 * VALUES_AT_ONCE
    )  # a few float32 arrays for the blocks that are read at once


# ---- Errors --------------------------------------------------------------------------------------


def test_unsupported_type_raises_when_read(tmp_path):
    """A file with an IQ4_NL tensor opens; reading or copying the tensor raises with its type."""
    raw = np.zeros((4, 18), np.uint8)
    path = write_gguf(
        tmp_path / "w.gguf", {"x": raw, "plain": np.ones(3, np.float32)}, {"x": "IQ4_NL"}
    )
    with open_tensors(path) as file:
        assert file.infos["x"].shape == (4, 32)
        assert file.quantized == {}
        assert file.read("plain").tolist() == [1.0, 1.0, 1.0]
        with rejects("x", x="IQ4_NL") as input_error:
            file.read("x")
        assert str(sorted([*PLAIN, *BLOCKS])) in input_error.value.rule
        with rejects("…/w.safetensors", "[('IQ4_NL', 'V1')] for x"):
            write_tensors(tmp_path / "w.safetensors", {"x": file.infos["x"]}, file.read)


@every_kind
def test_truncated_blocks_raise(tmp_path, kind):
    """A file may lack its final padding, but one byte less raises an error with the tensor."""
    raw, _ = any_blocks(kind, 4, 256)
    path = write_gguf(tmp_path / "w.gguf", {"x": raw}, {"x": kind})
    begin = path.stat().st_size - -(-raw.size // 32) * 32  # the file ends in padding
    path.write_bytes(path.read_bytes()[: begin + raw.size])
    with open_tensors(path) as file:
        file.read("x")
    path.write_bytes(path.read_bytes()[:-1])
    with rejects("tensors", tensor="x"):
        open_tensors(path)


def test_row_of_half_a_block_raises(tmp_path):
    """A Q8_0 tensor with rows of 16 values, half a block, raises an error with its shape."""
    path = write_gguf(tmp_path / "w.gguf", {"x": np.zeros((4, 34), np.uint8)}, {"x": "Q8_0"})
    data = path.read_bytes()
    assert data.count((32).to_bytes(8, "little")) == 1
    path.write_bytes(data.replace((32).to_bytes(8, "little"), (16).to_bytes(8, "little")))
    with rejects("rows of Q8_0", {"x.shape": (4, 16)}):
        open_tensors(path)


def test_gguf_opens_without_its_package(tmp_path, monkeypatch, capsys):
    """Without the gguf package, files open and plain tensors load; others raise ImportError."""
    raw, _ = any_blocks("Q6_K", 2, 256)
    path = write_gguf(
        tmp_path / "w.gguf", {"x": raw, "plain": np.ones(3, np.float32)}, {"x": "Q6_K"}
    )
    monkeypatch.setitem(sys.modules, "gguf", None)
    with open_tensors(path) as file:
        assert file.read("plain").tolist() == [1.0, 1.0, 1.0]
        with pytest.raises(ImportError, match=r"w.gguf needs gguf: .*; pip install gguf"):
            file.read("x")
    assert main(["inspect", str(path)]) == 0
    assert "Q6_K, read as float32" in capsys.readouterr().out


# ---- Layers --------------------------------------------------------------------------------------


@pytest.fixture
def model(request, tmp_path):
    """Two layers with one tensor of four in a different type, and the original layers."""
    kind = getattr(request, "param", "Q4_0")
    weights = [random_weights(SPEC, seed=i) for i in range(2)]
    tensors = {
        "token_embd.weight": np.ones((4, 64), np.float32),
        "output.weight": np.ones((4, 64), np.float32),
    }
    plain = {}
    for i, weight in enumerate(weights):
        tensors |= {
            f"blk.{i}.{name}": x
            for name, x in from_canonical(weight, SPEC, LAYOUTS["gguf.LLaMA"]).items()
        }
        llama = from_canonical(weight, SPEC, LAYOUTS["transformers.LLaMA"]).items()
        plain |= {f"{TO_PREFIX.format(i=i)}.{name}": x for name, x in llama}
    kinds = {
        name: "Q8_0" if "attn_v" in name else kind
        for name in tensors
        if name != "token_embd.weight"
    }
    origin = tmp_path / "origin.safetensors"
    write_tensors(
        origin, {name: (x.shape, x.dtype) for name, x in plain.items()}, plain.__getitem__
    )
    path = write_gguf(tmp_path / "model.gguf", tensors, kinds)
    return SimpleNamespace(
        path=str(path), origin=str(origin), tensors=tensors, kinds=kinds, folder=tmp_path
    )


def test_quantized_layer_loads_as_float32(model):
    """A layer of Q4_0 and Q8_0 tensors loads as float32, with the gguf package's values."""
    weights, spec = load(model.path, "gguf.LLaMA", prefix="blk.1")
    assert spec == SPEC
    name = "blk.1.attn_v.weight"  # its rows are in canonical order
    expected = gguf.quants.dequantize(
        gguf.quants.quantize(model.tensors[name], KINDS.Q8_0), KINDS.Q8_0
    )
    assert is_same(weights["v_proj.weight"], expected)


def test_inspect_names_quantized_types(model, capsys):
    """`inspect` names the quantized type of each tensor in its text and its JSON report."""
    report = model.folder / "r.json"
    assert main(["inspect", model.path, "--json", str(report)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "blk.{i}.attn_q.weight 64 x 64 Q4_0, read as float32 2" in out
    assert "blk.{i}.attn_v.weight 32 x 64 Q8_0, read as float32 2" in out
    tensors = json.loads(report.read_text())["tensors"]
    assert tensors["token_embd.weight"] == {"shape": [4, 64], "dtype": "float32"}
    assert tensors["blk.0.attn_k.weight"] == {
        "shape": [32, 64],
        "dtype": "float32",
        "quantized": "Q4_0",
    }


@pytest.mark.parametrize(("rest", "count"), [("keep", 9), ("drop", 8)])
def test_convert_warns_of_dequantization(model, capsys, rest, count):
    """`convert` writes quantized tensors as float32, warns, and lists them in its report."""
    target = model.folder / "b.safetensors"
    arguments = [
        "convert",
        model.path,
        str(target),
        *LAYERS,
        "--to",
        "transformers.LLaMA",
        "--to-prefix",
        TO_PREFIX,
    ]
    report = model.folder / "r.json"
    assert main([*arguments, "--rest", rest, "--json", str(report)]) == 0
    words = (
        "warning: quantized in the source, and written as the float32 values that they represent: "
    )
    assert words in capsys.readouterr().err
    assert len(json.loads(report.read_text())["dequantized"]) == count
    with open_tensors(target) as file:
        file.verify()
        assert {info.dtype for info in file.infos.values()} == {np.dtype(np.float32)}
        assert ("output.weight" in file.infos) == (rest == "keep")
    ours = [model.path, str(target), "--from", "gguf.LLaMA", "--from", "transformers.LLaMA"]
    assert main(["compare", *ours, "--prefix", PREFIX, "--prefix", TO_PREFIX]) == 0
    assert "2 the same, bit for bit" in capsys.readouterr().out


def test_convert_to_gguf_exits_with_2(model, capsys):
    """Converting to a GGUF file exits with 2 and writes nothing."""
    target = model.folder / "b.gguf"
    assert main(["convert", model.path, str(target), *LAYERS, "--to", "gguf.LLaMA"]) == 2
    assert "GGUF files are only read" in capsys.readouterr().err
    assert not target.exists()


@sample(where=lambda model, is_first: (model, is_first) in [(ROUNDED[0], True)])
@pytest.mark.parametrize(
    ("model", "is_first"),
    [(kind, index % 2 == 0) for index, kind in enumerate(ROUNDED)],
    indirect=["model"],
)
def test_verify_reports_quantized_weights(model, is_first, capsys):
    """`compare` of a quantized model and its origin fails at q and warns of quantization."""
    files = [(model.path, "gguf.LLaMA", PREFIX), (model.origin, "transformers.LLaMA", TO_PREFIX)]
    (one, one_layout, one_prefix), (other, other_layout, other_prefix) = (
        files if is_first else files[::-1]
    )
    arguments = [
        "compare",
        one,
        other,
        "--from",
        one_layout,
        "--from",
        other_layout,
        "--prefix",
        one_prefix,
    ]
    assert (
        main([*arguments, "--prefix", other_prefix, "--rope-theta", "500", "--num-heads", "4"]) == 1
    )
    printed = capsys.readouterr()
    assert f"{one} and {other} do NOT hold the same attention in all 2 layers" in printed.out
    assert "blk.0" in printed.out
    assert "differ first at q" in printed.out
    kinds = ", ".join(sorted({*model.kinds.values()}))
    assert (
        f"warning: {model.path} is quantized ({kinds}): its dequantized weights are compared\n"
        in printed.err
    )
    assert "Traceback" not in printed.err
