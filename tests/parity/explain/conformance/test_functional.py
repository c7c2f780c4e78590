"""Functions of weights and inputs, `attention(params, x)`: in `conformance`, `mutate` and
`diagnose`.
"""

import json
import sys
import textwrap

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers.input_errors import Misuse, rejects

import parity
from mha_spec import AttentionSpec, InputError
from parity.explain.conformance.discover import framework_of
from parity.explain.conformance.examine import examine
from parity.explain.conformance.functional import with_params
from parity.explain.mutating.bugs import injections_for
from parity.explain.mutating.calls import Call
from parity.explain.mutating.view import view_of
from parity.use.cli.main import main

WIDTH, HEADS = 16, 2


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32) / WIDTH**0.5


FUSED = {
    "c_attn": {"w": draw(WIDTH, 3 * WIDTH), "b": draw(3 * WIDTH)},
    "c_proj": {"w": draw(WIDTH, WIDTH)},
}
APART = {
    name: {"kernel": draw(WIDTH, WIDTH) + 0.01 * i, "bias": draw(WIDTH)}
    for i, name in enumerate(("q_proj", "k_proj", "v_proj", "out_proj"))
}


def attend(q, k, v, mask=None):
    q, k, v = (x.reshape(*x.shape[:2], HEADS, -1) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, mask=mask).reshape(*q.shape[:2], -1)


def fused(p, x):
    qkv = x @ p["c_attn"]["w"] + p["c_attn"]["b"]
    return attend(*jnp.split(qkv, 3, -1)) @ p["c_proj"]["w"]


def apart(x, layer, mask=None):
    q, k, v = (
        x @ layer[name]["kernel"] + layer[name]["bias"] for name in ("q_proj", "k_proj", "v_proj")
    )
    return attend(q, k, v, mask) @ layer["out_proj"]["kernel"] + layer["out_proj"]["bias"]


class Linen(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x, mask=None):
        return flax.linen.MultiHeadDotProductAttention(HEADS)(x, mask=mask)


LINEN = Linen()


def variables():
    return LINEN.init(jax.random.key(0), jnp.zeros((1, 2, WIDTH)))


def of_torch(weights, x):
    q, k, v = (torch.nn.functional.linear(x, weights[name])[:, None] for name in "qkv")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]


@pytest.mark.parametrize("target", [fused, apart, jax.jit(apart), LINEN, LINEN.apply, of_torch])
def test_missing_params_raise_an_error(target):
    """A function of weights without `params` raises an error that names the argument."""
    with pytest.raises(InputError) as caught:
        examine(target, framework="torch" if target is of_torch else "jax")
    assert (caught.value.argument, caught.value.remedy.keys()) == ("params", {"params"})


@pytest.mark.parametrize(
    ("target", "params", "mask"),
    [
        (fused, FUSED, "—"),
        (jax.jit(apart), APART, "True shows; floats rejected"),
        pytest.param(
            LINEN,
            lambda: variables()["params"],
            "True shows; floats as booleans",
            marks=pytest.mark.thorough,
        ),
        (of_torch, {name: torch.from_numpy(draw(WIDTH, WIDTH)) for name in "qkv"}, "—"),
    ],
    ids=["fused", "apart", "linen", "torch"],
)
def test_function_is_examined_with_params(target, params, mask):
    """A function with its weights attends to all tokens, with the expected answer about masks."""
    params = params() if callable(params) else params
    framework = "torch" if target is of_torch else "jax"
    examination = examine(
        target, ["attends", "mask"], ["bfloat16"], params=params, framework=framework
    )
    assert [answer.words for answer in examination.answers] == ["to all tokens", mask]


@pytest.mark.parametrize(
    ("target", "params"),
    [
        (fused, {}),
        (fused, {"name": "none"}),
        (lambda x: x, FUSED),
        (Linen, FUSED),
        (torch.nn.Linear(2, 2), FUSED),
    ],
)
def test_unsuitable_params_raise_an_error(target, params):
    """Empty or non-numeric weights, and targets that do not
    accept any, raise an error about `params`.
    """
    with pytest.raises(InputError) as caught:
        with_params(target, params, "mine")
    assert caught.value.argument == "params"


def test_unknown_width_requires_d_model():
    """A function whose width is not found raises an error that
    suggests `d_model`, which then suffices.
    """
    weights = torch.from_numpy(draw(WIDTH, WIDTH))

    def self_attention(x):
        return torch.softmax(x @ weights @ x.mT, -1) @ x

    with pytest.raises(InputError) as caught:
        examine(self_attention, ["attends"], framework="torch")
    assert "d_model" in caught.value.remedy
    examination = examine(
        self_attention, ["attends"], ["float32"], framework="torch", d_model=WIDTH
    )
    assert examination["attends"].words == "to all tokens"


# ---- Modules of a user ---------------------------------------------------------------------------

HELPERS = """
import jax

def attend(q, k, v):
    q, k, v = (x.reshape(*x.shape[:2], 2, -1) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v).reshape(*q.shape[:2], -1)
"""

MINE = """
import numpy as np
from mine_helpers import attend

def attention(layer, x, num_heads=2, mask=None):
    q, k, v = (x @ layer["attn"][i]["kernel"] for i in range(3))
    return attend(q, k, v)

def named(p, x):
    return attend(*(x @ p[name] for name in ("q_proj.kernel", "k_proj.kernel", "v_proj.kernel")))

weights = np.load("weights.npy")
NAMED = dict(zip(("q_proj.kernel", "k_proj.kernel", "v_proj.kernel"), weights))

def params():
    return NAMED
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write two modules of a user, one of which imports JAX only through the other."""
    (tmp_path / "mine_helpers.py").write_text(HELPERS)
    (tmp_path / "mine_functional.py").write_text(textwrap.dedent(MINE))
    np.save(
        tmp_path / "weights.npy",
        [draw(WIDTH, WIDTH), draw(WIDTH, WIDTH) + 0.1, draw(WIDTH, WIDTH) + 0.2],
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("mine_helpers", "mine_functional"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("own")
def test_weights_are_distinct_from_query():
    """The query is `x`, and the first argument with names of
    projections has the role of weights.
    """
    for name, weights in (("named", "p"), ("attention", "layer")):
        view = view_of(f"mine_functional:{name}", mask_name="mask" if name == "attention" else "")
        assert (view.framework, view.roles["query"], view.projections) == ("jax", "x", True)
        assert view.roles["weights"] == weights
        assert "--params" in view.note
    assert view_of("mine_functional:named", params=weights_of_mine()).note == ""


def weights_of_mine():
    return sys.modules["mine_functional"].NAMED


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("is_nested", [False, True])
def test_bug_is_injected_into_passed_weights(is_nested):
    """Swapped keys and values change the weights that a call
    passes, nested or flat, but not the originals.
    """
    view = view_of("mine_functional:named")
    named = {name: jnp.asarray(x) for name, x in weights_of_mine().items()}
    params = (
        [{"attn": {name.split(".")[0]: {"kernel": x} for name, x in named.items()}}]
        if is_nested
        else named
    )

    def function(call):
        weights = call.get("weights")
        return weights[0]["attn"]["k_proj"]["kernel"] if is_nested else weights["k_proj.kernel"]

    buggy_call = injections_for(view)[0]["k-v-swapped"].make(
        Call(view, (params, jnp.ones((1, 2, WIDTH))), {})
    )
    np.testing.assert_array_equal(buggy_call.run(function), named["v_proj.kernel"])
    np.testing.assert_array_equal(function(Call(view, (params, None), {})), named["k_proj.kernel"])


@pytest.mark.usefixtures("own")
def test_mutate_finds_module_of_apply():
    """`LINEN.apply` with parameters is viewed as a module in JAX whose mask shows keys by True."""
    sys.modules["mine_functional"] = sys.modules[__name__]
    view = view_of("mine_functional:LINEN.apply", params=variables())
    assert (view.is_module, view.framework, view.mask_true, view.note) == (True, "jax", "shows", "")


def test_framework_is_found_by_params():
    """The framework of a function is its weights', torch or JAX."""

    def function(params, x):
        return params, x

    assert framework_of(with_params(function, {"w": torch.ones(1)}, "mine")) == "torch"
    assert framework_of(with_params(function, {"w": jnp.ones(1)}, "mine")) == "jax"


# ---- The command line ----------------------------------------------------------------------------


def test_conformance_accepts_params(own, capsys):
    """`conformance` requires `--params` for a function of weights and accepts a function or name;
    wrong ones exit with 2 and one line.
    """
    arguments = [
        "conformance",
        "mine_functional:named",
        "--checks",
        "attends",
        "--dtypes",
        "float32",
    ]
    assert main(arguments) == 2
    assert rejects("--params", remedy={"--params": ...}).is_printed_in(capsys.readouterr().err)
    assert main([*arguments, "--params", "mine_functional:params", "--json", "found.json"]) == 0
    (subject,) = json.loads((own / "found.json").read_text())["subjects"]
    assert [answer["words"] for answer in subject["answers"]] == ["to all tokens"]
    for wrong in (
        "weights",
        "mine_functional:nothing",
        "mine_functional:attend",
        "mine_functional:np",
    ):
        assert main([*arguments, "--params", wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_diagnose_accepts_params(own, capsys):
    """`diagnose` passes `--params` to a function of weights, else the weights of the file, by names
    of the canonical layout that this function does not know; it rejects `--params` for two files.
    """
    q, k, v = np.load("weights.npy")
    weights = {
        "q_proj.weight": q.T,
        "k_proj.weight": k.T,
        "v_proj.weight": v.T,
        "out_proj.weight": np.eye(WIDTH),
    }
    spec = AttentionSpec(WIDTH, HEADS, qkv_bias=False, out_bias=False)
    parity.save(
        "w.safetensors",
        {name: np.array(x, np.float32, order="C") for name, x in weights.items()},
        spec,
    )
    arguments = ["diagnose", "mine_functional:named", "--weights", "w.safetensors", "--no-causal"]
    assert main(arguments) == 2
    input_error = rejects("the function", "KeyError: ", hint="has q_proj.weight, k_proj.weight")
    assert input_error.is_printed_in(capsys.readouterr().err)
    assert main([*arguments, "--params", "mine_functional:NAMED"]) == 0
    assert (
        main(["diagnose", "w.safetensors", "w.safetensors", "--params", "mine_functional:NAMED"])
        == 2
    )
    assert Misuse("--params requires MODULE:FUNCTION").is_printed_in(capsys.readouterr().err)
