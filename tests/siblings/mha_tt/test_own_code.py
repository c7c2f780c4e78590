"""Users' own attention in ttnn, examined and diagnosed as in torch or JAX; with injected bugs."""

import json
import re
from contextlib import contextmanager

import pytest
import ttnn
from helpers.input_errors import rejects
from helpers.tt.formulas import IS_MOCK

import parity
from parity.explain.conformance.examine import examine
from parity.measure.backends import tt
from parity.use.cli.main import main

SPEC = parity.AttentionSpec(128, 4, num_kv_heads=2, rope=parity.Rope(10000.0))

OWN = """
import numpy as np
import ttnn

import mha_tt
from mha_spec import AttentionSpec

HIDDEN = True


def attention(query, key, value, mask=None, *, scale=None):
    if mask is not None:  # booleans of NumPy: ttnn has none
        hidden = np.broadcast_to(mask == HIDDEN, (*mask.shape[:2], query.shape[2], key.shape[2]))
        mask = mha_tt.upload(np.where(hidden, -1e9, 0.0), device=query.device(), pad_value=-1e9)
    attend = ttnn.transformer.scaled_dot_product_attention
    return attend(query, key, value, attn_mask=mask, is_causal=False, scale=scale)


def shows(query, key, value, mask=None):
    return attention(query, key, value, None if mask is None else ~mask)


def unscaled(query, key, value):
    return attention(query, key, value, scale=1.0)


def with_weights(query, key, value, need_weights=False):
    scores = ttnn.multiply(ttnn.matmul(query, key, transpose_b=True), query.shape[3] ** -0.5)
    attn_weights = ttnn.softmax(scores, dim=-1)
    return ttnn.matmul(attn_weights, value), attn_weights


def with_others_weights(query, key, value, need_weights=False):
    output, attn_weights = with_weights(query, key, value)
    return output, ttnn.softmax(attn_weights, dim=-1)


def leaks(query, key, value, mask=None):
    output = attention(query, key, value, mask)
    return ttnn.add(output, ttnn.mean(value, dim=2, keepdim=True))


def not_there(query, key, value):
    return ttnn.nothing(query)


class Layer:
    \"\"\"What it keeps on the device lasts from call to call.\"\"\"

    layer = None

    def __call__(self, x, is_causal=False):
        self.layer = self.layer or mha_tt.MultiHeadAttention(AttentionSpec(128, 4), device=x.device())
        return self.layer(x, is_causal=is_causal)[0]
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch, opened_device):
    """Create a folder with a user's module, in which the command runs; no shadow is active."""
    (tmp_path / "own_tt.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def words(function, *questions, **declared):
    examination = examine(function, questions, framework="ttnn", **declared)
    return [examination[question].words for question in questions]


# ---- Conventions ---------------------------------------------------------------------------------


@pytest.mark.board
def test_conformance_of_function_exits_0(own, capsys):
    """`conformance` examines a ttnn function, answers every question and exits with 0."""
    assert main(["conformance", "own_tt:attention", "--framework", "ttnn", "--json", "c.json"]) == 0
    assert "no broken guarantees" in capsys.readouterr().out
    (subject,) = json.loads((own / "c.json").read_text())["subjects"]
    assert subject["framework"] == "ttnn"
    assert {answer["question"]: answer["words"] for answer in subject["answers"]} == {
        "attends": "to all tokens",
        "mask": "True hides; floats as booleans",
        "causal": "—",
        "causal and mask": "—",
        "future token": "hidden",
        "masked key": "hidden",
        "padding": "—",
        "other sequence": "independent",
        "visible NaN": "propagates",
        "hidden NaN": "leaks",
        "empty row": "mean(V)",
        "empty row gradient": "no gradients",
        "weights": "—",
        "grouped heads": "repeat",
        "dropout": "—",
        "scale": "1/sqrt(H)",
        "float16 overflow": "no float16",
        "strided inputs": "no strides",
        "paths": "agree",
        "cache": "—",
    }


@pytest.mark.board
def test_layer_keeps_weights_between_calls():
    """A layer that keeps its weights on the device from call to call is examined correctly."""
    import own_tt

    assert words(
        own_tt.Layer, "attends", "causal", "empty row", "other sequence", "visible NaN"
    ) == [
        "to all tokens",
        "T = S only",
        "—",
        "independent",
        "propagates",
    ]


def test_injected_bugs_are_detected():
    """Answers show an inverted mask, a missing scale, a leak and weights that were not used."""
    import own_tt

    assert words(own_tt.shows, "mask", mask_true="hides") == ["True shows, declared: hides"]
    assert words(own_tt.unscaled, "scale") == ["1 (none)"]
    assert words(own_tt.leaks, "mask") == ["mask ignored"]
    assert words(own_tt.with_weights, "weights") == ["per head"]
    assert words(own_tt.with_others_weights, "weights") == ["not those used"]


def test_axis_order_is_detected():
    """A function with tokens before heads gives the same answers."""
    import own_tt

    def swapped(query, key, value):
        q, k, v = (ttnn.transpose(x, 1, 2) for x in (query, key, value))
        return ttnn.transpose(own_tt.attention(q, k, v), 1, 2)

    assert words(swapped, "scale", "grouped heads") == ["1/sqrt(H)", "repeat"]


def test_unsupported_dtypes_raise(capsys):
    """bfloat16 and float32 are examined; `--dtypes float16` exits with 2 and names the dtype."""
    import own_tt

    examination = examine(own_tt.attention, ["attends"], ["bfloat16", "float32"], framework="ttnn")
    assert examination["attends"].words == "to all tokens"
    assert (
        main(["conformance", "own_tt:attention", "--framework", "ttnn", "--dtypes", "float16"]) == 2
    )
    assert rejects("a dtype", "float16").is_printed_in(capsys.readouterr().err)


def test_framework_is_inferred_from_module():
    """A module that imports only ttnn is examined as ttnn without `framework`."""
    import own_tt

    assert examine(own_tt.attention, ["scale"]).framework == "ttnn"


def test_missing_operation_raises_its_error():
    """A call of an operation that ttnn does not have raises its AttributeError, instead of an
    answer.
    """
    import own_tt

    with rejects("not_there", "AttributeError: module 'ttnn' has no attribute 'nothing'"):
        examine(own_tt.not_there, ["scale"], framework="ttnn")


# ---- Diagnosis -----------------------------------------------------------------------------------

PORT = """
import numpy as np
import ttnn

import mha_tt
import parity
from parity import load

weights, SPEC = load("layer.safetensors")
N, K, H = SPEC.num_heads, SPEC.num_kv_heads, SPEC.head_dim
FAULT = "{fault}"


def port(x):
    batch, seq_len, _ = x.shape
    def on_device(array):
        return mha_tt.upload(array, device=x.device())
    def heads(name, count):
        weight, bias = (on_device(weights[f"{{name}}_proj.{{part}}"]) for part in ("weight", "bias"))
        y = ttnn.linear(x, weight, bias=bias, transpose_b=True)
        return ttnn.transpose(ttnn.reshape(y, (batch, seq_len, count, H)), 1, 2)
    angles = np.outer(np.arange(seq_len), 10000.0 ** (-np.arange(H // 2) / (H // 2)))
    cos, sin = (np.concatenate([table, table], axis=1)[None, None] for table in (np.cos(angles), np.sin(angles)))
    swap = np.kron(np.eye(H // 2), [[0, 1], [-1, 0]])[None, None]
    q, k, v = heads("q", N), heads("k", K), heads("v", K)
    if FAULT == "rope-interleaved":
        cos, sin = (np.repeat(table[..., : H // 2], 2, axis=3) for table in (cos, sin))
        tables = [on_device(table) for table in (cos, sin, swap)]
        q, k = (ttnn.experimental.rotary_embedding_llama(part, *tables, is_decode_mode=False) for part in (q, k))
    else:
        tables = [on_device(table) for table in (cos, sin)]
        q, k = (ttnn.experimental.rotary_embedding_hf(part, *tables, is_decode_mode=False) for part in (q, k))
    hidden = np.tri(seq_len, dtype=bool) if FAULT == "mask-flipped" else ~np.tri(seq_len, dtype=bool)
    mask = mha_tt.upload(np.where(hidden, -1e9, 0.0)[None, None], device=x.device(), pad_value=-1e9)
    stages = {{"q": q}}
    if FAULT == "mask-flipped":  # of an output alone it would not be told: a row that sees nothing is wrong, too
        scores = ttnn.matmul(q, ttnn.repeat_interleave(k, N // K, dim=1), transpose_b=True, dtype=ttnn.float32)
        stages["attn_weights"] = ttnn.softmax(ttnn.add(ttnn.multiply(scores, H**-0.5), mask), dim=-1)
        context = ttnn.matmul(
            ttnn.typecast(stages["attn_weights"], ttnn.bfloat16), ttnn.repeat_interleave(v, N // K, dim=1)
        )
    else:
        options = dict(scale=1.0) if FAULT == "scale-missing" else dict()
        context = ttnn.transformer.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=False, **options)
    combined = ttnn.reshape(ttnn.transpose(context, 1, 2), (batch, seq_len, N * H))
    weight, bias = (on_device(weights[f"out_proj.{{part}}"]) for part in ("weight", "bias"))
    return {{**stages, "output": ttnn.linear(combined, weight, bias=bias, transpose_b=True)}}
"""


@pytest.fixture
def diagnosed(own, capsys):
    """Return a function that runs the command on a port with a bug."""
    weights = parity.make_problem(parity.Case("own", SPEC, ""), "bfloat16").weights
    parity.save(str(own / "layer.safetensors"), weights, SPEC)

    def diagnosed(fault):
        name = f"port_{fault.replace('-', '_')}"
        (own / f"{name}.py").write_text(PORT.format(fault=fault))
        arguments = [
            "diagnose",
            f"{name}:port",
            "--framework",
            "ttnn",
            "--weights",
            "layer.safetensors",
        ]
        return main(arguments), capsys.readouterr()

    return diagnosed


@pytest.mark.board
def test_correct_port_has_no_differences(diagnosed):
    """`diagnose` of a correct port exits with 0, and recommends a comparison in float32."""
    status, printed = diagnosed("none")
    assert (status, printed.err) == (0, "")
    assert "nothing differs by more than rounding\n" in printed.out
    assert printed.out.endswith("may not show in bfloat16: compare in float32 as well\n")


@pytest.mark.parametrize("fault", ["rope-interleaved", "mask-flipped", "scale-missing"])
def test_injected_bug_is_named(diagnosed, fault):
    """`diagnose` of a port with a bug exits with 1 and names the bug."""
    status, printed = diagnosed(fault)
    assert status == 1
    assert re.search(rf"^Likely bug: {fault}\b", printed.out, re.MULTILINE)


def test_diagnosis_uses_arithmetic_of_device(diagnosed, monkeypatch):
    """`diagnose` uses the arithmetic "tensix" on a card and "ieee" on a mock board."""
    arithmetics = []
    monkeypatch.setattr(
        "parity.explain.diagnosis.diagnose.diagnose",
        lambda observed, problem, *, arithmetic, **_: (
            arithmetics.append(arithmetic) or parity.Diagnosis()
        ),
    )
    lock = tt.lock

    @contextmanager
    def of_a_card(dtype):
        with lock(dtype) as settings:
            yield settings | {"arithmetic": "tensix"}

    diagnosed("none")
    monkeypatch.setattr(tt, "lock", of_a_card)
    diagnosed("none")
    assert arithmetics[1:] == ["tensix"]
    assert arithmetics[0] == ("ieee" if IS_MOCK else "tensix")


def test_function_without_tensor_raises(own, diagnosed, capsys):
    """`diagnose` of a function that returns None exits with 2 and names the type."""
    diagnosed("none")
    (own / "giver.py").write_text("def nothing(x):\n    return None\n")
    assert (
        main(["diagnose", "giver:nothing", "--framework", "ttnn", "--weights", "layer.safetensors"])
        == 2
    )
    assert rejects("the function", "NoneType").is_printed_in(capsys.readouterr().err)
