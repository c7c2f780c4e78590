"""`mutate`: bugs that are injected into a user's attention, and verdicts on the user's tests."""

import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers.input_errors import rejects
from helpers.samples import sample
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from parity.explain.diagnosis.bugs import page_by_bug
from parity.explain.mutating import inject, pytest_plugin, record
from parity.explain.mutating.bugs import BUGS, injections_for, names, page_of
from parity.explain.mutating.calls import Call
from parity.explain.mutating.compare import Unfit, same
from parity.explain.mutating.run import Run, Status, Suite, _result_of
from parity.explain.mutating.view import OTHER_NEEDS, View, view_of
from parity.use.cli.main import main
from parity.use.reporting.bugs import bug_page

ROLES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "mask": "mask",
    "is_causal": "is_causal",
    "scale": "scale",
}
VIEW = View(
    "torch",
    "BNTH",
    ("q", "k", "v", "mask", "is_causal", "scale"),
    ("mask", "scale"),
    ROLES,
    mask_true="shows",
    causal="top-left",
    has_groups=True,
    is_ours=True,
)


def attention(q, k, v, mask=None, is_causal=False, scale=None):
    return scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=True
    )


def qkv(num_queries=5, num_keys=5, num_kv_heads=4):
    rng = torch.Generator().manual_seed(0)
    shapes = [(2, 4, num_queries, 8), *[(2, num_kv_heads, num_keys, 8)] * 2]
    return [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]


def with_bug(name, *args, view=VIEW, function=attention, **kwargs):
    """Return the result of a function with a bug, or None if the call does not allow it."""
    buggy_call = injections_for(view)[0][name].make(Call(view, args, kwargs))
    if buggy_call is None:
        return None
    return buggy_call.run(lambda call: function(*call.args, **call.kwargs))


# ---- The bugs ------------------------------------------------------------------------------------


@sample(12)
@pytest.mark.parametrize("name", names())
def test_every_bug_has_a_page(name):
    """Each bug has a page, and its name is in the catalog of bugs."""
    assert bug_page(page_of(name))
    assert name in page_by_bug()


@sample(12)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_bug_names_what_a_function_lacks(bug):
    """For a function of `x` alone, a bug has a reason against it exactly if it has needs."""
    bare = View("torch", "" if "layer" in bug.needs else "BTE", ("x",), roles={"query": "x"})
    reason = bug.why_not(bare)
    assert bool(reason) == bool(bug.needs)
    assert all(
        need in OTHER_NEEDS or bare.lacks(need).startswith("it has no") for need in bug.needs
    )


TRIL = torch.ones(5, 5, dtype=torch.bool).tril()
ROLLED = [3, 0, 1, 2]
Q, K, V = qkv()
WRONG = {
    "mask-flipped": ({"mask": TRIL}, lambda: attention(Q, K, V, ~TRIL)),
    "mask-ignored": ({"mask": TRIL}, lambda: attention(Q, K, V)),
    "causal-ignored": ({"is_causal": True}, lambda: attention(Q, K, V)),
    "causal-unasked": ({}, lambda: attention(Q, K, V, TRIL)),
    "causal-off-by-one": (
        {"is_causal": True},
        lambda: attention(Q, K, V, torch.ones(5, 5).tril(1).bool()),
    ),
    "causal-excludes-self": (
        {"mask": TRIL},
        lambda: attention(Q, K, V, torch.ones(5, 5).tril(-1).bool()),
    ),
    "q-k-swapped": ({}, lambda: attention(K, Q, V)),
    "k-v-swapped": ({}, lambda: attention(Q, V, K)),
    "q-v-swapped": ({}, lambda: attention(V, K, Q)),
    "q-heads-reversed": ({}, lambda: attention(Q.flip(1), K, V)),
    "k-heads-rolled": ({}, lambda: attention(Q, K[:, ROLLED], V)),
    "v-heads-reversed": ({}, lambda: attention(Q, K, V.flip(1))),
    "scale-missing": ({}, lambda: attention(Q, K, V, scale=1.0)),
    "scale-ignored": ({"scale": 0.5}, lambda: attention(Q, K, V)),
    "scale-squared": ({"scale": 0.5}, lambda: attention(Q, K, V, scale=0.25)),
    "scale-by-d-model": ({}, lambda: attention(Q, K, V, scale=32**-0.5)),
    "scale-after-softmax": ({}, lambda: attention(Q, K, V, scale=1.0) / 8**0.5),
    "precision-bfloat16": ({}, lambda: attention(*(x.bfloat16().double() for x in (Q, K, V)))),
    "softmax-over-queries": ({}, lambda: (Q @ K.mT / 8**0.5).softmax(-2) @ V),
    "softmax-over-heads": ({}, lambda: (Q @ K.mT / 8**0.5).softmax(1) @ V),
    "softmax-over-batch": ({}, lambda: (Q @ K.mT / 8**0.5).softmax(0) @ V),
    "mask-after-softmax": ({"mask": TRIL}, lambda: ((Q @ K.mT / 8**0.5).softmax(-1) * TRIL) @ V),
    "heads-not-moved": (
        {},
        lambda: attention(*(x.mT.mT.transpose(1, 2).reshape(x.shape) for x in (Q, K, V))),
    ),
    "heads-not-moved-back": ({}, lambda: attention(Q, K, V).reshape(2, 5, 4, 8).transpose(1, 2)),
}
"""Options of a call for each bug, and the wrong result made by hand."""


@sample(12)
@pytest.mark.parametrize("axes", ["BNTH", "BTNH"])
@pytest.mark.parametrize("name", WRONG)
def test_bug_equals_one_made_by_hand(name, axes):
    """An injected bug has the result of the same bug made by hand, for both orders of axes, and
    differs from the correct one.
    """
    options, by_hand = WRONG[name]
    if axes == "BNTH":
        actual = with_bug(name, Q, K, V, **options)
    else:

        def turned(q, k, v, *args, **kwargs):
            return attention(*(x.transpose(1, 2) for x in (q, k, v)), *args, **kwargs).transpose(
                1, 2
            )

        inputs = [x.transpose(1, 2) for x in (Q, K, V)]
        actual = with_bug(
            name, *inputs, view=replace(VIEW, axes="BTNH"), function=turned, **options
        ).transpose(1, 2)
    torch.testing.assert_close(actual, by_hand(), equal_nan=True)
    assert not same(actual, attention(Q, K, V, **options))


def test_key_value_heads_are_tiled():
    """Shared heads are tiled as by hand; the bug does not apply if no head is shared."""
    q, k, v = qkv(num_kv_heads=2)
    torch.testing.assert_close(
        with_bug("kv-heads-tiled", q, k, v),
        attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)),
    )
    assert with_bug("kv-heads-tiled", *qkv()) is None


def test_causal_mask_alignment_is_changed():
    """A top-left causal mask becomes bottom-right; the bug does not apply to equal lengths, nor the
    opposite one to this function.
    """
    q, k, v = qkv(3, 5)
    actual = with_bug("causal-bottom-right", q, k, v, is_causal=True)
    torch.testing.assert_close(actual, attention(q, k, v, torch.ones(3, 5).tril(2).bool()))
    assert with_bug("causal-bottom-right", *qkv(), is_causal=True) is None
    assert "causal-top-left" in injections_for(VIEW)[1]


def test_additive_mask_stays_additive():
    """Bugs in an additive mask have the results of the same bugs in a boolean mask."""
    added = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~TRIL, float("-inf"))
    torch.testing.assert_close(with_bug("mask-ignored", Q, K, V, added), attention(Q, K, V))
    torch.testing.assert_close(
        with_bug("mask-flipped", Q, K, V, added), attention(Q, K, V, ~TRIL), equal_nan=True
    )
    actual = with_bug("causal-off-by-one", Q, K, V, added)
    torch.testing.assert_close(actual, attention(Q, K, V, torch.ones(5, 5).tril(1).bool()))


def test_mask_without_causality_is_kept():
    """A mask that is not causal is not shifted."""
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[:, 1] = False
    torch.testing.assert_close(
        with_bug("causal-off-by-one", Q, K, V, mask), attention(Q, K, V, mask)
    )


def test_different_function_is_not_replaced():
    """A bug that needs our implementation raises `Unfit` if the function returns something else."""
    with pytest.raises(Unfit, match="a different result than yours"):
        with_bug(
            "softmax-over-heads", Q, K, V, function=lambda *arguments: attention(*arguments) * 2
        )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("padding-ignored", [5, 5]),
        ("padding-off-by-one", [4, 5]),
        ("padding-off-by-minus-one", [2, 4]),
        ("padding-on-the-left", None),
    ],
)
def test_padding_bugs_change_hidden_tokens(name, wrong):
    """Padding bugs change masks of both polarities, and lengths except for a change of side."""

    def hidden(lengths):
        return torch.arange(5) >= torch.tensor(lengths)[:, None]

    right = hidden([3, 5])
    for true in ("hides", "shows"):
        view = View(
            "torch",
            "BTE",
            ("x", "padding"),
            roles={"query": "x", "padding": "padding"},
            padding_true=true,
        )
        mask = right if true == "hides" else ~right
        actual = with_bug(
            name, torch.zeros(2, 5, 4), mask, view=view, function=lambda x, padding: padding
        )
        expected = right.flip(-1) if wrong is None else hidden(wrong)
        assert torch.equal(actual, expected if true == "hides" else ~expected)
    view = View("torch", "BTE", ("x", "lengths"), roles={"query": "x", "lengths": "lengths"})
    actual = with_bug(
        name,
        torch.zeros(3, 5, 4),
        torch.tensor([3, 5, 0]),
        view=view,
        function=lambda x, lengths: lengths,
    )
    if wrong is None:  # lengths have no side
        assert actual is None
    else:
        assert actual.tolist()[:2] == wrong
        assert actual.min() >= 0


ROPE = {
    role: role
    for role in ("query", "positions", "cache", "cos", "sin", "bias", "window", "soft_cap", "sinks")
}


@pytest.mark.parametrize(
    ("name", "options", "wrong"),
    [
        ("rope-missing", {"positions": np.arange(3)}, {"positions": np.zeros(3)}),
        ("rope-reversed", {"positions": np.arange(3)}, {"positions": -np.arange(3)}),
        ("cache-position-off-by-one", {"positions": np.arange(3)}, {"positions": np.arange(1, 4)}),
        ("cache-position-restarted", {"positions": np.arange(3) + 4}, {"positions": np.arange(3)}),
        ("score-bias-missing", {"bias": np.ones(3)}, {"bias": None}),
        ("score-bias-scaled", {"bias": np.ones(3)}, {"bias": np.ones(3) / 2}),
        ("window-one-too-wide", {"window": 3}, {"window": 4}),
        ("window-one-too-narrow", {"window": (3, 0)}, {"window": (2, 0)}),
        ("window-ignored", {"window": 3}, {"window": None}),
        ("soft-cap-ignored", {"soft_cap": 3.0}, {"soft_cap": None}),
        ("sinks-ignored", {"sinks": np.ones(4)}, {"sinks": None}),
    ],
)
def test_further_arguments_are_changed(name, options, wrong):
    """A bug in positions, bias, window, cap or sinks changes its
    argument, and does not apply without it.
    """
    view = View("torch", "BNTH", ("query",), ("bias", "window", "soft_cap", "sinks"), ROPE)
    actual = with_bug(
        name, np.zeros((1, 1, 3, 4)), view=view, function=lambda query, **more: more, **options
    )
    np.testing.assert_equal(actual, wrong)
    assert (
        with_bug(name, np.zeros((1, 1, 3, 4)), view=view, function=lambda query, **more: more)
        is None
    )


COSINES = {
    "rope-missing": (1.0, 0.0),
    "rope-reversed": (0.5, -0.8),
    "rope-sin-cos-exchanged": (0.8, 0.5),
}


@pytest.mark.parametrize("name", COSINES)
def test_cosines_and_sines_are_changed(name):
    """RoPE bugs change cosines and sines, as two arguments or as one pair."""
    view = View(
        "torch", "BNTH", ("query", "cos", "sin"), roles={r: r for r in ("query", "cos", "sin")}
    )
    pair = View("torch", "BNTH", ("query",), roles={r: r for r in ("query", "position_embeddings")})
    cos, sin = torch.full((3,), 0.5), torch.full((3,), 0.8)
    for tables in (
        with_bug(name, Q, cos, sin, view=view, function=lambda query, *both: both),
        with_bug(
            name,
            Q,
            position_embeddings=(cos, sin),
            view=pair,
            function=lambda query, position_embeddings: position_embeddings,
        ),
    ):
        assert [x[0].item() for x in tables] == pytest.approx(COSINES[name])


# ---- Weights -------------------------------------------------------------------------------------

LETTERS = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "out_proj": "wo"}


def torch_layer():
    torch.manual_seed(0)
    layer = nn.Module()
    layer.num_heads = 2
    for name in LETTERS:
        setattr(layer, name, nn.Linear(4, 4))
    return layer


def letters_of_torch(layer):
    return {
        f"{name}.{leaf}": getattr(getattr(layer, name), leaf).detach().numpy().copy()
        for name in LETTERS
        for leaf in ("weight", "bias")
    }


PROJECTED = {
    "q_proj-transposed": lambda w: {"q_proj.weight": w["q_proj.weight"].T},
    "out_proj-transposed": lambda w: {"out_proj.weight": w["out_proj.weight"].T},
    "k-v-swapped": lambda w: {
        f"{one}_proj.{leaf}": w[f"{other}_proj.{leaf}"]
        for one, other in ("kv", "vk")
        for leaf in ("weight", "bias")
    },
    "v_proj-bias-missing": lambda w: {"v_proj.bias": w["v_proj.bias"] * 0},
    "scale-missing": lambda w: {
        name: w[name] * 2**0.5 for name in ("q_proj.weight", "q_proj.bias")
    },
    "scale-by-d-model": lambda w: {
        name: w[name] * 0.5**0.5 for name in ("q_proj.weight", "q_proj.bias")
    },
    "out-proj-missing": lambda w: {"out_proj.weight": np.eye(4), "out_proj.bias": np.zeros(4)},
}


@sample(24)
@pytest.mark.parametrize("name", PROJECTED)
@pytest.mark.parametrize(
    "carrier", ["torch", "nnx", "parameters", "flat mapping", "nested mapping"]
)
def test_weights_are_changed_in_any_holder(carrier, name):
    """Bugs change weights in modules, parameters and mappings
    as by hand, and the modules are restored.
    """
    layer = torch_layer()
    weights = letters_of_torch(layer)
    jax_layer = nnx.Module()
    jax_layer.num_heads = 2
    for holder in LETTERS:
        linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        linear.kernel, linear.bias = (
            nnx.Param(jnp.asarray(weights[f"{holder}.{leaf}"])) for leaf in ("weight", "bias")
        )
        setattr(jax_layer, holder, linear)

    def letters_of_nnx(call):
        leaves = (("weight", "kernel"), ("bias", "bias"))
        return {
            f"{n}.{leaf}": np.asarray(getattr(getattr(jax_layer, n), at)[...])
            for n in LETTERS
            for leaf, at in leaves
        }

    view = View("torch", "BTE", ("x",), roles={"query": "x"}, projections=True, biases=True)
    x = torch.zeros(1, 3, 4)
    if carrier == "torch":
        buggy_call = injections_for(view)[0][name].make(Call(view, (x,), {}, layer))
        actual = buggy_call.run(lambda call: letters_of_torch(call.owner))
        np.testing.assert_equal(letters_of_torch(layer), weights)
    elif carrier == "nnx":
        buggy_call = injections_for(view)[0][name].make(
            Call(replace(view, framework="jax"), (jnp.zeros((1, 3, 4)),), {}, jax_layer)
        )
        actual = buggy_call.run(letters_of_nnx)
        np.testing.assert_equal(letters_of_nnx(None), weights)
    elif carrier == "parameters":
        by_letter = {LETTERS[n]: weights[f"{n}.weight"] for n in LETTERS} | {
            "b" + LETTERS[n][1]: weights[f"{n}.bias"] for n in LETTERS
        }
        by_letter = {n: torch.from_numpy(array) for n, array in by_letter.items()}
        buggy_call = injections_for(view)[0][name].make(
            Call(view, (x,), {**by_letter, "num_heads": 2})
        )
        actual = buggy_call.run(
            lambda call: {
                f"{n}.{leaf}": call.kwargs[letter + LETTERS[n][1]].numpy()
                for n in LETTERS
                for leaf, letter in (("weight", "w"), ("bias", "b"))
            }
        )
    else:
        flat = {n: torch.from_numpy(array) for n, array in weights.items()}
        nested = {n: {"kernel": flat[f"{n}.weight"], "bias": flat[f"{n}.bias"]} for n in LETTERS}
        by_letter = flat if carrier == "flat mapping" else nested
        view = replace(view, roles={"query": "x", "weights": "params"})
        buggy_call = injections_for(view)[0][name].make(
            Call(view, (x,), {"params": by_letter, "num_heads": 2})
        )

        def read_params(call):
            params = call.kwargs["params"]
            if carrier == "nested mapping":
                params = {
                    f"{n}.{'weight' if leaf == 'kernel' else leaf}": a
                    for n, inner in params.items()
                    for leaf, a in inner.items()
                }
            return {n: a.numpy() for n, a in params.items()}

        actual = buggy_call.run(read_params)
    expected = {**weights, **PROJECTED[name](weights)}
    assert {n for n in weights if not np.array_equal(weights[n], expected[n])}, (
        "a control that changes nothing"
    )
    for n in weights:
        np.testing.assert_allclose(actual[n], expected[n], rtol=1e-6, err_msg=n)


# ---- The whole command ---------------------------------------------------------------------------

ATTENTION = '''
import torch

def attention(query, key, value, mask=None, is_causal=False):
    """(B, N, T, H); True in the mask shows."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value

class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj, self.k_proj = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x, attn_mask=None):
        return attention(*(p(x)[:, None] for p in (self.q_proj, self.k_proj)), x[:, None], attn_mask)[:, 0]
'''

UNCALLED = """
def attention(query, key, value, is_causal=False):
    from torch.nn.functional import scaled_dot_product_attention  # which takes longer than tests that never call it
    return scaled_dot_product_attention(query, key, value, is_causal=is_causal)
"""

# Each bug starts a process that imports torch, which takes longest: so few bugs are injected, and
# no test uses torch.testing, which imports half as much again.
GOOD = """
import torch
from mine.attention import attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

def test_values():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[:, 3] = False
    assert torch.allclose(attention(q, k, v, mask), sdpa(q, k, v, mask), atol=1e-6)
    assert torch.allclose(attention(q, k, v, is_causal=True), sdpa(q, k, v, is_causal=True), atol=1e-6)
"""

WEAK = """
import torch
from mine import attention as mine

def test_shape():
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    assert mine.attention(q, k, v).shape == q.shape

def test_mask():
    q, k, v = torch.randn(3, 2, 4, 5, 8)
    assert torch.equal(mine.attention(q, k, v, torch.ones(5, 5, dtype=torch.bool)), mine.attention(q, k, v))
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Write a user's package into a folder; return a function that mutates it under given tests."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "attention.py").write_text(ATTENTION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [module for module in sys.modules if module.split(".")[0] == "mine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which takes longer than the tests

    def mutate(
        tests, *options, command=("pytest", "test_mine.py"), target="mine.attention:attention"
    ):
        (tmp_path / "test_mine.py").write_text(textwrap.dedent(tests))
        try:
            status = main(["mutate", target, *options, "--json", "found.json", "--", *command])
        finally:
            for name in [module for module in sys.modules if module.split(".")[0] == "mine"]:
                del sys.modules[name]
        path = tmp_path / "found.json"
        outcomes = json.loads(path.read_text())["outcomes"] if path.exists() else []
        return status, {outcome["bug"]: outcome for outcome in outcomes}

    return mutate


@pytest.mark.thorough
def test_bugs_unnoticed_by_weak_tests(project, capsys, tmp_path):
    """Weak tests notice one of four bugs; for the others
    the reason is printed, and the status is 1.
    """
    options = ("--only", "mask-flip*,mask-ignored,causal-ignored,scale-missing", "--jobs", "2")
    status, outcomes = project(WEAK, *options)
    printed = capsys.readouterr().out
    assert status == 1
    assert {name: outcome["status"] for name, outcome in outcomes.items()} == {
        "mask-flipped": "noticed",  # no key remains visible: NaN
        "mask-ignored": "changed nothing",
        "causal-ignored": "not reached",
        "scale-missing": "not noticed",
    }
    assert outcomes["mask-flipped"]["by"] == "test_mine.py::test_mask"
    assert "mask-polarity" in printed
    assert "4 bugs injected: 1 noticed" in printed
    assert "NOT NOTICED" in printed
    assert (
        "scale-missing: the scale of the scores is missing, and every test passes; mha-parity "
        "bugs scale" in printed
    )
    assert not (tmp_path / ".pytest_cache").exists()


@pytest.mark.thorough
def test_jitted_function_is_compared(project, tmp_path):
    """In a jitted function, a bug that changes nothing is
    distinguished from one that is not noticed.
    """
    source = """
    import jax, jax.numpy as jnp

    def attention(q, k, v, mask=None):
        scores = jnp.einsum("bnth,bnsh->bnts", q, k) / q.shape[-1] ** 0.5
        scores = scores if mask is None else jnp.where(mask, scores, -jnp.inf)
        return jax.nn.softmax(scores) @ v
    """
    (tmp_path / "mine" / "attention.py").write_text(textwrap.dedent(source))
    tests = """
    import jax, jax.numpy as jnp
    from mine.attention import attention

    def test_it():
        q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 4, 5, 8))
        assert jax.jit(attention)(q, k, v, jnp.ones((5, 5), bool)).shape == q.shape
    """
    status, outcomes = project(tests, "--only", "mask-ignored,softmax-over-heads")
    assert status == 1
    assert {name: outcome["status"] for name, outcome in outcomes.items()} == {
        "mask-ignored": "changed nothing",
        "softmax-over-heads": "not noticed",
    }


@pytest.mark.costly("starts pytest, as the command does")
@pytest.mark.parametrize(
    ("tests", "got"),
    [
        ("def test_it():\n    assert False", "exit status 1, also by themselves"),
        ("def test_it():\n    pass", "no import"),
        ("import mine.attention\ndef test_it():\n    pass", "no call"),
        (
            "from mine.attention import attention as f\ndef test_it():\n    assert "
            "f.__code__.co_name == 'attention'",
            "exit status 1, only while mine.attention:attention is wrapped",
        ),
    ],
)
def test_unsuitable_tests_exit_with_2(project, capsys, tmp_path, tests, got):
    """Tests that fail by themselves or when wrapped, or do not
    import or call the function, exit with 2.
    """
    (tmp_path / "mine" / "attention.py").write_text(UNCALLED)
    status, _ = project(tests, "--only", "scale-missing", "--framework", "torch")
    assert status == 2
    assert rejects("the tests", got).is_printed_in(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "input_error"),
    [
        (("--only", "nonsense"), rejects("--only", {"--only": "nonsense"})),
        (("--only", "padding*"), rejects("--only", "padding-ignored: ")),
        (("--jobs", "0"), rejects("--jobs", {"--jobs": 0})),
        (("--timeout", "0"), rejects("--timeout", {"--timeout": 0.0})),
        (("--mask-true", "hides"), rejects("--mask-true", {"--mask-true": "hides"}, hint="shows")),
        (("--mask-name", "veil"), rejects("mask", mask="veil")),
    ],
)
def test_bad_usage_exits_before_tests(project, capsys, options, input_error):
    """Wrong options exit with 2 before the command of the tests, which does not exist, is run."""
    status, _ = project("", *options, command=("no-such-command",))
    assert status == 2
    assert input_error.is_printed_in(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "argument"), [((), "mine.attention:attention"), (("--skip", "rope*"), "--skip")]
)
def test_no_applicable_bug_exits_with_2(project, capsys, monkeypatch, options, argument):
    """If no bug can be injected, the command exits with 2 and lists the reasons."""
    monkeypatch.setattr(
        "parity.explain.mutating.bugs.injections_for",
        lambda view: ([], {"mask-ignored": "it has no mask"}),
    )
    assert project("", *options, command=("no-such-command",))[0] == 2
    assert rejects(argument, "mask-ignored: it has no mask").is_printed_in(capsys.readouterr().err)


@pytest.mark.costly("starts a command that is not there")
def test_missing_test_command_exits_with_2(project, capsys):
    """A command of tests that does not exist exits with 2 and is named."""
    assert project("", "--only", "scale-missing", command=("no-such-command",))[0] == 2
    assert "no-such-command" in capsys.readouterr().err


# ---- In the process of the tests -----------------------------------------------------------------


@pytest.fixture
def injecting(tmp_path, monkeypatch):
    """Return a function that injects a bug into a module's function, and returns it with the
    recorded events.
    """

    def inject_into(function, bug, view):
        module = types.ModuleType("mine")
        module.attention = function
        made = {
            "attribute": "attention",
            "bug": bug,
            "view": asdict(view),
            "record": str(tmp_path / "record"),
        }
        monkeypatch.setattr(record, "order", lambda: made)
        monkeypatch.setattr(inject, "order", lambda: made)
        monkeypatch.setattr(record, "_noted", set())
        inject.inject(module)
        return module.attention, lambda: [event for event, _ in record.events(tmp_path / "record")]

    return inject_into


def test_comparison_has_no_side_effects(injecting):
    """The comparison of a call leaves the random state and the caller's cache as one call would."""
    view = replace(VIEW, order=("q", "k", "v", "cache"), roles={**VIEW.roles, "cache": "cache"})

    def with_cache(q, k, v, cache):
        cache.append(k)
        return attention(q, torch.cat(cache, 2), v) + torch.rand(())

    function, notes = injecting(with_cache, "q-heads-reversed", view)
    cache = []
    torch.manual_seed(0)
    output = function(Q, K, V, cache)
    torch.manual_seed(0)
    torch.testing.assert_close(output, attention(Q.flip(1), K, V) + torch.rand(()))
    assert len(cache) == 1
    assert notes() == ["injected", "called", "reached", "changed"]


def test_uncopyable_argument_is_recorded(injecting):
    """A call with an argument that cannot be copied is recorded as not compared."""

    class Stuck:
        def __deepcopy__(self, memo):
            raise TypeError("it is locked")

    view = replace(VIEW, order=("q", "k", "v", "cache"))
    function, notes = injecting(lambda q, k, v, cache: attention(q, k, v), "scale-missing", view)
    function(Q, K, V, Stuck())
    assert notes() == ["injected", "called", "uncompared", "reached"]


def test_allowed_bugs_are_recorded(injecting):
    """Without a bug, the result is correct, and the bugs that the call allows are recorded."""
    function, _ = injecting(attention, "", VIEW)
    torch.testing.assert_close(
        function(Q, K, V, is_causal=True), attention(Q, K, V, is_causal=True)
    )
    allowed = {more for event, more in record._noted if event == "fits"}
    assert {"causal-ignored", "causal-off-by-one", "scale-missing"} <= allowed
    assert not allowed & {"mask-flipped", "causal-unasked", "kv-heads-tiled", "scale-ignored"}


def test_session_ends_at_a_noticed_bug(injecting, monkeypatch):
    """A failing test ends the session if the bug has changed a result, and not before."""
    function, _ = injecting(attention, "q-heads-reversed", VIEW)
    monkeypatch.setattr(pytest_plugin, "order", record.order)
    monkeypatch.setattr(pytest_plugin, "_sessions", [])
    session = types.SimpleNamespace(shouldfail=False)
    report = types.SimpleNamespace(failed=True, nodeid="test_it")
    pytest_plugin.pytest_sessionstart(session)
    pytest_plugin.pytest_runtest_logreport(report)
    assert not session.shouldfail
    function(Q, K, V)
    pytest_plugin.pytest_runtest_logreport(report)
    assert session.shouldfail


# ---- Verdicts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "events", "verdict"),
    [
        (1, ["reached", "changed", "failed"], Status.NOTICED),
        (1, ["reached", "failed"], Status.UNCHANGED),
        (1, ["reached", "raised", "failed"], Status.REJECTED),
        (1, ["failed"], Status.NOT_REACHED),
        (1, ["reached", "uncompared", "failed"], Status.NOTICED),
        (0, ["reached", "changed"], Status.SURVIVED),
        (0, ["reached", "raised"], Status.SURVIVED),
        (0, ["reached"], Status.UNCHANGED),
        (0, [], Status.NOT_REACHED),
        (None, ["reached", "changed"], Status.TIMED_OUT),
    ],
)
def test_verdict_by_status_and_events(status, events, verdict):
    """Failing tests notice a bug only if it changed a result or could not be compared."""
    result, _ = _result_of(Run(status, [(event, "") for event in events], "", 0.0))
    assert result is verdict


@pytest.mark.costly("starts pytest, as the command does")
def test_a_temporary_folder_may_have_spaces(tmp_path, monkeypatch):
    """A temporary folder with spaces stays one option of pytest,
    which splits its options as a shell does.
    """
    folder = tmp_path / "a folder; $(x)"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    command = ["python", "-c", "import os; print(os.environ['PYTEST_ADDOPTS'])"]
    options = shlex.split(Suite("mine:attention", VIEW, command).run(is_hooked=False).printed)
    assert options[-2] == "-o"
    assert options[-1].startswith(f"cache_dir={folder}/")


@pytest.mark.costly("ends a process that takes too long")
def test_run_beyond_timeout_is_ended():
    """A run of 60 seconds with a timeout of 0.5 ends within 30, without a status."""
    tests = Suite(
        "mine:attention", VIEW, ["python", "-c", "import time; time.sleep(60)"], timeout=0.5
    )
    run = tests.run()
    assert run.status is None
    assert run.seconds < 30


def test_view_of_mha_torch_function():
    """The view of `mha_torch.scaled_dot_product_attention` has its axes, polarity and groups."""
    view = view_of("mha_torch:scaled_dot_product_attention", mask_name="mask")
    assert (view.axes, view.mask_true, view.has_groups, view.is_ours) == (
        "BNTH",
        "hides",
        True,
        True,
    )


def test_traced_call_needs_equal_results():
    """In a traced call, a bug of our implementation is
    injected only if the function agrees with ours.
    """
    view = replace(VIEW, framework="jax")
    q, k, v = (jnp.asarray(x.float().numpy()) for x in (Q, K, V))

    def theirs(q, k, v, factor=1.0):
        return factor * (jax.nn.softmax(q @ k.swapaxes(-1, -2) / 8**0.5) @ v)

    for factor in (1.0, 2.0):
        output = jax.jit(
            lambda q, f=factor: with_bug(
                "softmax-over-heads", q, k, v, view=view, function=lambda *a: theirs(*a, f)
            )
        )(q)
        assert same(output, theirs(q, k, v, factor)) == (factor == 2.0)


@pytest.mark.costly("a signal to a process that runs tests")
@pytest.mark.thorough
def test_interruption_ends_the_tests(tmp_path):
    """An interruption exits with 130 and one line, ends the tests' process and changes no file."""
    (tmp_path / "mine.py").write_text(UNCALLED)
    (tmp_path / "test_mine.py").write_text(
        "import os, pathlib, time\nimport mine\n\ndef test_it():\n"
        "    pathlib.Path('begun').write_text(str(os.getpid()))\n    time.sleep(600)\n"
    )
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    options = ["--only", "scale-missing", "--framework", "torch"]
    arguments = ["mutate", "mine:attention", *options, "--", "pytest", "-q", "test_mine.py"]
    program = (
        "import signal, sys\nfrom parity.use.cli.main import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background is "
        "born without it\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    begun = tmp_path / "begun"
    while (
        not (begun.exists() and begun.read_text())
        and process.poll() is None
        and time.monotonic() < began + 300
    ):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=120)
    assert process.returncode == 130, printed
    assert printed == "mha-parity: interrupted\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path != begun} == before


@pytest.mark.thorough
def test_pytest_options_and_xdist_workers(project, capsys):
    """Options reach pytest, and a bug is noticed in an xdist worker by the selected test."""
    tests = GOOD.replace("test_values", "test_one") + GOOD.replace("test_values", "test_two")
    command = ("pytest", "-x", "-p", "xdist", "-n", "1", "-k", "two", "test_mine.py")
    status, outcomes = project(tests, "--only", "scale-missing", command=command)
    assert status == 0
    assert (outcomes["scale-missing"]["status"], outcomes["scale-missing"]["by"]) == (
        "noticed",
        "test_mine.py::test_two",
    )
    assert "1 bug injected: 1 noticed" in capsys.readouterr().out


@pytest.mark.thorough
def test_impossible_bugs_are_not_test_gaps(project, capsys):
    """Bugs that a layer does not allow are listed as not injected, with
    status 0; selecting only these exits with 2.
    """
    tests = """
    import unittest, torch
    from mine.attention import Layer

    class Tests(unittest.TestCase):
        def test_layer(self):
            torch.manual_seed(0)
            layer, x = Layer(4), torch.randn(2, 3, 4)
            expected = torch.softmax(layer.q_proj(x) @ layer.k_proj(x).mT / 2, -1) @ x
            everything = torch.ones(3, 3, dtype=torch.bool)
            self.assertTrue(torch.allclose(layer(x, attn_mask=everything), expected, atol=1e-6))
    """
    command, target = ("python", "-m", "unittest", "test_mine"), "mine.attention:Layer"
    only = "q_proj-transposed,batch-as-tokens,out_proj-*,rope-theta-*"
    status, outcomes = project(tests, "--only", only, command=command, target=target)
    printed = " ".join(capsys.readouterr().out.split())
    assert status == 0
    assert {
        name: (outcome["status"], outcome["by"].split(":")[0]) for name, outcome in outcomes.items()
    } == {
        "q_proj-transposed": ("noticed", "exit status 1"),
        "batch-as-tokens": ("rejected", "RuntimeError"),
    }
    assert (
        "not injected, no out_proj is known among its weights: out_proj-transposed, "
        "out_proj-bias-missing" in printed
    )
    assert json.loads(pathlib.Path("found.json").read_text())["not_injected"].keys() == {
        *("out_proj-transposed", "out_proj-bias-missing", "rope-theta-10000", "rope-theta-500000"),
    }
    status, _ = project(tests, "--only", "out_proj-*", command=command, target=target)
    assert status == 2
    assert rejects("--only", "out_proj-transposed: ").is_printed_in(capsys.readouterr().err)
