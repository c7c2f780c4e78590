"""Layouts from outside: features of tables, compared byte for byte with NumPy; bad tables; layouts
of packages; and the tables that are proposed for unknown files.
"""

import sys
import tomllib

import numpy as np
import pytest
from helpers.input_errors import rejects

import parity
from mha_spec import Gate, InputError, InputTypeError, Norm, Rope
from parity import AttentionSpec, random_weights, register_layout
from parity.measure.core.weights import load_tensors, save_tensors
from parity.port.conversion.layouts import LAYOUTS, Layout, Tensor, find_layout, register_packages
from parity.port.conversion.layouts.custom import check_layout
from parity.port.conversion.layouts.propose import propose_table
from parity.port.conversion.layouts.registry import BUILT_IN, load_entry_points

N, K, H, D = 4, 2, 6, 10  # query heads, key/value heads, features of a head, inputs
GROUPED = AttentionSpec(D, N, num_kv_heads=K, head_dim=H)
PLAIN = AttentionSpec(D, N, head_dim=H)

pytestmark = pytest.mark.usefixtures("own_registrations")


def by_heads(weights, name, spec=GROUPED):
    """A projection's weight as (heads, features, inputs), or its bias as (heads, features)."""
    x = weights[name]
    return x.reshape(-1, spec.head_dim, *x.shape[1:])


def vkq_of_groups(w):
    """For each group its value, its key and its queries, (in, out)."""
    q, k, v = (by_heads(w, f"{name}_proj.weight") for name in "qkv")
    heads = [np.concatenate([v[g : g + 1], k[g : g + 1], q[2 * g : 2 * g + 2]]) for g in range(K)]
    return {"mix": np.concatenate(heads).reshape(-1, D).T, "back": w["out_proj.weight"].T}


def separate(w):
    """Four matrices (out, in) with biases under other names."""
    names = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "out_proj"}
    theirs = {own: w[f"{name}.weight"] for own, name in names.items()}
    return theirs | {f"{own}_bias": w[f"{name}.bias"] for own, name in names.items()}


def fused_with_biases(w):
    """All queries, then all keys, then all values, with biases likewise."""
    of_all = {kind: [w[f"{name}_proj.{kind}"] for name in "qkv"] for kind in ("weight", "bias")}
    return {
        "qkv.weight": np.concatenate(of_all["weight"]),
        "qkv.bias": np.concatenate(of_all["bias"]),
        "o.weight": w["out_proj.weight"],
        "o.bias": w["out_proj.bias"],
    }


def with_axis_of_heads(w):
    """Kernels (in, heads, features) and (heads, features, out), and keys with values."""
    q, k, v = (by_heads(w, f"{name}_proj.weight") for name in "qkv")
    return {
        "q": q.transpose(2, 0, 1),
        "kv": np.concatenate([k, v]).transpose(2, 0, 1),
        "o": w["out_proj.weight"].T.reshape(N, H, D),
    }


def with_axis_of_projections(w):
    """One tensor (3, heads, inputs, features)."""
    heads = [by_heads(w, f"{name}_proj.weight") for name in "qkv"]
    return {"qkv": np.stack(heads).transpose(0, 1, 3, 2), "o": w["out_proj.weight"]}


def with_projections_innermost(w):
    """Rows q, k, v of one feature, then of the next one."""
    heads = [by_heads(w, f"{name}_proj.weight") for name in "qkv"]
    return {"qkv": np.stack(heads, axis=2).reshape(-1, D), "o": w["out_proj.weight"]}


def with_heads_innermost(w):
    """Rows of one feature in all heads, then of the next one."""
    rows = {
        name: by_heads(w, f"{name}_proj.weight").swapaxes(0, 1).reshape(-1, D) for name in "qkv"
    }
    out = w["out_proj.weight"].reshape(D, N, H).swapaxes(1, 2).reshape(D, -1)
    return {**rows, "o": out}


def of_each_head(w):
    """A tensor of each head, (in, out), without an output projection."""
    heads = {name: by_heads(w, f"{name}_proj.weight") for name in "qkv"}
    return {f"heads.{n}.{name}": x[n].T for name, x in heads.items() for n in range(N)}


def in_two_blocks(w):
    """Two blocks, each with half of the keys, of the queries and of the values."""
    halves = [np.split(w[f"{name}_proj.weight"], 2) for name in "kqv"]
    rows = np.concatenate([half[block] for block in range(2) for half in halves])
    return {"kqv": rows, "o": w["out_proj.weight"]}


def interleaved(w):
    """RoPE pairs (2 i, 2 i + 1) instead of (i, i + H/2)."""
    theirs = {"v": w["v_proj.weight"], "o": w["out_proj.weight"]}
    for name in "qk":
        halves = w[f"{name}_proj.weight"].reshape(-1, 2, H // 2, D)
        theirs[name] = halves.swapaxes(1, 2).reshape(-1, D)
    return theirs


def interleaved_heads(w):
    """A tensor of each head, (out, in), with RoPE pairs (2 i, 2 i + 1) in queries and keys."""
    rows = interleaved(w)
    heads = {name: rows[name].reshape(-1, H, D) for name in "qkv"}
    tensors = {f"{n}.{name}": x for name, of_all in heads.items() for n, x in enumerate(of_all)}
    return {**tensors, "o": rows["o"]}


def padded_heads(w):
    """A tensor of each head whose halves are padded to 32 features, with its bias."""
    tensors = {}
    for name in "qkv":
        for suffix, kind in {"": "weight", "_bias": "bias"}.items():
            for n, x in enumerate(by_heads(w, f"{name}_proj.{kind}", ROTATED)):
                halves = np.zeros((2, 32, *x.shape[1:]), x.dtype)
                halves[:, : H // 2] = x.reshape(2, H // 2, *x.shape[1:])
                tensors[f"{n}.{name}{suffix}"] = halves.reshape(64, *x.shape[1:])
    return tensors


def with_norms_and_gate(w):
    """The queries of a head, then its gate; norms have other names."""
    rows = np.stack([by_heads(w, f"{name}.weight") for name in ("q_proj", "gate_proj")], axis=1)
    return {
        "qg": rows.reshape(-1, D),
        "k": w["k_proj.weight"],
        "v": w["v_proj.weight"],
        "o": w["out_proj.weight"],
        "ln_q": w["q_norm.weight"],
        "ln_k": w["k_norm.weight"],
    }


FOUR = {name: {"holds": name, "axes": "(n h) d"} for name in "qkv"}
OUT = {"holds": "out", "axes": "e (n h)"}
NO_BIASES = {"qkv_bias": False, "out_bias": False}
ROTATED = PLAIN.replace(rope=Rope(), out_proj=False, out_bias=False)
NORMED = GROUPED.replace(**NO_BIASES, qk_norm=Norm(), gate=Gate())

FEATURES = {
    "v, k, q of each group, transposed": (
        vkq_of_groups,
        GROUPED.replace(**NO_BIASES),
        {
            "grouped": True,
            "tensors": {
                "mix": {"holds": "vkq", "axes": "d (n h)"},
                "back": {"holds": "out", "axes": "(n h) e"},
            },
        },
    ),
    "names and biases": (
        separate,
        GROUPED,
        {
            "tensors": {
                **{f"w{name}": {"holds": name, "axes": "(n h) d"} for name in "qkv"},
                **{f"w{name}_bias": {"holds": name, "axes": "(n h)"} for name in "qkv"},
                "wo": OUT,
                "wo_bias": {"holds": "out", "axes": "e"},
            }
        },
    ),
    "fused with biases": (
        fused_with_biases,
        GROUPED,
        {
            "tensors": {
                "qkv.weight": {"holds": "qkv", "axes": "(n h) d"},
                "qkv.bias": {"holds": "qkv", "axes": "(n h)"},
                "o.weight": OUT,
                "o.bias": {"holds": "out", "axes": "e"},
            }
        },
    ),
    "axis of heads": (
        with_axis_of_heads,
        GROUPED.replace(**NO_BIASES),
        {
            "tensors": {
                "q": {"holds": "q", "axes": "d n h"},
                "kv": {"holds": "kv", "axes": "d n h"},
                "o": {"holds": "out", "axes": "n h e"},
            }
        },
    ),
    "axis of projections": (
        with_axis_of_projections,
        PLAIN.replace(**NO_BIASES),
        {"tensors": {"qkv": {"holds": "qkv", "axes": "p n d h"}, "o": OUT}},
    ),
    "projections innermost": (
        with_projections_innermost,
        PLAIN.replace(**NO_BIASES),
        {"tensors": {"qkv": {"holds": "qkv", "axes": "(n h p) d"}, "o": OUT}},
    ),
    "heads innermost": (
        with_heads_innermost,
        GROUPED.replace(**NO_BIASES),
        {
            "tensors": {
                **{name: {"holds": name, "axes": "(h n) d"} for name in "qkv"},
                "o": {"holds": "out", "axes": "e (h n)"},
            }
        },
    ),
    "a tensor of each head": (
        of_each_head,
        PLAIN.replace(qkv_bias=False, out_bias=False, out_proj=False),
        {"tensors": {f"heads.{{n}}.{name}": {"holds": name, "axes": "d h"} for name in "qkv"}},
    ),
    "blocks": (
        in_two_blocks,
        GROUPED.replace(**NO_BIASES),
        {"blocks": 2, "tensors": {"kqv": {"holds": "kqv", "axes": "(n h) d"}, "o": OUT}},
    ),
    "interleaved RoPE pairs": (
        interleaved,
        GROUPED.replace(**NO_BIASES),
        {"rope": "interleaved", "tensors": {**FOUR, "o": OUT}},
    ),
    "interleaved RoPE pairs of each head": (
        interleaved_heads,
        PLAIN.replace(**NO_BIASES),
        {
            "rope": "interleaved",
            "tensors": {
                **{f"{{n}}.{name}": {"holds": name, "axes": "h d"} for name in "qkv"},
                "o": OUT,
            },
        },
    ),
    "padded halves of each head": (
        padded_heads,
        ROTATED,
        {
            "padded": True,
            "carries": ["rope"],
            "tensors": {
                **{f"{{n}}.{name}": {"holds": name, "axes": "h d"} for name in "qkv"},
                **{f"{{n}}.{name}_bias": {"holds": name, "axes": "h"} for name in "qkv"},
            },
        },
    ),
    "norms and a gate": (
        with_norms_and_gate,
        NORMED,
        {
            "grouped": True,
            "tensors": {
                "qg": {"holds": "qg", "axes": "(n h) d"},
                "k": FOUR["k"],
                "v": FOUR["v"],
                "o": OUT,
                "ln_q": {"holds": "q_norm.weight"},
                "ln_k": {"holds": "k_norm.weight"},
            },
        },
    ),
}
"""Features of tables: the tensors by NumPy, a layer, and the table."""


def bytes_of(tensors):
    """Shapes and bytes by name, in any order."""
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in tensors.items()}


@pytest.mark.parametrize("feature", FEATURES)
def test_table_equals_numpy_by_hand(feature):
    """Conversions to and from a table's layout are those by NumPy, byte for byte."""
    by_hand, spec, table = FEATURES[feature]
    register_layout({"name": "own", **table})
    weights = random_weights(spec)
    expected = by_hand(weights)
    laid_out = parity.convert(weights, source="canonical", target="own", spec=spec)
    assert bytes_of(laid_out) == bytes_of(expected)
    back = parity.convert(expected, source="own", target="canonical", spec=spec)
    assert bytes_of(back) == bytes_of(weights)


NEED_SPEC = ("norms and a gate", "padded halves of each head")


@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in NEED_SPEC])
def test_table_needs_only_heads(feature):
    """Without a specification, the numbers of heads determine the layer."""
    by_hand, spec, table = FEATURES[feature]
    register_layout({"name": "own", **table})
    weights = random_weights(spec)
    heads = {"num_heads": N, "num_kv_heads": spec.num_kv_heads, "head_dim": H}
    back = parity.convert(by_hand(weights), source="own", target="canonical", **heads)
    assert bytes_of(back) == bytes_of(weights)


def test_shared_values_are_stored_once():
    """Values that are made like keys are one tensor in a table with `shared`."""
    tensors = {
        "q": FOUR["q"],
        "k": {"holds": "kv", "axes": "(n h) d", "shared": True},
        "o": OUT,
    }
    register_layout({"name": "own", "tensors": tensors})
    weights = random_weights(GROUPED.replace(**NO_BIASES))
    weights["v_proj.weight"] = weights["k_proj.weight"].copy()
    spec = GROUPED.replace(**NO_BIASES)
    laid_out = parity.convert(weights, source="canonical", target="own", spec=spec)
    assert sorted(laid_out) == ["k", "o", "q"]
    back = parity.convert(laid_out, source="own", target="canonical", spec=spec)
    assert bytes_of(back) == bytes_of(weights)


def test_unequal_values_are_not_shared(tmp_path):
    """Keys and values that differ are not written as one tensor, by function or by file."""
    tensors = {"q": FOUR["q"], "kv": {**FOUR["k"], "holds": "kv", "shared": True}, "o": OUT}
    register_layout({"name": "own", "tensors": tensors})
    spec = GROUPED.replace(**NO_BIASES)
    weights = random_weights(spec)
    with pytest.raises(InputError, match="as kv, got keys and values that differ"):
        parity.convert(weights, source="canonical", target="own", spec=spec)
    parity.save(tmp_path / "a.safetensors", weights, spec, prefix="l.0")
    with pytest.raises(InputError, match=r"l.0: .*as kv, got keys and values that differ"):
        parity.convert_file(tmp_path / "a.safetensors", tmp_path / "b.safetensors", target="own")
    assert not (tmp_path / "b.safetensors").exists()


# ---- Files ---------------------------------------------------------------------------------------

NEBULA = """
name = "nebula"
prefix = "blk.{i}"
grouped = true
ignored = ["norm", "mlp.*"]

[tensors]
mix = { holds = "vkq", axes = "d (n h)" }
back = { holds = "out", axes = "(n h) e" }
"""
HEADS = {"num_heads": N, "num_kv_heads": K, "head_dim": H}


def nebula_file(path, *, is_stacked=False):
    """Write a file of two layers in the layout nebula; return the tensors by name."""
    layers = [vkq_of_groups(random_weights(GROUPED, seed=i)) for i in range(2)]
    if is_stacked:
        tensors = {f"blk.{name}": np.stack([x[name] for x in layers]) for name in layers[0]}
    else:
        tensors = {
            f"blk.{i}.{name}": x for i, layer in enumerate(layers) for name, x in layer.items()
        }
        tensors["blk.0.norm"] = np.ones(D, np.float32)
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_tensors(path, tensors, {})
    return tensors


def test_own_prefix_is_used_both_ways(tmp_path):
    """A file with names of the table's prefix converts without a prefix, and back to equal
    bytes.
    """
    (tmp_path / "nebula.toml").write_text(NEBULA)
    register_layout(tmp_path / "nebula.toml")
    tensors = nebula_file(tmp_path / "a.safetensors")
    converted = parity.convert_file(
        tmp_path / "a.safetensors",
        tmp_path / "b.safetensors",
        source="nebula",
        target="transformers.LLaMA",
        to_prefix="model.layers.{i}.self_attn",
        **HEADS,
    )
    assert converted.layers == ["blk.0", "blk.1"]
    llama, _ = load_tensors(tmp_path / "b.safetensors")
    first = random_weights(GROUPED, seed=0)
    assert bytes_of({"": llama["model.layers.0.self_attn.o_proj.weight"]}) == bytes_of(
        {"": first["out_proj.weight"]}
    )
    parity.convert_file(tmp_path / "b.safetensors", tmp_path / "c.safetensors", target="nebula")
    back, metadata = load_tensors(tmp_path / "c.safetensors")
    del tensors["blk.0.norm"]
    assert bytes_of({name: back[name] for name in tensors}) == bytes_of(tensors)
    assert metadata["prefix"] == "blk.{i}"


def test_stack_becomes_numbered_layers(tmp_path):
    """A stack of layers under a prefix without a number converts to numbered layers and back."""
    tensors = nebula_file(tmp_path / "a.safetensors", is_stacked=True)
    (tmp_path / "nebula.toml").write_text(NEBULA.replace("blk.{i}", "blk"))
    register_layout(tmp_path / "nebula.toml")
    parity.convert_file(
        tmp_path / "a.safetensors",
        tmp_path / "b.safetensors",
        source="nebula",
        target="canonical",
        to_prefix="layers.{i}",
        **HEADS,
    )
    canonical, _ = load_tensors(tmp_path / "b.safetensors")
    for i in range(2):
        weight = random_weights(GROUPED, seed=i)["k_proj.weight"]
        assert np.array_equal(canonical[f"layers.{i}.k_proj.weight"], weight)
    parity.convert_file(tmp_path / "b.safetensors", tmp_path / "c.safetensors", target="nebula")
    assert bytes_of(load_tensors(tmp_path / "c.safetensors")[0]) == bytes_of(tensors)


def test_layers_stack_on_second_axis(tmp_path):
    """With `stack_axis`, layers are stacked on that axis, and the file converts back."""
    table = NEBULA.replace("blk.{i}", "blk").replace("[tensors]", "stack_axis = 1\n[tensors]")
    (tmp_path / "nebula.toml").write_text(table)
    register_layout(tmp_path / "nebula.toml")
    stacked = nebula_file(tmp_path / "a.safetensors", is_stacked=True)
    tensors = {
        f"layers.{i}.{name}": x
        for i in range(2)
        for name, x in random_weights(GROUPED, seed=i).items()
        if name.endswith(".weight")
    }
    save_tensors(tmp_path / "b.safetensors", tensors, {})
    paths = tmp_path / "b.safetensors", tmp_path / "c.safetensors"
    options = {"source": "canonical", "target": "nebula", "prefix": "layers.{i}", **HEADS}
    parity.convert_file(*paths, **options)
    written, _ = load_tensors(tmp_path / "c.safetensors")
    assert bytes_of(written) == bytes_of({k: np.moveaxis(x, 0, 1) for k, x in stacked.items()})
    back = {"target": "canonical", "to_prefix": "layers.{i}"}
    parity.convert_file(tmp_path / "c.safetensors", tmp_path / "d.safetensors", **back)
    assert bytes_of(load_tensors(tmp_path / "d.safetensors")[0]) == bytes_of(tensors)


def test_own_stack_has_a_known_axis(tmp_path, rng):
    """A stack that mha-parity wrote is read on the axis of its table, even if both axes fit."""
    register_layout(changed(stack_axis=1))
    shape = (8, 8)
    numbered = {
        f"l.{i}.{name}": rng.standard_normal(shape, "float32") for i in range(8) for name in "qkvo"
    }
    save_tensors(tmp_path / "a.safetensors", numbered, {})
    options = {"source": "own", "target": "own", "prefix": "l.{i}", "num_heads": 2}
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    parity.convert_file(*paths, to_prefix="b", **options)
    parity.convert_file(paths[1], tmp_path / "c.safetensors", target="own", to_prefix="l.{i}")
    assert bytes_of(load_tensors(tmp_path / "c.safetensors")[0]) == bytes_of(numbered)


@pytest.mark.parametrize("size", [3, 8])
def test_foreign_stack_on_second_axis(tmp_path, rng, size):
    """A stack on the axis of the table is read by shapes; one that may be on either raises."""
    register_layout(changed(stack_axis=1, prefix="b"))
    stacked = {f"b.{name}": rng.standard_normal((8, size, 8), "float32") for name in "qkvo"}
    save_tensors(tmp_path / "a.safetensors", stacked, {})
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    options = {"source": "own", "target": "canonical", "to_prefix": "l.{i}", "num_heads": 2}
    if size == 8:
        with rejects("the axis of a stack"):
            parity.convert_file(*paths, **options)
        return
    parity.convert_file(*paths, **options)
    numbered, _ = load_tensors(paths[1])
    assert len(numbered) == 4 * size
    for i in range(size):
        assert np.array_equal(numbered[f"l.{i}.k_proj.weight"], stacked["b.k"][:, i])


@pytest.mark.parametrize(
    "changes",
    [
        {"rope": "interleaved"},
        {"padded": True},
        {"tensors": {**FOUR, "k": FOUR["v"], "v": FOUR["k"], "o": OUT}},
    ],
    ids=["rope", "padded", "tensors"],
)
def test_edited_table_reads_no_older_file(tmp_path, changes):
    """A file of a table is not read by a different one of that name, but by an equal one."""
    spec = PLAIN.replace(**NO_BIASES)
    weights = random_weights(spec)
    register_layout(changed())
    parity.save(tmp_path / "a.safetensors", weights, spec, "own", prefix="l.0")
    register_layout(changed(**changes))
    with rejects("the table of own"):
        parity.load(tmp_path / "a.safetensors")
    with rejects("the table of own"):
        parity.load(tmp_path / "a.safetensors", "own", prefix="l.0", num_heads=N)
    in_other_order = dict(reversed(GOOD["tensors"].items()))
    register_layout(changed(about="reworded", ignored=["x"], tensors=in_other_order))
    loaded, _ = parity.load(tmp_path / "a.safetensors")
    assert bytes_of(loaded) == bytes_of(weights)


def test_built_in_layouts_have_no_digest(tmp_path):
    """The metadata of a file in a layout of this package have no digest, also from a table's."""
    spec = PLAIN.replace(**NO_BIASES)
    register_layout(GOOD)
    parity.save(tmp_path / "a.safetensors", random_weights(spec), spec, "own", prefix="l.0")
    parity.convert_file(tmp_path / "a.safetensors", tmp_path / "b.safetensors", target="mha_jax")
    assert "layout_digest" in load_tensors(tmp_path / "a.safetensors")[1]
    assert "layout_digest" not in load_tensors(tmp_path / "b.safetensors")[1]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("sinks", "sinks"),
        ("q_norm.weight", "q_norm.*"),
        ("q_proj.bias", "*.bias"),
        ("x_proj.weight", "*_proj.weight"),
    ],
)
def test_kept_tensor_stays_ignored(tmp_path, name, pattern):
    """An ignored tensor is kept only if the layer can be read again; `keep_rest` decides."""
    spec = PLAIN.replace(**NO_BIASES)
    weights = random_weights(spec)
    register_layout(changed(prefix="l.{i}", ignored=[pattern]))
    laid_out = parity.convert(weights, source="canonical", target="own", spec=spec)
    tensors = {f"l.0.{own_name}": x for own_name, x in laid_out.items()}
    tensors[f"l.0.{name}"] = np.ones(N, np.float32)
    save_tensors(tmp_path / "a.safetensors", tensors, {})
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    options = {"source": "own", "target": "canonical", "num_heads": N}
    if pattern in ("sinks", "*_proj.weight"):
        with rejects(f"l.0.{name}", remedy={"keep_rest": False}):
            parity.convert_file(*paths, **options)
        options["keep_rest"] = False
    parity.convert_file(*paths, **options)
    again, _ = parity.load(paths[1])
    assert bytes_of(again) == bytes_of(weights)


def test_file_cannot_name_a_table_to_read(tmp_path, monkeypatch):
    """A file whose metadata have the path of a table as its layout does not have it read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nebula.toml").write_text(NEBULA)
    tensors = nebula_file(tmp_path / "a.safetensors")
    metadata = {"mha_parity": "mha-parity-1", "layout": "nebula.toml", "prefix": "blk.{i}"}
    save_tensors("b.safetensors", tensors, metadata)
    with pytest.raises(InputError):
        parity.load("b.safetensors", prefix="blk.0", **HEADS)
    assert "nebula" not in LAYOUTS


# ---- Errors --------------------------------------------------------------------------------------

GOOD = {"name": "own", "tensors": {**FOUR, "o": OUT}}


def changed(**changes):
    """A good table with other values."""
    return {**GOOD, **changes}


def with_tensor(name="q", **changes):
    """A good table with one more entry of a tensor."""
    entry = {**GOOD["tensors"].get(name, {}), **changes}
    return changed(tensors={**GOOD["tensors"], name: entry})


BAD = {
    "name missing": ({"tensors": GOOD["tensors"]}, "name", "present"),
    "tensors missing": ({"name": "own"}, "tensors", "present"),
    "unknown key": (changed(rop="half"), "rop", "did you mean rope"),
    "name of two words": (changed(name="my own"), "name", "letters"),
    "name like a file": (changed(name="own.toml"), "name", ".toml"),
    "name like a file in capitals": (changed(name="own.TOML"), "name", ".toml"),
    "prefix of one layer": (changed(prefix="a[0]"), "prefix", "one layer of a stack"),
    "name of a terminal": (changed(name="\x1b[2J"), "name", "letters"),
    "name that is taken": (changed(name="flax.nnx"), "name", "no other layout"),
    "name of an alias": (changed(name="mha_torch"), "name", "no other layout"),
    "about of a terminal": (changed(about="\x1b[2J"), "about", "printed"),
    "grouped as text": (changed(grouped="yes"), "grouped", "true or false"),
    "blocks as bool": (changed(blocks=True), "blocks", "integer"),
    "blocks of 3": (changed(blocks=3), "blocks", "1, 2, 4, 8"),
    "blocks and groups": (changed(blocks=2, grouped=True), "blocks", "grouped"),
    "stack axis": (changed(stack_axis=2), "stack_axis", "0, 1"),
    "rope": (changed(rope="halves"), "rope", "half, interleaved"),
    "rules": (changed(rules=["evn"]), "rules", "even"),
    "rules as text": (changed(rules="even"), "rules", "a list"),
    "rules of numbers": (changed(rules=[1]), "rules", "texts"),
    "carries": (changed(carries=["ropes"]), "carries", "rope"),
    "ignored of a terminal": (changed(ignored=["\x1b"]), "ignored", "printed"),
    "prefix with a dot": (changed(prefix="blk.{i}."), "prefix", "dot"),
    "prefix with braces": (changed(prefix="blk.{0}"), "prefix", "{i}"),
    "tensors as a list": (changed(tensors=[]), "tensors", "a table"),
    "tensor as text": (changed(tensors={"q": "q"}), 'tensors."q"', "a table"),
    "no axes": (changed(tensors={"q": {"holds": "q"}}), 'tensors."q".axes', "present"),
    "no content": (changed(tensors={"q": {"axes": "d h"}}), 'tensors."q".holds', "present"),
    "unknown content": (with_tensor(holds="qx"), 'tensors."q".holds', "qkvg"),
    "repeated content": (with_tensor(holds="qq"), 'tensors."q".holds', "qkvg"),
    "key of a tensor": (with_tensor(axis="d"), 'tensors."q".axis', "holds, axes, shared"),
    "unknown axis": (with_tensor(axes="(n x) d"), 'tensors."q".axes', "n, h and d"),
    "missing axis": (with_tensor(axes="n d"), 'tensors."q".axes', "n, h and d"),
    "repeated axis": (with_tensor(axes="n n h d"), 'tensors."q".axes', "each once"),
    "axis within another": (with_tensor(axes="(n h d)"), 'tensors."q".axes', "of their own"),
    "nested axes": (with_tensor(axes="((n h)) d"), 'tensors."q".axes', "(n h)"),
    "axes of an output": (with_tensor("o", axes="d (n h)"), 'tensors."o".axes', "e, n and h"),
    "p of one projection": (with_tensor(axes="p n h d"), 'tensors."q".axes', "several"),
    "p of groups": (
        changed(grouped=True, tensors={"x": {"holds": "qkv", "axes": "p n h d"}, "o": OUT}),
        'tensors."x".axes',
        "grouped",
    ),
    "layer in a name": (with_tensor("q{i}", **FOUR["q"]), 'tensors."q{i}"', "key prefix"),
    "attribute of a number": (
        changed(tensors={"{n}{n.real}": {"holds": "q", "axes": "h d"}}),
        'tensors."{n}{n.real}"',
        "at most once",
    ),
    "name that hides": (with_tensor("\u202e", **FOUR["q"]), 'tensors."\\u202e"', "printed"),
    "several for each head": (
        changed(tensors={"{n}.kv": {"holds": "kv", "axes": "h d"}}),
        'tensors."{n}.kv".holds',
        "one of q, k, v and g",
    ),
    "output of each head": (
        changed(tensors={"{n}.o": {"holds": "out", "axes": "e h"}}),
        'tensors."{n}.o".holds',
        "one of q, k, v and g",
    ),
    "axes of a norm": (
        with_tensor("n", holds="q_norm.weight", axes="n"),
        'tensors."n".axes',
        "d e",
    ),
    "axes of a norm of each head": (
        with_tensor("n.{n}", holds="q_norm.weight", axes="d e"),
        'tensors."n.{n}".axes',
        "...",
    ),
    "shared queries": (
        changed(tensors={"x": {"holds": "qkv", "axes": "(n h) d", "shared": True}, "o": OUT}),
        'tensors."x".shared',
        "kv or vk",
    ),
    "no values": (changed(tensors={"q": FOUR["q"], "k": FOUR["k"]}), "tensors", "v_proj.weight"),
    "queries twice": (with_tensor("q2", **FOUR["q"]), "tensors", "q_proj.weight is in q and q2"),
    "bias of no weight": (
        changed(tensors={**FOUR, "o": {"holds": "out", "axes": "e"}}),
        "tensors",
        "out_proj.weight",
    ),
}
"""Bad tables: the key that the message names, and a word about allowed values."""


def test_bad_table_names_key_and_rule(subtests):
    """A bad table raises one line with its key and what is allowed, and registers nothing."""
    for name, (table, key, allowed) in BAD.items():
        with subtests.test(name):
            with pytest.raises(InputError) as input_error:
                register_layout(table)
            error = input_error.value
            assert error.argument.encode("unicode_escape").decode() == f"the key {key}"
            assert allowed in f"{error.rule}; {error.hint}"
            assert str(error).isprintable()
            assert error.where
            assert "own" not in LAYOUTS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = ", "TOML"),
        ("x = " + "[" * 5000, "TOML"),
        ("x = " + "9" * 5000, "TOML"),
        ("name = 'a'\nname = 'b'", "TOML"),
        ("\udcff", "UTF-8"),
        ("name = 'own'\n[tensors]\nq = 3", 'tensors."q"'),
    ],
)
def test_bad_file_is_named(tmp_path, text, words):
    """An error about the file of a table begins with its path."""
    path = tmp_path / "bad.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError) as input_error:
        register_layout(path)
    assert str(input_error.value).startswith(str(path))
    assert words in str(input_error.value)


def test_layout_of_code_is_checked_too():
    """A `Layout` from Python with an unknown rule raises; every layout of this package passes."""
    form = tuple(Tensor(name, name, "weight", "(n h) d") for name in "qkv")
    with rejects("the key rules"):
        register_layout(Layout("own", "", "", (form,), rules=("evn",)))
    assert register_layout(Layout("own", "", "", (form,))) is find_layout("own")
    for layout in LAYOUTS.values():
        check_layout(layout)


def test_table_can_be_registered_again():
    """A changed table replaces the one before of its name; one of this package stays."""
    register_layout(GOOD)
    assert register_layout(changed(rope="interleaved")) is LAYOUTS["own"]
    assert LAYOUTS["own"].rope == "interleaved"
    assert "own" not in BUILT_IN


def test_unfit_layer_is_rejected_by_rule():
    """A layer that the tensors cannot hold is rejected with the rule that follows from them."""
    register_layout({"name": "own", **FEATURES["axis of projections"][2]})
    with rejects("the layer", num_kv_heads=K, num_heads=N):
        parity.convert(random_weights(GROUPED), source="canonical", target="own", spec=GROUPED)


@pytest.mark.parametrize(
    "source",
    [
        None,
        3,
        b"own.toml",
        [GOOD],
        {**GOOD, 1: 2},
        changed(tensors={**FOUR, 1: OUT}),
        changed() | {None: 1},
        changed(tensors={**FOUR, "o": {**OUT, 2: 3}}),
    ],
    ids=["none", "number", "bytes", "list", "key", "tensor", "null key", "key of a tensor"],
)
def test_sources_of_wrong_type_raise(source):
    """Anything but a layout, a table with text as keys, or a path is one error of type."""
    with pytest.raises(InputTypeError):
        register_layout(source)
    assert "own" not in LAYOUTS


# ---- Packages ------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return a function that installs a package, of a module's code and its entry points."""

    def install(code, **entry_points):
        info = tmp_path / "site" / "nebula-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nebula\nVersion: 1.0\n")
        lines = ["[mha_parity.layouts]", *(f"{k} = {v}" for k, v in entry_points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        (tmp_path / "site" / "nebula_weights.py").write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        monkeypatch.delitem(sys.modules, "nebula_weights", raising=False)
        load_entry_points.cache_clear()

    yield install
    sys.modules.pop("nebula_weights", None)
    load_entry_points.cache_clear()


TABLE_CODE = f"TABLE = {GOOD!r}\nTABLES = [TABLE, {{**TABLE, 'name': 'other'}}]\n"


def test_package_is_loaded_for_unknown_name(package):
    """A known name loads no package; an unknown one loads its layouts, a table or a list."""
    package(TABLE_CODE, one="nebula_weights:TABLES")
    find_layout("flax.nnx")
    assert "nebula_weights" not in sys.modules
    assert find_layout("other").name == "other"
    assert find_layout("own").forms == LAYOUTS["other"].forms
    assert register_packages() == []


def test_broken_package_only_warns(package):
    """An entry point that fails or has a taken name is named in a warning, and others are
    loaded.
    """
    code = TABLE_CODE + "TAKEN = {**TABLE, 'name': 'flax.nnx'}\n"
    package(
        code,
        bad="nebula_weights:NONE",
        taken="nebula_weights:TAKEN",
        good="nebula_weights:TABLE",
    )
    flax = LAYOUTS["flax.nnx"]
    with pytest.warns(UserWarning, match="layouts of a package are left out") as caught:
        assert [layout.name for layout in register_packages()] == ["own"]
    assert {str(warning.message).partition(" = ")[0].rpartition(" ")[2] for warning in caught} == {
        "bad",
        "taken",
    }
    assert LAYOUTS["flax.nnx"] is flax


ENDS = """
import sys

class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class Ending(BaseException):
    def __str__(self):
        sys.exit(0)

def raising(error):
    yield {**TABLE, "name": "first"}
    raise error

EXITS, SILENT, ENDING = raising(SystemExit(0)), raising(Silent()), raising(Ending())
"""


@pytest.mark.parametrize(
    ("value", "words"), [("EXITS", "SystemExit 0"), ("SILENT", "Silent"), ("ENDING", "Ending")]
)
def test_package_that_ends_only_warns(package, value, words):
    """An entry point that ends the program, or whose error has no text, is left out as a whole."""
    package(TABLE_CODE + ENDS, bad=f"nebula_weights:{value}", good="nebula_weights:TABLE")
    with pytest.warns(UserWarning, match=f"left out: bad = nebula_weights:{value}: {words}$"):
        assert [layout.name for layout in register_packages()] == ["own"]


def test_package_cannot_hide_interrupts(package):
    """An interrupt by the user while a package is imported ends the command."""
    package("raise KeyboardInterrupt", bad="nebula_weights:TABLE")
    with pytest.raises(KeyboardInterrupt):
        register_packages()


@pytest.mark.parametrize(
    ("text", "rule"), [("a." * 2000 + "b = 1", "1000 dots"), ("#" * 70_000, "65536 bytes")]
)
def test_costly_toml_is_not_parsed(tmp_path, monkeypatch, text, rule):
    """A file whose parsing could take hours is rejected before: a long one, or one of many dots."""
    monkeypatch.setattr("tomllib.loads", None)
    path = tmp_path / "own.toml"
    path.write_text(f"# a table\n{text}\n")
    with pytest.raises(InputError, match=rule):
        register_layout(path)


def test_wrong_prefix_of_a_table_is_named(tmp_path, rng):
    """A table's prefix without layers is reported as its key, and the fitting one as the remedy."""
    register_layout(changed(prefix="wrong.{i}"))
    path = tmp_path / "own.safetensors"
    names = [f"right.0.{name}" for name in GOOD["tensors"]]
    save_tensors(path, {name: rng.standard_normal((8, 8)) for name in names}, {})
    with rejects("the key prefix", "'wrong.{i}'") as input_error:
        parity.load(path, "own", num_heads=2)
    assert input_error.value.where == "the layout own"
    assert input_error.value.remedy == [{"prefix": "right.{i}"}]
    with rejects("prefix", prefix="other"):
        parity.load(path, "own", prefix="other", num_heads=2)


def test_unknown_name_leads_to_tables():
    """The message about an unknown name says how a table is passed."""
    with rejects("layout", layout="nebula") as input_error:
        find_layout("nebula")
    assert "--layout FILE.toml" in input_error.value.hint


# ---- Proposals -----------------------------------------------------------------------------------

PROPOSED = {
    "separate with biases": ({"wq": "q", "wk": "k", "wv": "v", "wo": "out"}, separate, GROUPED),
    "fused": ({"qkv.weight": "qkv", "o.weight": "out"}, fused_with_biases, GROUPED),
    "axis of heads": ({"q": "q", "kv": "kv", "o": "out"}, with_axis_of_heads, GROUPED),
    "no names": ({"mix": "qkv", "back": "out"}, vkq_of_groups, GROUPED),
}


@pytest.mark.parametrize("prefix", ["blk.{i}.attn", "layers_{i}", ""])
@pytest.mark.parametrize("case", PROPOSED)
def test_proposed_table_fits(case, prefix, tmp_path):
    """A table is proposed that a conversion accepts, with the roles that names or shapes show."""
    holds, by_hand, spec = PROPOSED[case]
    if case not in ("fused", "separate with biases"):
        spec = spec.replace(**NO_BIASES)
    theirs = by_hand(random_weights(spec))
    begin = f"{prefix.replace('{i}', '0')}." if prefix else ""
    shapes = {f"{begin}{name}": x.shape for name, x in theirs.items()}
    block = begin.removesuffix("attn.")
    shapes[f"{block}mlp.up.weight"] = (3 * D, D)
    shapes[f"{block}mlp.down.weight"] = (D, 3 * D)
    (tmp_path / "table.toml").write_text(propose_table(shapes))
    layout = register_layout(tmp_path / "table.toml")
    assert layout.prefix == prefix
    weights = {tensor.name: tensor for tensor in layout.tensors if tensor.kind == "weight"}
    assert {name: tensor.holds for name, tensor in weights.items()} == holds
    heads = {"num_heads": N, "num_kv_heads": K, "head_dim": H}
    back = parity.convert(theirs, source=layout.name, target="canonical", **heads)
    assert np.array_equal(back["out_proj.weight"], random_weights(spec)["out_proj.weight"])
    if case != "no names":
        assert bytes_of(back) == bytes_of(random_weights(spec))


@pytest.mark.parametrize(
    "shapes",
    [
        {},
        {"x": (3,)},
        {"embedding": (100, 64), "head": (64, 64)},
        {"mlp.0.up": (128, 64), "mlp.0.down": (64, 64)},
        {"q\x1b": (8, 8), "k": (8, 8), "v": (8, 8)},
        {"layers.0.q": (8, 7), "layers.0.k": (8, 6), "layers.0.v": (8, 5)},
    ],
)
def test_nothing_fitting_is_not_proposed(shapes):
    """Without tensors that fit as attention, nothing is proposed."""
    assert propose_table(shapes) == ""


def test_proposal_quotes_names_as_data(tmp_path):
    """Quotes, backslashes and wildcards in names are part of the proposed names."""
    shapes = {f'a"\\.{name}': (24, 24) for name in ("q", "k", "v", "o")} | {'a"\\.x[0]*': (2,)}
    (tmp_path / "table.toml").write_text(propose_table(shapes))
    layout = register_layout(tmp_path / "table.toml")
    assert layout.prefix == 'a"\\'
    assert layout.ignores("x[0]*")
    assert not layout.ignores("x[0]y")


def test_norms_are_proposed_as_norms(tmp_path):
    """Norms of queries and keys are tensors of their own, and not ignored."""
    shapes = {f"l.0.{name}": (24, 24) for name in ("q", "k", "v", "o")}
    shapes |= {"l.0.q_norm.scale": (24,), "l.0.k_norm.scale": (24,), "l.0.other": (3,)}
    (tmp_path / "table.toml").write_text(propose_table(shapes))
    layout = register_layout(tmp_path / "table.toml")
    assert {tensor.holds for tensor in layout.others} == {"q_norm.weight", "k_norm.weight"}
    assert layout.ignored == ("other",)


def proposed(**names):
    """The text of the table for two layers of one attention, and its layout."""
    shapes = {f"l.{i}.{name}": shape for i in range(2) for name, shape in names.items()}
    text = propose_table(shapes)
    return text, register_layout({**tomllib.loads(text)})


def comments_of(text):
    """The comments of a table in a line."""
    lines = [line.removeprefix("#") for line in text.splitlines() if line.startswith("#")]
    return " ".join(lines)


FOUR_WEIGHTS = {"wq": (64, 48), "wk": (16, 48), "wv": (16, 48), "wo": (48, 64)}
SQUARE = {f"{name}.weight": (64, 64) for name in ("query", "key", "value")}
THREE = {"q": (64, 48), "k": (16, 48), "v": (16, 48)}

BIASES = {
    "separate": (FOUR_WEIGHTS, {"bq": (64,), "bk": (16,), "bv": (16,), "bo": (48,)}),
    "packed": ({"Wqkv": (96, 48), "Wo": (48, 64)}, {"bqkv": (96,), "bo": (48,)}),
    "of an output of two": (
        {**SQUARE, "out.weight": (64, 64), "ffn.out.weight": (64, 256)},
        {"out_b": (64,), "ffn.out.bias": (64,)},
    ),
}


@pytest.mark.parametrize("case", BIASES)
def test_biases_of_short_names_are_held(case):
    """Biases such as `bq`, `bqkv` and `bo` are held, and none of the MLP are."""
    weights, biases = BIASES[case]
    _, layout = proposed(**weights, **biases)
    bias_names = {tensor.name for tensor in layout.tensors if tensor.kind == "bias"}
    assert bias_names == {name for name in biases if "ffn" not in name}


OUTPUTS = {
    "an output of an MLP": (
        SQUARE | {"dense.weight": (64, 64), "ffn.output.weight": (64, 256)},
        "dense.weight",
    ),
    "a square output of an MLP": (
        SQUARE | {"dense.weight": (64, 64), "mlp.output.weight": (64, 64)},
        "dense.weight",
    ),
    "an output of other size": (
        SQUARE | {"attention.output": (64, 64), "output.dense": (64, 256)},
        "attention.output",
    ),
    "a projection and another matrix": (THREE | {"proj": (48, 64), "pos": (48, 64)}, "proj"),
    "a longer prefix has no output": (
        {f"self.{name}": shape for name, shape in THREE.items()} | {"proj": (48, 64)},
        "proj",
    ),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_output_is_named_and_fits_heads(case):
    """The output is the matrix with a name of one that has the size of the heads."""
    shapes, expected = OUTPUTS[case]
    text, layout = proposed(**shapes)
    assert [tensor.name for tensor in layout.tensors if tensor.holds == "out"] == [expected]
    assert "output" not in comments_of(text).replace('"output', "")


DOUBTFUL = {
    "two matrices": (THREE | {"a": (48, 64), "b": (48, 64)}, 0, ["add it", '"a", 48 x 64', '"b"']),
    "none": (THREE, 0, ["add it"]),
    "unnamed": (THREE | {"a": (48, 64)}, 1, ["No name says which tensor is the output"]),
    "of other size": (SQUARE | {"output": (64, 256)}, 1, ["as many features as the inputs"]),
}


@pytest.mark.parametrize("case", DOUBTFUL)
def test_doubtful_output_has_a_comment(case):
    """A missing output, and one that only its shape or its name shows, has a comment."""
    shapes, num_outputs, words = DOUBTFUL[case]
    text, layout = proposed(**shapes)
    assert [tensor.holds for tensor in layout.tensors].count("out") == num_outputs
    assert [word for word in words if word not in comments_of(text)] == []


LEFT_OUT = {
    "sinks": (8,),
    "gate.weight": (64, 48),
    "rel_bias": (8, 32),
    "relative_embedding": (8, 32),
    "v_norm.weight": (8,),
    "q_conv.weight": (64, 4),
    "mystery": (8,),
}
OF_BLOCK = {
    "attention_norm.weight": (48,),
    "ln_1.bias": (48,),
    "mlp.gate.weight": (192, 48),
    "fc1.bias": (192,),
    "pos_embedding": (512, 48),
}


def test_left_out_tensors_have_comments():
    """Comments name ignored tensors that may belong to attention, and none of a block."""
    text, layout = proposed(**FOUR_WEIGHTS, **LEFT_OUT, **OF_BLOCK)
    assert {*layout.ignored} == {*LEFT_OUT, *OF_BLOCK}
    comments = comments_of(text)
    named = [name for name in layout.ignored if f'"{name}", ' in comments]
    assert named == [*LEFT_OUT]
    assert "converted layers would lack them" in comments


def test_joined_norms_are_held_as_norms():
    """`qnorm` and `knorm` are norms of queries and keys."""
    _, layout = proposed(**FOUR_WEIGHTS, qnorm=(8,), knorm=(8,))
    assert [tensor.holds for tensor in layout.others] == ["q_norm.weight", "k_norm.weight"]


def test_axes_match_self_attention():
    """Kernels (in, out) of grouped heads are not read as kernels of cross-attention."""
    text, layout = proposed(wq=(48, 64), wk=(48, 16), wv=(48, 16), wo=(64, 48))
    axes = {tensor.name: tensor.axes for tensor in layout.tensors}
    assert axes == {**dict.fromkeys(("wq", "wk", "wv"), "d (n h)"), "wo": "(n h) e"}
    assert "may also be (n h) d" in comments_of(text)


def test_other_attention_has_a_comment():
    """If a layer has several attentions, a comment names the ones that have no table."""
    names = [f"{part}.{name}" for part in ("self", "cross") for name in "qkvo"]
    text, layout = proposed(**dict.fromkeys(names, (64, 64)))
    assert layout.prefix == "l.{i}.self"
    assert 'There is other attention, which needs a table: "l.{i}.cross".' in comments_of(text)
