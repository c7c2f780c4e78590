"""Reports of `conformance`: no fault in our attention, and each injected one. tests/nightly has
other libraries.
"""

import collections
import functools
import importlib
import json
from dataclasses import replace

import equinox
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from helpers.input_errors import Misuse, rejects
from helpers.samples import sample

import mha_torch
from parity.explain.conformance import peers
from parity.explain.conformance.answers import Kind, PathAnswer
from parity.explain.conformance.calls import run
from parity.explain.conformance.examine import examine
from parity.explain.conformance.functional import with_leaves
from parity.explain.conformance.peers import PEERS, peer
from parity.explain.conformance.questions import QUESTIONS
from parity.explain.conformance.rules import by_rule
from parity.explain.conformance.subjects import DTYPES, Path, Subject
from parity.use.cli.main import main


@functools.cache
def answer_of(name, question):
    """Return the answer of an attention in PEERS."""
    return examine(peer(name), [question])[question]


@pytest.fixture
def fewer_paths_of_jax(monkeypatch):
    """Examine JAX, which takes ten times as long, on every pair of path options, not on every
    combination.

    So only a fault that needs three of weights, gradients and mode stays unseen here; test_run
    compares the stages.
    """
    every_path = Subject.paths

    def paths(self, dtypes=DTYPES):
        for path in every_path(self, dtypes):
            turned = (
                path.need_weights,
                path.grad,
                path.train,
                path.dropout > 0.0,
                path.dtype != dtypes[0],
            )
            if self.framework != "jax" or sum(turned) % 2 == 0:
                yield path

    monkeypatch.setattr(Subject, "paths", paths)


def test_nan_row_example_reproduces():
    """The example of an empty row names its path, and torch's
    layer is NaN there, without gradients only.
    """
    answer = answer_of("torch.nn.MultiheadAttention", "empty row")
    assert "float32, eval, no grad, without weights" in answer.example
    first, *lines = answer.example.splitlines()
    assert first == f"torch.nn.MultiheadAttention, empty row: {answer.words}"
    assert [line.split()[0] for line in lines[:4]] == ["check", "input", "path", "result"]
    assert any(character.isdigit() for character in lines[3])
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 5, 32)).astype(np.float32))
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[1] = True
    with torch.no_grad():
        assert layer(x, x, x, attn_mask=mask, need_weights=False)[0][:, 1].isnan().all()
    assert layer(x, x, x, attn_mask=mask, need_weights=False)[0].isfinite().all()


def test_future_token_example_reproduces():
    """The example of a future token names `is_causal`, which
    torch's layer ignores without gradients.
    """
    answer = answer_of("torch.nn.MultiheadAttention", "future token")
    assert "with is_causal=True" in answer.example
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 5, 32)).astype(np.float32))
    with torch.no_grad():
        causal, full = (
            layer(x, x, x, need_weights=False, is_causal=is_causal)[0]
            for is_causal in (True, False)
        )
    assert torch.equal(causal, full)
    with pytest.raises(RuntimeError, match="attn_mask"):
        layer(x, x, x, need_weights=False, is_causal=True)


def test_documented_behavior_is_a_note():
    """Torch's documented hint `is_causal` is a note, though answers differ between paths."""
    answer = answer_of("torch.nn.MultiheadAttention", "causal and mask")
    assert (answer.status, answer.words) == ("note", "the flag is only a hint, as documented")
    assert len(set(answer.by_path.values())) > 1


# Layers of mha_jax answer like the layers of mha_torch, and test_run, test_cache_mha and test_fused
# compare both: here only the layer with a cache, and the fused path.
IN_JAX = ["mha_jax.MultiHeadAttentionWithCache", "mha_jax.fused", "mha_jax.contained"]
NAN_SEEN = ("propagates", "as in the framework, as documented")
OURS = [*IN_JAX, *(name for name in PEERS if name.startswith("mha_torch"))]


@sample(where=lambda name: name not in IN_JAX and "Self" not in name)
@pytest.mark.usefixtures("fewer_paths_of_jax")
@pytest.mark.parametrize("name", OURS)
def test_our_attention_has_no_fault(name):
    """Our attention has no broken guarantee, and the expected answer to each question."""
    # In one half precision, float16, whose range is smaller: JAX compiles everything again for each
    # dtype. test_run also compares the stages in bfloat16, and in cases with NaN.
    examination = examine(peer(name), dtypes=("float32", "float16"))
    assert [(answer.question, answer.status, answer.words) for answer in examination.broken] == []
    notes = {answer.question for answer in examination.answers if answer.status == "note"}
    assert notes <= {"visible NaN", "hidden NaN"}
    assert {answer.status for answer in examination.answers} <= {"ok", "absent", "note"}
    is_cached = name.endswith("WithCache")
    words = {answer.question: answer.words for answer in examination.answers}
    assert words["attends"] == ("causally" if is_cached else "to all tokens")
    assert words["mask"] == "True hides; floats rejected"
    is_of_one_input = name.endswith(("SelfAttention", "contained"))
    assert words["causal"] == (
        "—" if is_cached else "T = S only" if is_of_one_input else "top-left"
    )
    assert words["causal and mask"] == "both"
    assert words["padding"] == "by lengths"
    assert words["visible NaN"] in NAN_SEEN
    # No NaN leaks from padding. With a cache, each way to hide keys is also causal.
    is_contained = name.endswith("contained")
    assert words["hidden NaN"] == (
        "hidden" if is_contained else "leaks" if is_cached else "leaks (mask, flag)"
    )
    assert words["empty row"] == "zeros"
    assert words["weights"] == {"MultiHeadAttention": "per head", "fused": "rejected"}.get(
        name.split(".")[1], "—"
    )
    assert words["grouped heads"] == "repeat"
    assert words["float16 overflow"] == "finite"
    assert words["cache"] == ("equals one pass; overflow rejected" if is_cached else "—")


@pytest.mark.parametrize("name", [name for name in OURS if name.endswith("Attention")])
def test_our_layers_receive_own_parameters(name, monkeypatch):
    """Our layers are called with their own parameters `is_causal`
    and `key_padding_lengths`, and no others.
    """
    package, kind = name.split(".")
    subject = peer(name)
    layer = getattr(importlib.import_module(package), kind)
    method = "forward" if package == "mha_torch" else "__call__"
    called, received = getattr(layer, method), []

    def spy(self, *inputs, **options):
        received.append({option: value for option, value in options.items() if value is not None})
        return called(self, *inputs, **options)

    monkeypatch.setattr(layer, method, spy)
    x = np.ones((2, 5, 32))
    run(subject, Path(), (x, x, x), is_causal=True)
    run(subject, Path(), (x, x, x), padding=np.array([5, 3], np.int32))
    assert [list(options) for options in received] == [["is_causal"], ["key_padding_lengths"]]


# ---- Controls: attention with one fault each -----------------------------------------------------


def toy(framework, fault=""):
    """Return attention of split heads, (B, N, T, H), with True = masked, correct except for the
    fault.
    """
    if framework == "torch":
        xp, array, softmax = torch, torch.from_numpy, torch.softmax
    else:
        xp, array, softmax = jnp, jnp.asarray, jax.nn.softmax

    def cast(x, like):
        return x.to(like.dtype) if framework == "torch" else x.astype(like.dtype)

    def attention(
        query,
        key,
        value,
        mask=None,
        is_causal=False,
        need_weights=False,
        key_padding_mask=None,
        dropout_rate=0.0,
        deterministic=True,
        rng=None,
    ):
        n, (t, s) = query.shape[1], (query.shape[2], key.shape[2])
        if fault == "strided":  # reads the memory as if it were contiguous
            value = torch.as_strided(value, value.shape, torch.empty(value.shape).stride())
        heads = (
            np.arange(n) % key.shape[1] if fault == "tiled" else np.arange(n) // (n // key.shape[1])
        )
        q, k, v = query, key[:, heads], value[:, heads]
        bad = ~xp.isfinite(k + v).all(-1)[:, :, None]  # (B, N, 1, S)
        if fault == "careful":
            k, v = (xp.where(bad[:, :, 0, :, None], 0.0, x) for x in (k, v))
        if fault != "narrow":
            q, k, v = (cast(x, array(np.zeros(1, np.float32))) for x in (q, k, v))
        scores = xp.einsum("bnth,bnsh->bnts", q, k)
        scores = scores * (1.0 if fault == "scale" else q.shape[-1] ** -0.5)
        hidden = array(np.zeros((1, 1, t, s), bool))
        if mask is not None and mask.dtype != hidden.dtype:
            raise TypeError(f"mask of {mask.dtype}")
        if mask is not None and not (fault == "causal drops mask" and is_causal):
            hidden = hidden | (~mask if fault == "flipped" else mask)
        if is_causal and not (fault == "future" and need_weights):
            hidden = hidden | array(
                ~np.tri(t, s, s - t if fault == "bottom-right" else 0, dtype=bool)
            )
        if key_padding_mask is not None and fault != "padding":
            padding = key_padding_mask[:1] if fault == "padding of all" else key_padding_mask
            hidden = hidden | padding[:, None, None]
        if fault == "penalty":
            attn_weights = softmax(scores - 1e4 * cast(hidden, scores), -1)
        elif fault == "nan":
            attn_weights = softmax(xp.where(hidden, -xp.inf, scores), -1)
        elif fault == "gradient":  # the values are fixed, their gradients are not
            attn_weights = softmax(scores + xp.where(hidden, -xp.inf, 0.0), -1)
            attn_weights = xp.where(xp.isnan(attn_weights), 0.0, attn_weights)
        else:
            attn_weights = softmax(
                xp.where(hidden, -1e4 if fault == "narrow" else -1e30, scores), -1
            )
            attn_weights = attn_weights if fault == "mean" else xp.where(hidden, 0.0, attn_weights)
        used = attn_weights
        if dropout_rate and (not deterministic or fault == "eval"):
            drawn = (
                torch.rand(used.shape)
                if framework == "torch"
                else jax.random.uniform(jax.random.key(0), used.shape)
            )
            used = xp.where(drawn < dropout_rate, 0.0, used / (1.0 - dropout_rate))
        context = xp.einsum("bnts,bnsh->bnth", used, v)
        if fault == "careful":
            context = xp.where((bad & ~hidden).any(-1)[..., None], xp.nan, context)
        if fault == "swallowed" or (fault == "swallowed when long" and s > 512):
            context = xp.nan_to_num(context)
        if fault == "batch":
            context = context + 0.01 * xp.flip(context, (0,))
        if fault == "other weights":
            attn_weights = softmax(3.0 * xp.where(hidden, -1e30, scores), -1)
        return cast(context, query), (cast(attn_weights, query) if need_weights else None)

    return attention


CONTROLS = [
    ("future", "future token", "hidden without weights, otherwise leaks"),
    ("flipped", "mask", "True shows, declared: hides"),
    ("bottom-right", "causal", "bottom-right, declared: top-left"),
    ("penalty", "masked key", "hidden in float16, otherwise a finite penalty of about -10000"),
    ("penalty", "causal", "top-left, by a finite penalty of about -10000"),
    (
        "penalty",
        "causal and mask",
        "both in float16, otherwise mask by a finite penalty of about -10000",
    ),
    ("penalty", "future token", "hidden in float16, otherwise a finite penalty of about -10000"),
    ("penalty", "padding", "True hides in float16, otherwise True hides, by a finite penalty"),
    ("penalty", "empty row", "as if unmasked"),
    ("causal drops mask", "causal and mask", "mask dropped"),
    ("batch", "other sequence", "leaks"),
    ("nan", "empty row", "NaN"),
    ("nan", "empty row gradient", "NaN even if the loss ignores it"),
    ("gradient", "empty row gradient", "NaN even if the loss ignores it"),
    ("eval", "dropout", "dropped in eval"),
    ("scale", "scale", "1 (none)"),
    ("other weights", "weights", "not those used"),
    ("padding", "padding", "leaks"),
    ("padding of all", "padding", "leaks"),
    ("narrow", "float16 overflow", "NaN"),
    ("gradient", "visible NaN", "swallowed"),
    ("swallowed", "visible NaN", "swallowed"),
    ("swallowed when long", "visible NaN", "propagates; swallowed with 600 tokens"),
]

FAULTS_IN_JAX = [
    ("future", "future token"),
    ("flipped", "mask"),
    ("bottom-right", "causal"),
    ("penalty", "masked key"),
    ("causal drops mask", "causal and mask"),
    ("batch", "other sequence"),
    ("nan", "empty row"),
    ("gradient", "empty row gradient"),
    ("eval", "dropout"),
    ("scale", "scale"),
    ("other weights", "weights"),
    ("padding", "padding"),
    ("narrow", "float16 overflow"),
]


def examine_toy(framework, fault, questions=None):
    declared = {"framework": framework, "mask_true": "hides", "causal": "top-left"}
    dtypes = DTYPES if fault in ("", "penalty", "narrow") else ("float32",)
    if framework == "jax" and not fault:  # JAX compiles everything again for each dtype
        dtypes = ("float32", "float16")
    return examine(toy(framework, fault), questions, dtypes, **declared)


@pytest.mark.usefixtures("fewer_paths_of_jax")
@pytest.mark.parametrize(
    ("framework", "fault", "question", "words"),
    [
        pytest.param(
            framework,
            *control,
            id=f"{framework}-{control[0]}-{control[1]}",
            marks=pytest.mark.thorough
            if framework == "jax" and control[0] not in ("flipped", "gradient")
            else (),
        )
        for framework in ("torch", "jax")
        for control in CONTROLS
        # Questions do not depend on the framework: with JAX, which takes ten times as long, each
        # has one fault. NaN is examined there in attention without a fault, and in one that hides
        # NaN with care.
        if framework == "torch" or control[:2] in FAULTS_IN_JAX
    ],
)
def test_a_fault_is_found_and_named(framework, fault, question, words):
    """A fault breaks the guarantee of its question, in the expected words, with an example."""
    answer = examine_toy(framework, fault, [question])[question]
    assert answer.is_broken
    assert words in answer.words
    assert question in answer.example


@pytest.mark.usefixtures("fewer_paths_of_jax")
@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.thorough)])
def test_correct_attention_has_no_fault(framework):
    """Correct attention has no broken guarantee and the
    expected answers; NaN of hidden keys is a note.
    """
    examination = examine_toy(framework, "")
    assert [(answer.question, answer.words) for answer in examination.broken] == []
    words = {answer.question: answer.words for answer in examination.answers}
    assert words["mask"] == "True hides; floats rejected"
    assert words["causal"] == "top-left"
    assert words["empty row"] == "zeros"
    assert words["weights"] == "per head"
    assert words["padding"] == "True hides"
    assert words["dropout"] == "train only"
    assert words["grouped heads"] == "repeat"
    assert words["attends"] == "to all tokens"
    assert words["visible NaN"] == "propagates"
    assert (examination["hidden NaN"].status, words["hidden NaN"]) == ("note", "leaks")


@pytest.mark.usefixtures("fewer_paths_of_jax")
@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.thorough)])
def test_careful_attention_hides_nan(framework):
    """Attention that removes NaN of hidden keys is reported to
    hide it, and NaN of visible keys is seen.
    """
    examination = examine_toy(framework, "careful", ["visible NaN", "hidden NaN"])
    assert [answer.words for answer in examination.answers] == ["propagates", "hidden"]


def test_promised_convention_can_be_broken():
    """A convention that is promised and not met is a broken guarantee."""
    ours = replace(peer("F.scaled_dot_product_attention"), promises=frozenset({"hidden NaN"}))
    answer = examine(ours, ["hidden NaN"], ["float32"])["hidden NaN"]
    assert (answer.status, answer.words) == ("broken", "leaks")


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize(
    ("fault", "question", "words"),
    [("tiled", "grouped heads", "tile"), ("mean", "empty row", "mean(V)")],
)
def test_different_convention_is_a_note(framework, fault, question, words):
    """Tiled groups, and the mean of values for an empty row, are notes."""
    answer = examine_toy(framework, fault, [question])[question]
    assert (answer.status, answer.words) == ("note", words)


def test_ignored_strides_are_found():
    """Attention that ignores strides has a different result for strided inputs."""
    assert (
        examine_toy("torch", "strided", ["strided inputs"])["strided inputs"].words
        == "a different result"
    )


def shifted(decode, x, capacity, is_causal):
    """Decode with the first token twice, as if the cache were off by one."""
    return decode(np.concatenate([x[:, :1], x], axis=1), capacity + 1, is_causal)[:, 1:]


def test_a_cache_that_is_off_by_one_is_found():
    """Decoding with a cache that is off by one breaks the guarantee that it equals one pass."""
    ours = peer("mha_torch.MultiHeadAttentionWithCache")
    subject = replace(ours, decode=functools.partial(shifted, ours.decode))
    answer = examine(subject, ["cache"])["cache"]
    assert answer.is_broken
    assert answer.words.startswith("not one pass")


# ---- A user's own layers -------------------------------------------------------------------------


class TorchLayer(torch.nn.Module):
    """Self-attention with a flag, and a width that is not declared."""

    def __init__(self, leaks=False):
        super().__init__()
        self.qkv = torch.nn.Linear(24, 72)
        self.leaks = leaks

    def forward(self, x, causal=False):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
        causal = causal and not (self.leaks and not self.training)
        context = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return context.transpose(1, 2).flatten(-2)


def test_torch_class_is_examined():
    """A class of torch is instantiated, its width is found, and no guarantee is broken."""
    examination = examine(TorchLayer)
    assert examination.framework == "torch"
    assert examination.broken == []
    assert examination["future token"].words == "hidden"
    assert examination["causal"].words == "T = S only"


def test_leak_in_eval_mode_is_named():
    """A causal flag that is ignored in evaluation is reported to leak in that mode only."""
    assert (
        examine(TorchLayer(leaks=True), ["future token"])["future token"].words
        == "leaks in eval, otherwise hidden"
    )


@pytest.mark.parametrize(
    ("where", "words"), [("train", "train only"), ("always", "random in eval")]
)
def test_undeclared_dropout_is_found(where, words):
    """Undeclared dropout is reported as in training only, or as random in evaluation."""

    class Dropping(TorchLayer):
        def forward(self, x):
            return torch.nn.functional.dropout(
                super().forward(x), 0.5, where == "always" or self.training
            )

    assert examine(Dropping, ["dropout"], ["float32"])["dropout"].words.startswith(words)


class OwnDropout(TorchLayer):
    """A layer with its own dropout rate, which applies in training, or wrongly always."""

    def __init__(self, always=False):
        super().__init__()
        self.always = always

    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.1, self.always or self.training)


def test_own_dropout_breaks_no_path():
    """A layer's own dropout in training breaks no guarantee, and its paths agree."""
    examination = examine(OwnDropout(), ["dropout", "paths"])
    assert [(answer.status, answer.words) for answer in examination.answers] == [
        ("ok", "train only"),
        ("ok", "agree"),
    ]


def test_dropout_in_eval_breaks_guarantees():
    """Dropout in evaluation breaks the guarantees of dropout
    and of paths; the fixed layer breaks fewer.
    """
    wrong, right = examine(OwnDropout(always=True)), examine(OwnDropout())
    assert {"dropout", "paths"} <= {answer.question for answer in wrong.broken}
    assert len(wrong.broken) > len(right.broken)
    assert "from one call to the next" in wrong["paths"].example


def test_torch_module_answers_as_listed():
    """An instance of torch's layer has the answers of its entry in PEERS to four questions."""
    module = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    questions = ["mask", "empty row", "future token", "padding"]
    examination, expected = (
        examine(module, questions),
        examine(peer("torch.nn.MultiheadAttention"), questions),
    )
    assert [examination[question].words.split(";")[0] for question in questions] == [
        expected[question].words.split(";")[0] for question in questions
    ]


@pytest.mark.thorough
def test_flax_module_is_examined():
    """`nnx.MultiHeadAttention` shows keys by True, is top-left causal, and
    has the mean of values for an empty row.
    """
    module = nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0))
    examination = examine(module, ["mask", "causal", "empty row"], ("float32", "float16"))
    assert [answer.words for answer in examination.answers] == [
        "True shows; floats as booleans",
        "top-left",
        "mean(V)",
    ]


class FlaxLayer(nnx.Module):
    """Self-attention whose width only its parameters show."""

    def __init__(self):
        self.attention = nnx.MultiHeadAttention(4, 24, decode=False, rngs=nnx.Rngs(0))

    def __call__(self, x, mask=None):
        return self.attention(x, mask=mask)


@pytest.mark.thorough
def test_flax_class_is_examined():
    """A class of nnx is instantiated, its width is found, and sequences stay apart."""
    examination = examine(FlaxLayer, ["mask", "other sequence"], ["float32"])
    assert [answer.words for answer in examination.answers] == [
        "True shows; floats as booleans",
        "independent",
    ]


@pytest.mark.thorough
def test_equinox_module_is_examined():
    """Equinox's layer, which runs one sequence, is mapped over
    batches, whose sequences stay apart.
    """
    module = equinox.nn.MultiheadAttention(4, 32, key=jax.random.key(0))
    examination = examine(module, ["mask", "other sequence", "empty row"], ("float32", "float16"))
    assert [answer.words for answer in examination.answers] == [
        "True shows; floats as booleans",
        "independent",
        "mean(V)",
    ]


def test_linen_module_requires_params():
    """A linen module without parameters raises a `TypeError` about `params`."""
    with pytest.raises(TypeError) as caught:
        examine(flax.linen.MultiHeadDotProductAttention(4))
    assert caught.value.argument == "params"


@pytest.mark.parametrize("swap", [False, True], ids=["BNTH", "BTNH"])
def test_order_of_axes_is_detected(swap):
    """Both orders of heads and tokens are detected: no guarantee
    is broken, and groups are found.
    """
    attention = toy("torch")

    def swapped(query, key, value, mask=None):
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        return attention(*heads_first, mask=mask)[0].transpose(1, 2)

    examination = examine(
        swapped if swap else attention, ["mask", "future token", "grouped heads"], framework="torch"
    )
    assert examination.broken == []
    assert examination["grouped heads"].words == "repeat"


def plain_attention(x):
    return torch.softmax(x @ x.mT, -1) @ x


class Callable:
    """A callable object that is not a module of a library."""

    def __call__(self, query, key, value):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize(
    ("target", "scale"),
    [(plain_attention, "—"), (Callable, "1/sqrt(H)"), (Callable(), "1/sqrt(H)")],
)
def test_callables_and_classes_are_examined(target, scale):
    """Functions without heads, callable objects and their classes are examined."""
    examination = examine(target, ["other sequence", "scale"], framework="torch")
    assert [answer.words for answer in examination.answers] == ["independent", scale]


def identity(x):
    return x


def only_values(query, key, value):
    return value


def mean_of_values(query, key, value):
    return value.mean(-2, keepdim=True).expand(value.shape)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (identity, "to no other token"),
        (only_values, "to no other token"),
        (mean_of_values, "query ignored"),
    ],
)
def test_function_without_attention_fails(target, words):
    """A function that ignores other tokens or the query breaks the guarantee to attend."""
    declared = {} if target is identity else {"axes": "BNTH"}
    (answer,) = examine(target, framework="torch", dtypes=["float32"], **declared).broken[:1]
    assert (answer.question, answer.words) == ("attends", words)


def transposed(query, key, value):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value).mT


def rounded(query, key, value):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value).int()


def nothing(query, key, value):
    torch.nn.functional.scaled_dot_product_attention(query, key, value)


def misspelt(query, key, value):
    return scaled_dot_product_atention(query, key, value)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


@pytest.mark.parametrize(
    ("target", "input_error"),
    [
        (
            transposed,
            rejects("transposed", "the output is of shape (2, 4, 8, 5), not (2, 4, 5, 8)"),
        ),
        (rounded, rejects("rounded", "the output is of dtype int32, which is not floating point")),
        (nothing, rejects("nothing", "the output is not an array but NoneType")),
        (
            misspelt,
            rejects("misspelt", "NameError: name 'scaled_dot_product_atention' is not defined"),
        ),
    ],
)
def test_invalid_output_raises_an_error(target, input_error):
    """A wrong shape or dtype, no output, or a `NameError` raises an error that names it."""
    with input_error:
        examine(target, framework="torch", axes="BNTH")


def test_name_error_on_one_path_is_broken():
    """A `NameError` with a mask breaks the guarantee of both questions about masks, and is kept."""

    def attention(query, key, value, mask=None):
        if mask is not None:
            mask = masks.invert(mask)  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    examination = examine(attention, ["mask", "masked key"], ["float32"], framework="torch")
    assert [(answer.status, answer.words) for answer in examination.answers] == [
        ("broken", "NameError")
    ] * 2
    assert "NameError: name 'masks' is not defined" in examination["mask"].example
    assert [(answer.kind, type(answer.exception)) for answer in examination.answers] == [
        (Kind.BROKEN, NameError)
    ] * 2


def test_name_error_outranks_dropout_note():
    """A `NameError` on one path breaks the guarantee of dropout, though other paths have a note."""

    def attention(query, key, value, dropout_p=0.0):
        if dropout_p and query.requires_grad:
            dropout_p = rate  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
        weights = torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1)
        is_kept = torch.rand_like(weights[:1]) >= dropout_p  # one mask for the batch
        return weights * is_kept @ value

    answer = examine(attention, ["dropout"], ["float32"], framework="torch")["dropout"]
    assert (answer.kind, type(answer.exception)) == (Kind.BROKEN, NameError)
    assert {finding.kind for finding in answer.findings.values()} == {
        Kind.OK,
        Kind.NOTE,
        Kind.BROKEN,
    }


@pytest.mark.parametrize(
    ("error", "is_rejection"),
    [
        (ValueError("no"), True),
        (NotImplementedError("no"), True),
        (RuntimeError("no"), True),
        (RecursionError("no"), False),
        (ZeroDivisionError("no"), False),
        (AssertionError("no"), False),
    ],
)
def test_intended_errors_mean_no_support(error, is_rejection):
    """Errors of value, implementation and runtime mean that masks are not
    supported; other errors break a guarantee.
    """

    def attention(query, key, value, mask=None):
        if mask is not None:
            raise error
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    answer = examine(attention, ["masked key"], ["float32"], framework="torch")["masked key"]
    expected = ("absent", "rejected") if is_rejection else ("broken", type(error).__name__)
    assert (answer.status, answer.words) == expected
    assert (f"{type(error).__name__}: no" in str(answer.rejection)) == is_rejection
    assert answer.kind is (Kind.REJECTED if is_rejection else Kind.BROKEN)
    assert answer.exception is error


def hides_by_a_large_number(query, key, value, mask=None):
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(mask, -1e9)
    return scores.softmax(-1) @ value


OF_MASKS = ["future token", "masked key", "empty row"]


def test_overflow_of_constant_is_broken():
    """A constant that overflows in float16 breaks the guarantee of three questions about masks."""
    examination = examine(hides_by_a_large_number, OF_MASKS, framework="torch", axes="BNTH")
    assert len(examination.answers) == len(OF_MASKS)
    for answer in examination.answers:
        assert answer.is_broken
        assert "overflow in float16" in answer.words
        assert "without overflow" in answer.error


def test_unknown_mask_name_must_be_declared():
    """A parameter that may be a mask raises an error until `mask_name` names it or is empty."""

    def attention(query, key, value, may_look=None, scale=None):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=may_look, scale=scale
        )

    with rejects("mask_name", "may_look=None"):
        examine(attention, ["mask"], framework="torch")
    examination = examine(attention, ["mask"], framework="torch", mask_name="may_look")
    assert examination["mask"].words == "True shows; floats added"
    assert examine(attention, ["mask"], framework="torch", mask_name="")["mask"].words == "—"


def test_mask_in_keywords_must_be_declared():
    """A function with `**options` raises an error until `mask_name` names the mask."""

    def attention(query, key, value, **options):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)

    with rejects("mask_name", "**options"):
        examine(attention, ["mask"], framework="torch")
    assert examine(attention, ["mask"], framework="torch", mask_name="attn_mask")[
        "mask"
    ].words.startswith("True shows")


def test_padding_lengths_are_found_by_name():
    """Padding by lengths is found by the name of its parameter."""
    attention = functools.partial(mha_torch.scaled_dot_product_attention)
    examination = examine(attention, ["padding"], ["float32"], framework="torch", axes="BNTH")
    assert examination["padding"].words == "by lengths"


def test_unsupported_weights_are_reported():
    """Weights that always raise an error are reported with the first path and its error."""

    def attention(query, key, value, need_weights=False):
        if need_weights:
            raise ValueError("no weights here")
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    examination = examine(attention, ["weights", "other sequence"], ["float32"], framework="torch")
    assert [answer.words for answer in examination.answers] == ["rejected", "independent"]
    assert (
        str(examination["weights"].rejection)
        == "float32, eval, no grad, with weights: ValueError: no weights here"
    )


def test_always_causal_attention():
    """Attention that is always causal is reported as such, with its scale; of NaN, only torch's
    kernel swallows one, in query 1.
    """

    def attention(query, key, value):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    examination = examine(
        attention,
        ["attends", "future token", "visible NaN", "scale"],
        ["bfloat16"],
        framework="torch",
    )
    assert [answer.words for answer in examination.answers][:2] == ["causally", "hidden"]
    assert examination["scale"].words == "1/sqrt(H)"
    assert (
        "nan in query 1" in examination["visible NaN"].example
    )  # which torch's kernel for a CPU swallows, and nothing else


def test_unknown_question_raises_key_error():
    """A question that was not part of the examination raises a `KeyError` that lists the others."""
    examination = examine(
        plain_attention, ["other sequence", "scale"], ["float32"], framework="torch"
    )
    with pytest.raises(KeyError, match="'nope', of plain_attention chosen: other sequence, scale"):
        examination["nope"]


def test_failing_plain_call_raises():
    """A function whose plain call fails raises an error with its name and its own message."""

    def attention(query, key, value):
        raise RuntimeError("not today")

    with rejects("….<locals>.attention", "RuntimeError: not today"):
        examine(attention, framework="torch")


def test_unsupported_declared_groups_fail():
    """Unsupported groups break a guarantee only if `num_kv_heads` declares them."""

    def attention(query, key, value):
        return torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1) @ value

    examination = examine(attention, ["grouped heads"], framework="torch", num_kv_heads=2)
    assert examination["grouped heads"].words == "declared: 2, rejected"
    assert examine(attention, ["grouped heads"], framework="torch").broken == []


# ---- Words ---------------------------------------------------------------------------------------


def test_rule_summarizes_answers_by_path():
    """A rule states which paths have which answer, or counts them if no short rule fits."""
    paths = [
        Path(need_weights=w, train=t, grad=g)
        for w in (False, True)
        for t in (False, True)
        for g in (False, True)
    ]
    assert by_rule(dict.fromkeys(paths, "zeros")) == "zeros"
    words = {
        path: "NaN" if path.need_weights or not (path.train or path.grad) else "zeros"
        for path in paths
    }
    assert by_rule(words) == "NaN with weights, zeros in train or with grad, otherwise NaN"
    parity_of_three = {
        path: "odd" if path.need_weights ^ path.train ^ path.grad else "even" for path in paths
    }
    assert by_rule(parity_of_three) == "even (4 paths) or odd (4 paths)"


def test_findings_compare_by_words_and_kind():
    """Findings are equal if their words and kinds are, whatever values or errors they have."""
    assert PathAnswer("zeros", Kind.OK, "0.0") == PathAnswer("zeros", Kind.OK, "-0.0", ValueError())
    assert PathAnswer("zeros", Kind.OK) != PathAnswer("zeros", Kind.NOTE)
    assert PathAnswer("zeros") != PathAnswer("NaN")


# ---- The command line ----------------------------------------------------------------------------

OWN = """
import torch

def attention(query, key, value, mask=None):
    scores = (query.float() @ key.float().mT) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(mask, -torch.inf)
    return (torch.softmax(scores, -1) @ value.float()).to(query.dtype)

number = 3

class Wide(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Write modules of a user into a folder, in which the command runs."""
    (tmp_path / "own_attention.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


OVERFLOWING = """
import torch

def attention(query, key, value, mask=None):
    scores = query @ key.mT * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(mask, -1e9)
    return scores.softmax(-1) @ value
"""


def test_shared_error_is_printed_once(own, capsys):
    """An error shared by three checks is printed once, with the names of the others."""
    (own / "own_overflow.py").write_text(OVERFLOWING)
    assert main(["conformance", "own_overflow:attention", "--checks", ",".join(OF_MASKS)]) == 1
    out = capsys.readouterr().out
    assert out.count("without overflow") == 1
    assert "also    masked key, empty row, by the same error" in out
    assert "3 broken guarantees" in out


def test_command_examines_user_function(own, capsys):
    """The command examines a user's function, prints and writes
    two broken guarantees, and exits with 1.
    """
    arguments = [
        "conformance",
        "own_attention:attention",
        "--dtypes",
        "float32",
        "--json",
        str(own / "c.json"),
    ]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "! NaN" in out
    assert "own_attention:attention, empty row: NaN" in out
    rerun = "mha-parity conformance own_attention:attention --dtypes float32 --checks 'empty row'"
    assert f"rerun   {rerun}" in out
    assert "1 target examined, 13 of 20 checks answered: 2 broken guarantees" in out
    content = json.loads((own / "c.json").read_text())
    (subject,) = content["subjects"]
    assert content["schema"] == "mha-parity/conformance"
    assert subject["framework"] == "torch"
    assert [answer["question"] for answer in subject["answers"]] == list(QUESTIONS)
    assert {
        answer["question"] for answer in subject["answers"] if answer["status"] == "broken"
    } == {
        "empty row",
        "empty row gradient",
    }


ONLY_FLOAT32 = """
import sys
import torch

def attention(query, key, value, mask=None, is_causal=False):
    if query.dtype != torch.float32:
        sys.exit(0)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
"""


@pytest.mark.parametrize(
    ("checks", "dtypes", "status"),
    [
        ("mask,causal", "float32,bfloat16", 2),
        ("mask,causal", "float32", 0),
        ("masked key", "float32,bfloat16", 1),
    ],
)
def test_unexamined_dtype_exits_with_2(own, capsys, checks, dtypes, status):
    """A requested dtype that no check examined is reported and
    exits with 2, unless a guarantee is broken.
    """
    (own / "own_narrow.py").write_text(ONLY_FLOAT32)
    declared = [
        "--mask-true",
        "shows",
        "--causal-alignment",
        "top-left",
        "--json",
        str(own / "found.json"),
    ]
    assert (
        main(
            [
                "conformance",
                "own_narrow:attention",
                "--checks",
                checks,
                "--dtypes",
                dtypes,
                *declared,
            ]
        )
        == status
    )
    out = capsys.readouterr().out
    assert ("own_narrow:attention: no check examined bfloat16" in out) == (status == 2)
    assert ("not every requested dtype was examined" in out) == (status == 2)
    unexamined = json.loads((own / "found.json").read_text())["not_examined"]
    assert unexamined == ({"own_narrow:attention": ["bfloat16"]} if status == 2 else {})


@pytest.mark.usefixtures("own")
def test_false_declaration_exits_with_1(capsys):
    """Checks without a fault exit with 0, and with 1 if a declaration contradicts them."""
    arguments = ["conformance", "own_attention:attention", "--checks", "mask,masked key"]
    assert main(arguments) == 0
    assert "no broken guarantees" in capsys.readouterr().out
    assert main([*arguments, "--mask-true", "shows"]) == 1
    assert "True hides, declared: shows" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("arguments", "input_error"),
    [
        ([], rejects("PKG.MODULE:CALLABLE or --libraries")),
        (["own_attention:attention", "--libraries"], rejects("PKG.MODULE:CALLABLE or --libraries")),
        (["own_attention"], rejects("the subject", "'own_attention'")),
        (
            ["no_such_module:attention"],
            Misuse("cannot import 'no_such_module': No module named 'no_such_module'"),
        ),
        (
            ["own_broken:attention"],
            Misuse("cannot import 'own_broken': ZeroDivisionError: division by zero"),
        ),
        (["own_attention:nothing"], Misuse("module 'own_attention' has no 'nothing'")),
        (["own_attention:number"], rejects("the subject", "int for 'own_attention:number'")),
        (["own_attention:Wide"], rejects("a class", "own_attention:Wide(width)")),
        (["own_attention:attention", "--mask-name", "masque"], rejects("mask", mask="masque")),
        (
            ["own_attention:attention", "--axes", "BTE", "--d-model", "0"],
            rejects("--d-model", {"--d-model": 0}),
        ),
        (
            ["own_attention:attention", "--checks", "colour"],
            rejects("--checks", {"--checks": "colour"}),
        ),
        (
            ["own_attention:attention", "--checks", "masked keys"],
            rejects("--checks", {"--checks": "masked keys"}, hint="masked key"),
        ),
        (
            ["own_attention:attention", "--dtypes", "int8"],
            rejects("--dtypes", {"--dtypes": "int8"}),
        ),
        (["own_attention:attention", "--only", "keras*"], Misuse("--only requires --libraries")),
        (["--libraries", "--only", "tensorflow*"], rejects("--only", {"--only": "tensorflow*"})),
        (
            ["--libraries", "--mask-true", "hides"],
            Misuse("--libraries cannot be combined with --mask-true"),
        ),
    ],
)
def test_bad_usage_prints_one_line(capsys, arguments, input_error):
    """Bad usage exits with 2 and prints one line of error and no output."""
    assert main(["conformance", *arguments]) == 2
    captured = capsys.readouterr()
    assert input_error.is_printed_in(captured.err)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_library_table_fits_in_100_columns(capsys):
    """`--libraries` prints a table of at most 100 columns, followed by the broken guarantees."""
    assert (
        main(["conformance", "--libraries", "--only", "*torch*", "--checks", "mask,empty row"]) == 1
    )
    out = capsys.readouterr().out
    matrix = out.split("\n\n")[0]
    assert "torch.nn." in matrix
    assert "mha_torch." in matrix
    assert max(map(len, matrix.splitlines())) <= 100
    assert "torch.nn.MultiheadAttention, empty row: NaN with weights" in out


@pytest.fixture
def absent_peer(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "F.absent", ("absent_package", lambda: None))


@pytest.mark.usefixtures("absent_peer")
def test_missing_library_has_its_own_line(capsys):
    """A library that is not installed has its own line, the last line counts it, and the status
    stays 0.
    """
    assert main(["conformance", "--libraries", "--only", "F.*", "--checks", "other sequence"]) == 0
    out = capsys.readouterr().out
    assert "F.absent: absent_package is not installed" in out
    assert out.splitlines()[-1].endswith("; NOT examined: 1 target")


@pytest.mark.usefixtures("absent_peer")
def test_only_missing_libraries_exit_with_2(capsys):
    """If no selected library is installed, the command exits with 2 without output."""
    assert main(["conformance", "--libraries", "--only", "F.absent"]) == 2
    captured = capsys.readouterr()
    assert "absent_package is not installed" in captured.err
    assert captured.out == ""


@pytest.mark.usefixtures("own")
def test_no_applicable_check_exits_with_2(capsys):
    """Without an applicable check, the command exits with 2 and says so."""
    assert main(["conformance", "own_attention:attention", "--checks", "cache,causal"]) == 2
    assert "1 target examined, 0 of 2 checks answered: nothing to check" in capsys.readouterr().out


def test_reason_for_no_support_is_printed(capsys):
    """The command prints the first error with which an option is not supported."""
    assert (
        main(["conformance", "--libraries", "--only", "mha_torch.fused", "--checks", "weights"])
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "mha_torch.fused, weights: rejected (float32, eval, no grad, with weights: InputError: "
        "need_weights" in out
    )


@pytest.mark.parametrize("penalty", [-100.0, -3e4])
def test_size_of_finite_penalty_is_found(penalty):
    """A finite penalty of -100 or -30000 on masked keys is reported with its size."""

    def attention(query, key, value, mask=None):
        scores = query @ key.mT / query.shape[-1] ** 0.5
        scores = scores if mask is None else scores + penalty * mask
        return scores.softmax(-1) @ value

    answer = examine(attention, ["masked key"], ("float32",), framework="torch", axes="BNTH")[
        "masked key"
    ]
    assert answer.words == f"a finite penalty of about {penalty:g}"


def test_padding_penalty_keeps_its_polarity():
    """Padding with a finite penalty is reported with its polarity, and breaks the guarantee."""

    def attention(query, key, value, key_padding_mask=None):
        scores = query @ key.mT / query.shape[-1] ** 0.5
        scores = (
            scores if key_padding_mask is None else scores - 1e4 * key_padding_mask[:, None, None]
        )
        return scores.softmax(-1) @ value

    answer = examine(attention, ["padding"], ("float32",), framework="torch", axes="BNTH")[
        "padding"
    ]
    assert answer.words == "True hides, by a finite penalty"
    assert answer.is_broken


def test_weights_in_any_mapping_are_changed(tmp_path):
    """A function is applied to the leaves of npz files and of mappings with other constructors."""
    np.savez(tmp_path / "w.npz", kernel=np.ones((2, 2)))
    params = {
        "file": np.load(tmp_path / "w.npz"),
        "dict": collections.defaultdict(dict, kernel=np.ones((2, 2))),
    }
    for tree in params.values():
        changed = with_leaves(tree, lambda path, leaf: leaf + 1)
        assert changed["kernel"].sum() == 8.0
