"""NaN and infinity in padding reach no real token; in a contained kernel, only the rows that attend
to them.

These tests need a mock board, whose golden functions follow IEEE 754; cards differ
(`docs/reference/ttnn.md`).
"""

import numpy as np
import pytest
import ttnn
from helpers.heads import fused_attention, plain_attention
from helpers.input_errors import rejects
from helpers.samples import sample
from helpers.tt.formulas import both_dtypes, module_of, rounded

import mha_tt
from mha_spec import Alibi, AttentionSpec, Gate, Latent, Rope
from mha_spec.heads import BareHeads
from mha_tt.kernels import fused
from mha_tt.kernels.nonfinite import contained
from mha_tt.masks import Mask
from mha_tt.scores import Scores
from parity.measure.backends import tt as backend

B, N, K, T, H = 2, 4, 2, 40, 32
TOKEN = 5  # of the first sequence, non-finite in the first key/value head

PATHS = {
    "plain": (plain_attention(mha_tt), ttnn.float32),
    "fused": (fused_attention(mha_tt), ttnn.bfloat16),
}
every_path = pytest.mark.parametrize(("attend", "dtype"), PATHS.values(), ids=PATHS)
# The default kernel calls the plain path in float32.
every_kernel = pytest.mark.parametrize(
    "dtype", [ttnn.float32, ttnn.bfloat16], ids=["plain", "fused"]
)

CAUSAL = mha_tt.create_causal_mask(T)
WINDOW = mha_tt.create_sliding_window_mask(T, window_size=3)
HEADS = np.arange(T) % np.arange(2, 2 + N)[:, None, None] == 1  # (N, 1, T): different in every head
RANDOM = np.random.default_rng(3).random((B, 1, T, T)) < 0.5
RANDOM[0, 0, 7] = True  # a row without a key
SEGMENTS = np.array([[0] * 4 + [1] * 29 + [2] * 7, [4] * 30 + [3] * 10])

OPTIONS = {
    # name: (options, equivalent mask)
    "nothing": ({}, np.zeros((1, 1), bool)),
    "causal": ({"is_causal": True}, CAUSAL),
    "causal-mask": ({"mask": CAUSAL}, CAUSAL),
    "window": ({"mask": WINDOW}, WINDOW),
    "hidden-by-length": ({"key_padding_lengths": [5, 40]}, mha_tt.create_padding_mask([5, 40], T)),
    "seen-by-length": ({"key_padding_lengths": [6, 40]}, mha_tt.create_padding_mask([6, 40], T)),
    "no-key": ({"key_padding_lengths": [0, 40]}, mha_tt.create_padding_mask([0, 40], T)),
    "causal-and-length": (
        {"is_causal": True, "key_padding_lengths": [5, 40]},
        mha_tt.create_attention_mask(T, is_causal=True, key_padding_lengths=[5, 40]),
    ),
    "heads": ({"mask": HEADS}, HEADS),
    "heads-and-rows": ({"mask": HEADS | CAUSAL}, HEADS | CAUSAL),
    "random": ({"mask": RANDOM}, RANDOM),
    "rows": ({"mask": RANDOM[:, :, :, :1]}, RANDOM[:, :, :, :1]),
    "segments": ({"segment_ids": SEGMENTS}, mha_tt.create_attention_mask(T, segment_ids=SEGMENTS)),
    "causal-and-bias": ({"is_causal": True, "bias": np.ones((N, 1, 1), np.float32)}, CAUSAL),
}
every_option = pytest.mark.parametrize(("options", "mask"), OPTIONS.values(), ids=OPTIONS)


def heads(dtype, seed):
    return rounded(
        np.random.default_rng(seed).standard_normal((B, N if seed == 0 else K, T, H)), dtype
    )


def run(device, attend, dtype, inputs, **options):
    context, _ = attend(*(mha_tt.upload(x, device=device, dtype=dtype) for x in inputs), **options)
    return mha_tt.download(context)


# ---- Padding -------------------------------------------------------------------------------------

LENGTHS = [4, 6]
IS_REAL = np.arange(6) < np.array(LENGTHS)[:, None]

SPECS = {
    "rope": AttentionSpec(24, 4, num_kv_heads=2, rope=Rope(100.0)),
    "gate": AttentionSpec(24, 4, fused_qkv=True, value_head_dim=40, gate=Gate()),
    "latent": AttentionSpec(
        24,
        4,
        rope=Rope(100.0, rotary_dim=8, rotated="last"),
        head_dim=24,
        latent=Latent(kv_rank=12, rope_dim=8),
    ),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def tokens(dtype, spoilt=None, value=np.nan, seq_len=6, features=3):
    x = rounded(np.random.default_rng(1).standard_normal((2, seq_len, 24)), dtype)
    if spoilt is not None:
        x[0, spoilt, features] = value
    return x


def apply(module, x, **options):
    output = module(mha_tt.upload(x, device=module.device, dtype=module.dtype), **options)
    return mha_tt.download(output[0] if isinstance(output, tuple) else output)


@sample(8)
@both_dtypes
@every_spec
@pytest.mark.parametrize(
    "value", [np.nan, -np.inf, 3e38]
)  # the last one overflows in the projections
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"need_weights": True}], ids=str)
def test_non_finite_padding_has_no_effect(device, options, value, spec, dtype):
    """NaN, infinity or a large number in padding changes no bit of a real token."""
    module = module_of("MultiHeadAttention", spec, device, dtype)
    spoilt = tokens(dtype, 4, value, features=slice(None))
    clean, output = (
        apply(module, x, key_padding_lengths=LENGTHS, **options) for x in (tokens(dtype), spoilt)
    )
    assert np.isfinite(clean).all()
    assert np.array_equal(output[IS_REAL], clean[IS_REAL])


@sample(4)
@both_dtypes
@every_spec
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_padded_token_keeps_finite_features(device, value, spec, dtype):
    """In padding a NaN or infinite feature counts as 0, and all other features as they are."""
    module = module_of("MultiHeadSelfAttention", spec, device, dtype)
    expected, output = (
        apply(module, tokens(dtype, 4, fill), key_padding_lengths=LENGTHS) for fill in (0.0, value)
    )
    assert np.array_equal(output, expected)


@both_dtypes
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_of_real_token_is_not_padding(device, value, dtype):
    """With lengths, a NaN or infinite real token still makes every output of its sequence not
    finite.
    """
    module = module_of("MultiHeadSelfAttention", SPECS["rope"], device, dtype)
    output = apply(module, tokens(dtype, 3, value), key_padding_lengths=LENGTHS)
    assert (~np.isfinite(output)).any(axis=-1).tolist() == [[True] * 6, [False] * 6]


@sample(4)
@both_dtypes
@every_spec
def test_finite_padding_keeps_every_output(device, spec, dtype):
    """With finite inputs, lengths and their mask give the same output at every position, bit for
    bit.
    """
    module = module_of("MultiHeadSelfAttention", spec, device, dtype)
    output = apply(module, tokens(dtype), key_padding_lengths=LENGTHS)
    expected = apply(module, tokens(dtype), mask=mha_tt.create_padding_mask(LENGTHS, 6))
    assert np.array_equal(output, expected)


@both_dtypes
@pytest.mark.parametrize("spoilt", ["key", "value"])
def test_padding_of_other_keys_has_no_effect(device, spoilt, dtype):
    """NaN in padding of separate keys or values changes no bit of any output, with as many
    queries.
    """
    module = module_of("MultiHeadAttention", AttentionSpec(24, 4), device, dtype)
    hides = {"mask": mha_tt.create_padding_mask(LENGTHS, 6)}, {"key_padding_lengths": LENGTHS}
    outputs = []
    for value, hidden in zip((0.0, np.nan), hides, strict=True):
        inputs = {"key": tokens(dtype), "value": tokens(dtype) * 2}
        inputs[spoilt][0, 4:] = value
        inputs = {name: mha_tt.upload(x, device=device, dtype=dtype) for name, x in inputs.items()}
        outputs.append(apply(module, tokens(dtype) + 1, **inputs, **hidden))
    assert np.isfinite(outputs[0]).all()
    assert np.array_equal(*outputs)


@both_dtypes
def test_padding_of_shared_kv_has_no_effect(device, dtype):
    """NaN in padding of the keys and values of another layer changes no bit of any output."""
    module = module_of(
        "MultiHeadAttention", AttentionSpec(24, 4, head_dim=32, shared_kv=True), device, dtype
    )
    shared = np.random.default_rng(2).standard_normal((2, 4, 6, 32))
    outputs = []
    for value in (0.0, np.inf):
        shared[0, :, 4:] = value
        key, values = (mha_tt.upload(shared, device=device, dtype=dtype) for _ in range(2))
        outputs.append(
            apply(module, tokens(dtype), key=key, value=values, key_padding_lengths=LENGTHS)
        )
    assert np.isfinite(outputs[0]).all()
    assert np.array_equal(*outputs)


@sample(4)
@every_path
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_padding_of_heads_has_no_effect(device, value, is_causal, attend, dtype):
    """NaN or infinity in padding of split heads changes no bit of the context; rows without a key
    are 0.
    """
    inputs = [heads(dtype, seed) for seed in range(3)]
    options = {"key_padding_lengths": [0, 30], "is_causal": is_causal}
    clean = run(device, attend, dtype, inputs, **options)
    for x in inputs[1:]:
        x[0, 1], x[1, :, 30:] = value, value
    assert np.array_equal(run(device, attend, dtype, inputs, **options), clean)
    assert not clean[0].any()
    assert clean[1].any(axis=-1).all()


@both_dtypes
def test_nan_weights_yield_nan_outputs(device, dtype):
    """NaN in the projection of queries makes every output NaN."""
    module = module_of("MultiHeadSelfAttention", SPECS["rope"], device, dtype)
    name = "q_proj.weight"
    module.weights[name] = mha_tt.upload(
        np.full(tuple(module.weights[name].shape), np.nan), device=device, dtype=dtype
    )
    for options in ({}, {"is_causal": True}, {"key_padding_lengths": [4, 6]}):
        assert np.isnan(apply(module, tokens(dtype), **options)).all()


def test_softmax_of_infinite_scores_is_nan(device):
    """A row whose visible scores are all -inf is NaN; in another row, a score of -inf and a masked
    key have weight 0.
    """
    scores = mha_tt.upload(
        np.array([[[[-np.inf, -np.inf, 1.0], [-np.inf, 0.0, 1.0]]]]), device=device
    )
    attn_weights = mha_tt.download(mha_tt.masked_softmax(scores, np.array([False, False, True])))[
        0, 0
    ]
    assert np.isnan(attn_weights[0]).all()
    assert attn_weights[1].tolist() == [0.0, 1.0, 0.0]


# ---- Contained kernels ---------------------------------------------------------------------------


def run_kernel(device, kernel, dtype, inputs, *, bias=None, **hides):
    heads = (mha_tt.upload(x, device=device, dtype=dtype) for x in inputs)
    return mha_tt.download(kernel(*heads, Mask(**hides), Scores(BareHeads(H), bias)))


def run_contained(device, dtype, inputs, **options):
    return run_kernel(device, contained(fused.attend), dtype, inputs, **options)


@sample(8)
@every_kernel
@every_option
def test_contained_equals_kernel_if_finite(device, options, mask, dtype):
    """With finite inputs a contained kernel returns the context of the kernel, bit for bit."""
    inputs = [heads(dtype, seed) for seed in range(3)]
    context, expected = (
        run_kernel(device, kernel, dtype, inputs, **options)
        for kernel in (contained(fused.attend), fused.attend)
    )
    assert np.isfinite(context).all()
    assert np.array_equal(context, expected)


@sample(12)
@every_kernel
@every_option
@pytest.mark.parametrize(("name", "value"), [("key", np.nan), ("value", np.inf)])
def test_non_finite_key_spoils_only_its_rows(device, name, value, options, mask, dtype):
    """In a contained kernel, NaN in a key or infinity in a value reaches exactly the rows that
    attend to it; other rows keep their bits.
    """
    inputs = [heads(dtype, seed) for seed in range(3)]
    clean = run_contained(device, dtype, inputs, **options)
    inputs[1 if name == "key" else 2][0, 0, TOKEN, 3] = value
    context = run_contained(device, dtype, inputs, **options)
    sees = np.zeros((B, N, T), bool)
    sees[0, : N // K] = ~np.broadcast_to(mask, (B, N, T, T))[0, : N // K, :, TOKEN]
    assert np.isfinite(clean).all()
    assert np.array_equal((~np.isfinite(context)).any(axis=-1), sees)
    assert np.array_equal(context[~sees], clean[~sees])


@sample(12)
@pytest.mark.board
@every_kernel
@every_option
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_non_finite_query_spoils_its_row(device, value, options, mask, dtype):
    """In a contained kernel, NaN or infinity in a query spoils its row, unless the row has no key:
    then it is 0; others keep their bits.
    """
    inputs = [heads(dtype, seed) for seed in range(3)]
    clean = run_contained(device, dtype, inputs, **options)
    inputs[0][0, :, :8, 3] = value
    context = run_contained(device, dtype, inputs, **options)
    is_empty = np.broadcast_to(mask, (B, N, T, T)).all(axis=-1)
    is_spoilt = np.zeros((B, N, T), bool)
    is_spoilt[0, :, :8] = ~is_empty[0, :, :8]
    assert np.array_equal((~np.isfinite(context)).any(axis=-1), is_spoilt)
    assert np.array_equal(context[~is_spoilt], clean[~is_spoilt])
    assert not context[is_empty].any()


@both_dtypes
@pytest.mark.parametrize(("seq_len_q", "seq_len_k"), [(0, 3), (3, 0), (0, 0)])
def test_contained_kernel_takes_no_tokens(device, seq_len_q, seq_len_k, dtype):
    """A contained kernel returns zeros without keys, and an empty context without queries."""
    query, key = np.ones((2, 4, seq_len_q, 32)), np.ones((2, 2, seq_len_k, 32))
    context = run_contained(device, dtype, (query, key, key), is_causal=True)
    assert context.shape == query.shape
    assert not context.any()


def test_contained_kernel_keeps_offset(device):
    """A contained kernel adds biases by distance from the positions of queries after cached
    keys.
    """
    query, key, value = (heads(ttnn.float32, seed) for seed in range(3))
    spec = AttentionSpec(N * H, N, num_kv_heads=K, alibi=Alibi())
    arguments = Mask(is_causal=True, q_offset=np.array([T - 2, T - 3])), Scores(spec)
    tensors = [
        mha_tt.upload(x, device=device, dtype=ttnn.float32) for x in (query[:, :, :2], key, value)
    ]
    context, expected = (
        mha_tt.download(kernel(*tensors, *arguments))
        for kernel in (contained(fused.attend), fused.attend)
    )
    assert np.array_equal(context, expected)


def contained_module(kind, device, dtype):
    """Return a module of `SPECS["rope"]` with a contained kernel."""
    module = module_of(kind, SPECS["rope"], device, dtype)
    module.kernel = contained(module.kernel)
    return module


@both_dtypes
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_causal_nan_spoils_only_later_tokens(device, value, dtype):
    """In a layer with a contained kernel, a NaN or infinite token spoils its own output and all
    later ones, and no bit of earlier ones.
    """
    module = contained_module("MultiHeadAttention", device, dtype)
    clean, output = (
        apply(module, x, is_causal=True) for x in (tokens(dtype), tokens(dtype, 3, value))
    )
    is_spoilt = np.zeros((2, 6), bool)
    is_spoilt[0, 3:] = True
    assert np.array_equal((~np.isfinite(output)).all(axis=-1), is_spoilt)
    assert np.array_equal(output[~is_spoilt], clean[~is_spoilt])


@both_dtypes
@pytest.mark.parametrize(
    "chunks", [[2, 4], [3, 1, 1, 1]], ids=str
)  # as part of a chunk, or as a step before others
def test_cached_nan_spoils_only_later_tokens(device, chunks, dtype):
    """With a contained kernel, a NaN token in a cache spoils its own output and all later ones, and
    no bit of others.
    """
    module = contained_module("MultiHeadAttentionWithCache", device, dtype)
    outputs = []
    for x in (tokens(dtype), tokens(dtype, 3)):
        cache, output = module.init_cache(2, 8), []
        for chunk in np.split(x, np.cumsum(chunks)[:-1], axis=1):
            chunk = mha_tt.upload(chunk, device=device, dtype=dtype)
            result, cache = module(chunk, cache)
            output.append(mha_tt.download(result))
        outputs.append(np.concatenate(output, axis=1))
    is_spoilt = np.zeros((2, 6), bool)
    is_spoilt[0, 3:] = True
    assert np.array_equal(np.isnan(outputs[1]).all(axis=-1), is_spoilt)
    assert np.array_equal(outputs[1][~is_spoilt], outputs[0][~is_spoilt])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["keys", "values"])
def test_step_over_nan_slot_is_nan(device, name, value):
    """A step of a contained kernel is not finite for the heads and sequences with a filled slot
    that is not finite; a free slot changes no bit.
    """
    spec = AttentionSpec(N * H, N, num_kv_heads=K, out_proj=False)
    module = module_of("MultiHeadAttentionWithCache", spec, device)
    module.kernel = contained(module.kernel)
    rng = np.random.default_rng(4)
    slots = {part: rng.standard_normal((B, K, 32, H)) for part in ("keys", "values")}
    x = mha_tt.upload(rng.standard_normal((B, 1, N * H)), device=device)
    outputs = []
    for slot in (None, 20, TOKEN):
        spoilt = {part: array.copy() for part, array in slots.items()}
        if slot is not None:
            spoilt[name][0, 1, slot] = value
        tensors = {part: mha_tt.upload(array, device=device) for part, array in spoilt.items()}
        cache = mha_tt.KVCache(**tensors, lengths=np.array([8, 30], np.int32), capacity=32)
        outputs.append(mha_tt.download(module(x, cache)[0]))
    clean, free, filled = outputs
    assert np.isfinite(clean).all()
    assert np.array_equal(free, clean)
    is_spoilt = np.zeros(clean.shape, bool)
    is_spoilt[0, 0, N * H // 2 :] = True  # the heads of the second key/value head
    assert not np.isfinite(filled[is_spoilt]).any()
    assert np.array_equal(filled[~is_spoilt], clean[~is_spoilt])


# ---- Costs ---------------------------------------------------------------------------------------

LOOKS = {"ttnn.isfinite", "ttnn.cumsum"}


@pytest.mark.parametrize("name", ["nothing", "causal", "full-length", "mask"])
def test_layer_without_padding_skips_search(device, calls, name):
    """A layer does not search for non-finite values if no token is padding."""
    options = {
        "nothing": {},
        "causal": {"is_causal": True},
        "full-length": {"key_padding_lengths": [6, 6]},
        "mask": {"mask": CAUSAL[:6, :6]},
    }[name]
    module = module_of("MultiHeadSelfAttention", SPECS["rope"], device)
    apply(module, tokens(ttnn.bfloat16), **options)
    assert not LOOKS & {call.name for call in calls}


@pytest.mark.parametrize(("num_others", "num_looks"), [(0, 1), (1, 1), (2, 2)])
def test_layer_searches_each_input_once(device, calls, num_others, num_looks):
    """With padding, an input that is query, key and value, or key and value, is searched once."""
    module = module_of("MultiHeadAttention", AttentionSpec(24, 4), device)
    others = [mha_tt.upload(tokens(ttnn.bfloat16), device=device) for _ in range(num_others)]
    options = dict(zip(("key", "value"), others, strict=False))
    apply(module, tokens(ttnn.bfloat16), key_padding_lengths=LENGTHS, **options)
    assert [call.name for call in calls].count("ttnn.isfinite") == num_looks


@pytest.mark.parametrize(
    "options", [{}, {"key_padding_lengths": [T, T]}, {"mask": np.zeros((T, T), bool)}], ids=str
)
def test_unmasked_call_skips_nan_search(device, calls, options):
    """If no key is hidden, a contained kernel does not search for non-finite values."""
    inputs = [heads(ttnn.bfloat16, seed) for seed in range(3)]
    run_contained(device, ttnn.bfloat16, inputs, **options)
    assert not LOOKS & {call.name for call in calls}


def test_step_skips_nan_search(device, calls):
    """A step does not search for non-finite values; with a contained kernel it is the step of its
    kernel.
    """
    names = []
    for kind in (module_of, contained_module):
        of_kind = {"spec": SPECS["rope"]} if kind is module_of else {}
        module = kind("MultiHeadAttentionWithCache", device=device, dtype=ttnn.bfloat16, **of_kind)
        prompt = mha_tt.upload(tokens(ttnn.bfloat16), device=device)
        _, cache = module(prompt, module.init_cache(2, 8))
        calls.clear()
        module(mha_tt.upload(tokens(ttnn.bfloat16, seq_len=1), device=device), cache)
        names.append([call.name for call in calls])
    assert not LOOKS & set(names[0])
    assert names[0] == names[1]


@pytest.mark.board
@pytest.mark.parametrize("lengths", [[5, 40], [0, 40]], ids=str)
@pytest.mark.parametrize("is_contained", [False, True])
def test_padding_is_cut_without_nan_search(device, calls, is_contained, lengths):
    """Padding of split heads is set to 0 without a search for non-finite values."""
    inputs, options = (
        [heads(ttnn.bfloat16, seed) for seed in range(3)],
        {"key_padding_lengths": lengths},
    )
    if is_contained:
        run_contained(device, ttnn.bfloat16, inputs, **options)
    else:
        run(device, fused_attention(mha_tt), ttnn.bfloat16, inputs, **options)
    names = [call.name for call in calls]
    assert (names.count("ttnn.where"), names.count("ttnn.isfinite")) == (
        3 + (0 in lengths),
        0,
    )  # one of them is for rows that the kernel loses


# ---- Reading heads back --------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [np.nan, np.inf])
def test_padding_of_finite_heads_must_be_0(lost):
    """Reading heads raises an error for non-zero padding, except in tokens that are NaN or
    infinite.

    Kernels may turn a NaN token, and the padding of its heads, into infinity.
    """
    shapes = backend.Padded(backend, AttentionSpec(48, 4))
    padded = np.zeros((1, 4, 3, 32), np.float32)
    padded[:, :, 1] = lost
    assert shapes.real(padded, "v_proj").shape == (1, 4, 3, 12)
    padded[0, 0, 2, 31] = 1e-3
    with rejects("features that pad a head", "others in (1, 4, 3, 32)"):
        shapes.real(padded, "v_proj")
