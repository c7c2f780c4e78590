"""Fused projections that fit several orders of heads: each is listed, and none is chosen."""

import json
from pathlib import Path

import pytest
import torch
from helpers.input_errors import rejects
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import mha_torch
from parity import load, load_into, random_weights
from parity.port.conversion.layouts import LAYOUTS, from_canonical, to_canonical
from parity.use.cli.main import main

SIZE, HEADS = 24, 4


class Packed(nn.Module):
    """Causal attention with one projection for q, k and v, in the order of its subclass."""

    names: tuple[str, str]

    def __init__(self, kv_heads=HEADS):
        super().__init__()
        torch.manual_seed(0)
        self.kv_heads = kv_heads
        rows = SIZE + 2 * kv_heads * SIZE // HEADS
        for name, size in zip(self.names, (rows, SIZE), strict=True):
            setattr(self, name, nn.Linear(SIZE, size))

    def forward(self, x):
        packed, out = (getattr(self, name) for name in self.names)
        q, k, v = (part.transpose(1, 2) for part in self.split(packed(x)))
        k, v = (heads.repeat_interleave(HEADS // self.kv_heads, dim=1) for heads in (k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return out(y.transpose(1, 2).flatten(2))


class NanoGPT(Packed):
    names = ("c_attn", "c_proj")

    def __init__(self, kv_heads=HEADS):
        super().__init__(kv_heads)
        self.register_buffer("bias", torch.tril(torch.ones(1, 1, 8, 8)))

    def split(self, packed):
        return (part.unflatten(-1, (HEADS, -1)) for part in packed.split(SIZE, dim=2))


class ByHead(Packed):
    names = ("qkv_proj", "o_proj")

    def split(self, packed):
        return packed.unflatten(-1, (HEADS, -1)).chunk(3, dim=-1)


class Chat(Packed):
    names = ("query_key_value", "dense")

    def split(self, packed):
        size = SIZE // HEADS
        sizes = [SIZE, self.kv_heads * size, self.kv_heads * size]
        return (part.unflatten(-1, (-1, size)) for part in packed.split(sizes, dim=-1))


MODULES = {
    "nanoGPT": (NanoGPT, HEADS),
    "qkv_proj.heads": (ByHead, HEADS),
    "query_key_value": (Chat, 2),
}


@pytest.mark.parametrize("name", MODULES)
def test_fused_module_matches_its_layout(name):
    """A module with a fused projection equals mha_torch after conversion in either direction."""
    make, kv_heads = MODULES[name]
    module, layout, x = make(kv_heads), LAYOUTS[name], torch.randn(2, 7, SIZE)
    weights, spec = to_canonical(
        module.state_dict(), layout, num_heads=HEADS, num_kv_heads=kv_heads
    )
    ours = load_into(mha_torch.MultiHeadAttention(spec), weights, spec)
    with torch.no_grad():
        torch.testing.assert_close(ours(x, mask=mha_torch.create_causal_mask(7))[0], module(x))
    back = {
        name: torch.from_numpy(tensor)
        for name, tensor in from_canonical(random_weights(spec), spec, layout).items()
    }
    module.load_state_dict({**dict(module.named_buffers()), **back})
    load_into(ours, random_weights(spec), spec)
    with torch.no_grad():
        torch.testing.assert_close(ours(x, mask=mha_torch.create_causal_mask(7))[0], module(x))


PREFIX = "model._orig_mod.transformer.h.{i}.attn"


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of a compiled model, as nanoGPT's training writes it."""
    tensors = {
        f"_orig_mod.transformer.h.0.attn.{name}": weight
        for name, weight in NanoGPT().state_dict().items()
    }
    torch.save({"model": tensors, "iter_num": 3}, tmp_path / "ckpt.pt")
    return tmp_path / "ckpt.pt"


def test_ambiguous_packing_is_reported(checkpoint, tmp_path, capsys):
    """`inspect` lists two packings of nanoGPT's file; convert and verify exit with 2 for it."""
    assert (
        main(["inspect", str(checkpoint), "--num-heads", "4", "--json", str(tmp_path / "i.json")])
        == 0
    )
    packings = {
        layer["layout"]: layer["packing"]
        for layer in json.loads((tmp_path / "i.json").read_text())["layers"]
    }
    assert packings.keys() == {"nanoGPT", "transformers.GPTBigCode"}
    assert len(set(packings.values())) == 2
    assert all(packings.values())
    for command in (
        ["convert", str(checkpoint), str(tmp_path / "x.npz"), "--to", "canonical"],
        ["compare"],
    ):
        words = command if len(command) > 1 else ["compare", str(checkpoint), str(checkpoint)]
        assert main([*words, "--num-heads", "4"]) == 2
        err = capsys.readouterr().err
        assert all(f"--from {name} with --prefix '{PREFIX}'" in err for name in packings)
        assert all(packing in err for packing in packings.values())
    assert not (tmp_path / "x.npz").exists()


def test_nanogpt_agrees_only_as_its_layout(checkpoint, tmp_path, capsys, monkeypatch):
    """`diagnose` accepts nanoGPT's module with its own layout, but not with GPTBigCode's."""
    (tmp_path / "nano_port.py").write_text(
        f"import torch\nfrom {__name__} import NanoGPT\n\n\nmodule = NanoGPT()\n\n\n"
        "def attention(x):\n    with torch.no_grad():\n        return module(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent)  # where its import finds this file
    arguments = [
        "--weights",
        str(checkpoint),
        "--num-heads",
        "4",
        "--prefix",
        PREFIX.replace("{i}", "0"),
    ]
    assert main(["diagnose", "nano_port:attention", *arguments, "--from", "nanoGPT"]) == 0, (
        capsys.readouterr()
    )
    assert (
        main(["diagnose", "nano_port:attention", *arguments, "--from", "transformers.GPTBigCode"])
        == 1
    )


@pytest.mark.parametrize(
    "names", [("qkv_proj", "out_proj"), ("qkv_proj", "o_proj"), ("query_key_value", "dense")]
)
def test_fused_names_list_both_packings(names, tmp_path):
    """`inspect` lists packings by group and by projection for each name; `load` raises an error."""
    torch.save(
        {
            f"h.0.{names[0]}.weight": torch.randn(3 * SIZE, SIZE),
            f"h.0.{names[1]}.weight": torch.randn(SIZE, SIZE),
        },
        tmp_path / "w.pt",
    )
    assert (
        main(
            [
                "inspect",
                str(tmp_path / "w.pt"),
                "--num-heads",
                "4",
                "--json",
                str(tmp_path / "i.json"),
            ]
        )
        == 0
    )
    packings = {
        layer["packing"] for layer in json.loads((tmp_path / "i.json").read_text())["layers"]
    }
    assert any("group" in packing for packing in packings)
    assert any("all q" in packing for packing in packings)
    with rejects("layout"):
        load(tmp_path / "w.pt", prefix="h.0", num_heads=4)
