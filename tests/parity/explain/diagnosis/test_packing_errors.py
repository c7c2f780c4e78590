"""A packed tensor read in a wrong order: both orders, or the positions of rows, are named."""

import re

import numpy as np
import pytest

from parity import AttentionSpec, compare_weights, convert, diagnose_weights, random_weights
from parity.explain.diagnosis.bugs.families import FUSED_QKV
from parity.explain.diagnosis.packed_rows import row_orders
from parity.explain.diagnosis.weights.packings import find_packing_error
from parity.measure.core.weights import save_weights
from parity.port.conversion.layouts import LAYOUTS
from parity.port.conversion.layouts.canonical import shapes_in
from parity.use.cli.main import main

GROUPED = AttentionSpec(32, 8, num_kv_heads=2, qkv_bias=False, out_bias=False)
HEADS = AttentionSpec(32, 4)
EIGHT = AttentionSpec(32, 8, qkv_bias=False, out_bias=False)

CONCATENATED = "all queries, then all keys, then all values"
PACKED = {
    "transformers.Falcon": "[q q q q k v] for each key/value head",
    "transformers.GPT-NeoX": "[q k v] for each head",
    "transformers.CodeGen": "4 blocks, each with its queries, values, keys",
    "transformers.Phi3": CONCATENATED,
}


def misread(weights, spec, layout, other):
    """Write weights in a layout, and read them as a different one, whose tensors have the same
    shapes.
    """
    tensors = convert(weights, source="canonical", target=layout, spec=spec)
    names = shapes_in(LAYOUTS[other], spec)
    renamed = dict(zip(names, tensors.values(), strict=True))
    return convert(renamed, source=other, target="canonical", spec=spec)


def packed_patterns(weights, other, spec):
    """Return the one relation of q, k and v, and the names of the tensors that it explains."""
    comparison = compare_weights(weights, spec, other, spec)
    assert comparison.kind == "different"
    patterns = {difference.pattern for difference in comparison.differences}
    (pattern,) = patterns
    assert pattern is not None
    assert pattern.name == "packed"
    assert not comparison.unexplained
    return pattern, [difference.name for difference in comparison.differences]


SAME_PACKING = {"transformers.Phi3": "qkv_proj"}
"""Layouts that are not listed, because many share their order: one that is listed instead."""


@pytest.mark.parametrize(
    ("spec", "layout", "other"),
    [
        (GROUPED, "transformers.Falcon", "transformers.Phi3"),
        (GROUPED, "transformers.Phi3", "transformers.Falcon"),
        (HEADS, "transformers.GPT-NeoX", "transformers.Phi3"),
        (HEADS, "transformers.Phi3", "transformers.GPT-NeoX"),
        (EIGHT, "transformers.CodeGen", "transformers.Phi3"),
        (EIGHT, "transformers.CodeGen", "transformers.GPT-NeoX"),
    ],
)
def test_both_packing_orders_are_named(spec, layout, other):
    """For a tensor read with a wrong layout, both orders are named and both layouts suggested."""
    weights = random_weights(spec)
    pattern, names = packed_patterns(weights, misread(weights, spec, layout, other), spec)
    kinds = ("weight", "bias") if any(spec.qkv_biases) else ("weight",)
    assert sorted(names) == sorted(f"{part}_proj.{kind}" for part in "qkv" for kind in kinds)
    assert f"packed as {PACKED[layout]}, were read as {PACKED[other]}" in pattern.words
    first, second = pattern.fix.split("; ")
    for name, advice in ((layout, first), (other, second)):
        listed = re.split(", | and ", advice.partition(" as ")[2])
        assert SAME_PACKING.get(name, name) in listed
    assert pattern.page == "fused-qkv"


def by_group(weights, letters, *, as_read="qkv"):
    """Pack the rows of `GROUPED` by groups in one order, and read them by groups in another."""
    rows = {name: weights[f"{name}_proj.weight"].reshape(2, -1, 32) for name in "qkv"}
    packed = np.concatenate([rows[name] for name in letters], axis=1)
    sizes = [rows[name].shape[1] for name in as_read]
    read = dict(zip(as_read, np.split(packed, np.cumsum(sizes)[:-1], axis=1), strict=True))
    return weights | {
        f"{name}_proj.weight": np.ascontiguousarray(x.reshape(-1, 32)) for name, x in read.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_unknown_packing_order_is_described(dtype):
    """An order that no layout has, [v k q q q q], is described, also after rounding to 16 bits."""
    weights = random_weights(GROUPED)
    other = {name: x.astype(dtype) for name, x in by_group(weights, "vkq").items()}
    pattern, names = (
        packed_patterns(weights, other, GROUPED) if dtype == "float32" else (None, None)
    )
    if pattern is None:
        comparison = compare_weights(weights, GROUPED, other, GROUPED)
        patterns = {difference.name: difference.pattern for difference in comparison.differences}
        assert patterns["out_proj.weight"].name == "fewer-bits"
        pattern = patterns["q_proj.weight"]
        names = [name for name, other in patterns.items() if other == pattern]
    assert len(names) == 3
    assert (
        "packed as [v k q q q q] for each key/value head, were read as [q q q q k v]"
        in pattern.words
    )
    first, second = pattern.fix.split("; ")
    order = "[v k q q q q] for each key/value head"
    assert first == f"if the first is right, split the rows of the second as {order}"
    assert second.startswith("if the second is right, read the first as transformers.Falcon")


def test_orders_of_rows_are_permutations():
    """Each order of packed rows has every row once, and words of its own, also with a gate."""
    for spec in (GROUPED, HEADS, EIGHT):
        for letters in ("qkv", "qgkv", "qk"):
            widths = {"q": spec.q_width, "g": spec.q_width, "k": spec.k_width, "v": spec.v_width}
            sizes = {letter: widths[letter] for letter in letters}
            orders = list(row_orders(sizes, spec))
            for order in orders:
                assert sorted(order.rows) == list(range(sum(sizes.values()))), order.words
            assert len({order.words for order in orders}) == len(orders)
            assert orders[0].words == CONCATENATED or letters != "qkv"


def test_interleaved_features_are_found():
    """Rows that alternate between q, k and v are described as packed per feature of a head."""
    weights = random_weights(EIGHT)
    rows = np.stack([weights[f"{name}_proj.weight"] for name in "qkv"], axis=1).reshape(3, 32, 32)
    other = weights | {f"{name}_proj.weight": x for name, x in zip("qkv", rows, strict=True)}
    pattern, _ = packed_patterns(weights, other, EIGHT)
    assert (
        f"packed as [q k v] for each feature of a head, were read as {CONCATENATED}"
        in pattern.words
    )


def test_rows_in_no_known_order_are_listed():
    """Rows exchanged between q and v without a known order are listed by number, with the fix of
    any order.
    """
    weights = random_weights(GROUPED)
    q, v = (weights[f"{name}_proj.weight"] for name in "qv")
    other = weights | {
        "q_proj.weight": np.concatenate([v[2:4], q[2:]]),
        "v_proj.weight": np.concatenate([v[:2], q[:2], v[4:]]),
    }
    pattern, names = packed_patterns(weights, other, GROUPED)
    assert names == ["q_proj.weight", "v_proj.weight"]
    assert "q rows 0 to 1 of the second: v rows 2 to 3 of the first" in pattern.words
    assert "v rows 2 to 3 of the second: q rows 0 to 1 of the first" in pattern.words
    assert pattern.fix == FUSED_QKV.fix
    one_row = weights | {
        "q_proj.weight": np.concatenate([v[2:3], q[1:]]),
        "v_proj.weight": np.concatenate([v[:2], q[:1], v[3:]]),
    }
    pattern, _ = packed_patterns(weights, one_row, GROUPED)
    assert "q row 0 of the second: v row 2 of the first" in pattern.words


def test_exchange_is_not_called_packing():
    """Exchanged k and v are reported as exchanged, not as packed."""
    weights = random_weights(GROUPED)
    other = weights | {
        "k_proj.weight": weights["v_proj.weight"],
        "v_proj.weight": weights["k_proj.weight"],
    }
    comparison = compare_weights(weights, GROUPED, other, GROUPED)
    assert {difference.pattern.name for difference in comparison.differences} == {"exchanged"}


def change_one(weights):
    weights["q_proj.weight"] = weights["q_proj.weight"].copy()
    weights["q_proj.weight"][3, 5] += np.float32(1e-3)


def repeat_one(weights):
    weights["v_proj.weight"] = np.concatenate(
        [weights["v_proj.weight"][:-1], weights["v_proj.weight"][:1]]
    )


@pytest.mark.parametrize("change", [change_one, repeat_one])
def test_packing_must_explain_every_row(change):
    """If one row is changed or repeated, no packing error is found."""
    weights = random_weights(GROUPED)
    other = dict(by_group(weights, "vkq"))
    assert find_packing_error(weights, other, GROUPED) is not None
    change(other)
    assert find_packing_error(weights, other, GROUPED) is None


def test_equal_keys_and_values_hide_packing():
    """If k equals v, so that rows are ambiguous, no packing error is found."""
    weights = random_weights(GROUPED)
    weights["v_proj.weight"] = weights["k_proj.weight"].copy()
    assert find_packing_error(weights, by_group(weights, "vkq"), GROUPED) is None


def test_rows_that_differ_late_are_found():
    """A packing error is found although the first 100 columns, which usually suffice, are 0."""
    spec = AttentionSpec(128, 8, num_kv_heads=2, qkv_bias=False, out_bias=False)
    weights = random_weights(spec)
    for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
        weights[name][:, :100] = 0.0
    other = misread(weights, spec, "transformers.Falcon", "transformers.Phi3")
    error = find_packing_error(weights, other, spec)
    assert error is not None
    assert error.is_mixed


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("vkq", "fused-qkv-misread"),
        ("transformers.Falcon", "fused-qkv-read-as-thirds"),
        ("transformers.Phi3", "fused-qkv-read-per-head"),
    ],
)
def test_misread_packing_is_one_bug(layout, name):
    """Weights that are read in a wrong order have one bug, which explains q, k and v; an order that
    no known bug has is described.
    """
    weights = random_weights(GROUPED)
    if layout == "vkq":
        other = by_group(weights, layout)
    else:
        (read_as,) = {"transformers.Falcon", "transformers.Phi3"} - {layout}
        other = misread(weights, GROUPED, layout, read_as)
    diagnosis = diagnose_weights(weights, GROUPED, other, GROUPED)
    (finding,) = diagnosis.findings
    assert finding.likely_bug == name
    assert finding.stages[:3] == ("q", "k", "v")
    assert finding.more == "mha-parity bugs fused-qkv"
    assert not finding.others
    assert ("packed as [v k q q q q]" in finding.about) == (layout == "vkq")


def test_packing_is_explained_only_once(tmp_path, capsys):
    """`compare` and `diagnose` print the packing of the file once and suggest Falcon's layout."""
    weights = random_weights(GROUPED)
    save_weights(tmp_path / "a.safetensors", weights, GROUPED)
    save_weights(tmp_path / "b.safetensors", by_group(weights, "vkq"), GROUPED)
    for command in ("compare", "diagnose"):
        assert (
            main([command, str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")]) == 1
        )
        out = capsys.readouterr().out
        assert out.count("packed as [v k q q q q] for each key/value head") == 1
        assert "read the first as transformers.Falcon" in out
        assert "does not follow from the first's by a pattern" not in out
        assert "Unexplained" not in out
