"""Concrete weights and inputs of a case: the same arrays in all environments."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, InputError, InputTypeError
from parity.measure.core.arrays import to_numpy_by_name
from parity.measure.core.case import DTYPES, Case
from parity.measure.core.exercise import exercising_case
from parity.measure.core.weights import (
    Weights,
    dtype_named,
    load_tensors,
    random_weights,
    weight_shapes,
)

# torch.manual_seed(123), then nn.Linear(3, 4, bias=False) three times: weights of query, key and
# value.
TEXTBOOK_WEIGHTS = {
    "q_proj.weight": [
        [-0.23542964458465576, 0.019124476239085197, -0.28674593567848206],
        [0.21772661805152893, -0.491934210062027, 0.423223078250885],
        [-0.4196414053440094, -0.45901766419410706, -0.3648201823234558],
        [0.2614781856536865, -0.21332639455795288, 0.21605217456817627],
    ],
    "k_proj.weight": [
        [-0.49001413583755493, -0.35029205679893494, -0.21198919415473938],
        [-0.1134607195854187, -0.440439373254776, 0.37804362177848816],
        [-0.13615716993808746, 0.1853223294019699, 0.4082694947719574],
        [0.107563816010952, 0.1578768491744995, 0.5572923421859741],
    ],
    "v_proj.weight": [
        [-0.26039040088653564, 0.18287640810012817, -0.2568724453449249],
        [0.4126031696796417, 0.46110451221466064, -0.5323009490966797],
        [0.4928526282310486, 0.27569305896759033, 0.25159022212028503],
        [0.237680584192276, 0.4799507260322571, -0.07623306661844254],
    ],
}
TEXTBOOK_INPUT = [
    [0.43, 0.15, 0.89],
    [0.55, 0.87, 0.66],
    [0.57, 0.85, 0.64],
    [0.22, 0.58, 0.33],
    [0.77, 0.25, 0.10],
    [0.05, 0.80, 0.55],
]


@dataclass(frozen=True)
class Problem:
    """Case, dtype and arrays: the input of every implementation.

    Attributes:
        case: source of the problem.
        dtype: dtype of weights and inputs, by name.
        weights: canonical weights.
        inputs: `query` (B, T, d_in); `key` (B, S, d_kv) for cross-attention; `value` (B, S, d_kv)
            if values have a different input than keys; with `shared_kv` instead the heads of
            another layer, `k` (B, K, S, H) and `v` (B, K, S, Hv); `bias` (B, N, T, S) and `mask`
            (B, N, T, S or slots) if the case has them; `cotangent`, in the shape of the output.
    """

    case: Case
    dtype: str
    weights: Weights = field(repr=False)
    inputs: dict[str, np.ndarray] = field(repr=False)

    @cached_property
    def spec(self) -> AttentionSpec:
        """Layer."""
        return self.case.spec

    @cached_property
    def digest(self) -> str:
        """sha256 of all arrays, equal in environments with equal arrays."""
        sha256 = hashlib.sha256()
        for name, array in sorted({**self.weights, **self.inputs}.items()):
            sha256.update(f"{name} {array.dtype} {array.shape}".encode())
            sha256.update(np.ascontiguousarray(array).tobytes())
        return sha256.hexdigest()

    @property
    def sides(self) -> dict[str, str]:
        """Names of the inputs of q, k and v; with `shared_kv` k and v are inputs."""
        if self.spec.shared_kv:
            return {"q": "query", "k": "k", "v": "v"}
        key = "key" if "key" in self.inputs else "query"
        value = "value" if "value" in self.inputs else key
        return {"q": "query", "k": key, "v": value}

    @property
    def bias(self) -> np.ndarray | None:
        """Bias of the scores, or None."""
        return self.inputs.get("bias")

    def finite_in_padding(self, name: str) -> np.ndarray:
        """Return an input in which NaN and infinity are 0 in padding, as in a layer.

        With a cache it is unchanged.
        """
        x = self.inputs[name]
        lengths = self.case.key_padding_lengths
        # Lengths are lengths of keys. Queries have them too in self-attention.
        is_of_keys = name != "query" or self.case.seq_len_k is None
        if lengths is None or not is_of_keys or np.isfinite(x).all():
            return x
        lengths = np.array(lengths)
        if name in ("k", "v"):  # heads, (B, K, S, H)
            is_padding = (np.arange(x.shape[2]) >= lengths[:, None])[:, None, :, None]
        else:
            is_padding = (np.arange(x.shape[1]) >= lengths[:, None])[:, :, None]
        return np.where(is_padding & ~np.isfinite(x), np.zeros_like(x), x)

    def step_input(self, step: int, name: str = "query") -> np.ndarray:
        """Return the tokens that a call appends, (B, chunk, d_in), or their heads for k or v."""
        start = sum(self.case.chunks[:step])
        tokens, x = slice(start, start + self.case.chunks[step]), self.inputs[name]
        if name in ("k", "v"):
            return x[:, :, tokens]
        return x[:, tokens]

    def step_mask(self, step: int) -> np.ndarray:
        """Return the rows of the mask of the inputs for a call, (B, N, chunk, slots)."""
        start = sum(self.case.chunks[:step])
        return self.inputs["mask"][:, :, start : start + self.case.chunks[step]]


def make_problem(
    case: Case | AttentionSpec | str,
    dtype: str,
    weights: Mapping[str, Any] | None = None,
    received: Mapping[str, np.ndarray] | None = None,
) -> Problem:
    """Return weights and inputs of a case in a dtype.

    They are drawn with a seed from its name, or read from its trained layer.

    Args:
        case: case, or its name: one of `CASES`, or `random-N`. Or the specification of a layer:
            calls, lengths and positions are then chosen to exercise its features, such as a window,
            and `problem.case.about` has the choice in words.
        dtype: name of a floating-point dtype, one of `DTYPES`.
        weights: canonical weights, as arrays of any framework, instead of the case's own.
        received: keys `k` and values `v` of another layer for `shared_kv`, instead of drawn ones.

    Raises:
        TypeError: if `case` is neither a case, nor a name, nor a specification.
        ValueError: if no case or dtype has this name.

    Example:
        >>> problem = parity.make_problem("causal", "float32")
        >>> problem.inputs["query"].shape
        (2, 5, 32)

        A layer of your own is a specification, its weights, and the calls of a case:

        >>> spec = parity.AttentionSpec(32, 4)
        >>> case = parity.Case("mine", spec, "our layer", seq_len=12, is_causal=True)
        >>> problem = parity.make_problem(case, "float32", parity.random_weights(spec))
        >>> problem.inputs["query"].shape
        (2, 12, 32)
    """
    if isinstance(case, str):
        # Imported only here: custom cases do not need all of ours.
        from parity.measure.core.cases import case_named

        case = case_named(case)
    if not isinstance(case, Case | AttentionSpec):
        rule = "be a parity.Case, the name of one, or an AttentionSpec"
        raise InputTypeError("case", rule, type(case).__name__)
    if dtype not in DTYPES:
        raise InputError("dtype", f"be one of {list(DTYPES)}", dtype=dtype)
    if isinstance(case, AttentionSpec):
        case = exercising_case(case, dtype)
    seed = [zlib.crc32(case.name.encode())]
    inputs = _drawn_inputs(case, np.random.default_rng(seed))
    inputs |= received or {}
    if weights is None:
        weights, own_inputs = _weights_of(case, seed)
        inputs |= own_inputs
    target = dtype_named(dtype)
    for name, x in inputs.items():
        if x.dtype != np.bool_:
            inputs[name] = x.astype(target)
    if case.not_finite:
        _make_not_finite(case, inputs)
    if case.strided:
        for name in ("query", "key"):
            if name in inputs:
                inputs[name] = _strided(inputs[name])
    weights = {name: weight.astype(target) for name, weight in to_numpy_by_name(weights).items()}
    return Problem(case, dtype, weights, inputs)


def _drawn_inputs(case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return inputs in float32. A different order of draws would change the values of all cases."""
    spec = case.spec
    inputs = {"query": _draw(rng, (case.batch, case.seq_len, spec.d_in))}
    if spec.shared_kv:
        heads = (case.batch, spec.num_kv_heads, case.key_len)
        inputs["k"] = _draw(rng, (*heads, spec.head_dim))
        inputs["v"] = _draw(rng, (*heads, spec.value_head_dim))
    elif case.seq_len_k is not None:
        inputs["key"] = _draw(rng, (case.batch, case.seq_len_k, spec.d_kv))
    of_scores = (case.batch, spec.num_heads, case.seq_len, case.key_len)
    if case.bias:
        inputs["bias"] = _draw(rng, of_scores)
    if case.random_mask:
        mask = rng.random(of_scores) < 0.4  # an arbitrary share, so that most rows keep some keys
        masked_rows = rng.integers(0, case.seq_len, case.batch)  # one of each sequence
        mask[np.arange(case.batch), :, masked_rows] = True
        inputs["mask"] = mask
    if case.mask is not None:
        num_keys = case.capacity if case.is_cached else case.key_len
        shape = (case.batch, spec.num_heads, case.seq_len, num_keys)
        inputs["mask"] = np.broadcast_to(case.mask, shape).copy()
    inputs["cotangent"] = _draw(rng, (case.batch, case.seq_len, spec.output_width))
    return inputs


def _weights_of(case: Case, seed: list[int]) -> tuple[Weights, dict[str, np.ndarray]]:
    """Return the weights of a case, and inputs that belong to them.

    A trained layer has its own weights and inputs; others have drawn ones.
    """
    inputs: dict[str, np.ndarray] = {}
    if case.trained is not None:
        from parity.measure import pretrained

        tensors = pretrained.unpacked(load_tensors(pretrained.path(case.trained))[0])
        weights = {name: tensors[name] for name in weight_shapes(case.spec)}
        for name in ("query", "key"):
            if f"inputs.{name}" in tensors:
                inputs[name] = tensors[f"inputs.{name}"]
    elif case.name == "textbook":
        weights = {name: np.array(rows, np.float32) for name, rows in TEXTBOOK_WEIGHTS.items()}
        inputs["query"] = np.array([TEXTBOOK_INPUT] * case.batch, np.float32)
    else:
        weights = random_weights(case.spec, [1, *seed])
    for name in weights:
        if name.startswith(("q_proj", "k_proj")):
            # Half of the gain each, so that logits have all of it.
            weights[name] = weights[name] * np.float32(case.gain**0.5)
    return weights, inputs


def _make_not_finite(case: Case, inputs: dict[str, np.ndarray]) -> None:
    """Replace tokens of the inputs by NaN."""
    is_nan = nan_tokens(case)
    for name in ("k", "v"):
        if name in inputs:
            inputs[name].swapaxes(1, 2)[is_nan] = np.nan
    if case.seq_len_k is None:
        inputs["query"][is_nan] = np.nan
    elif "key" in inputs:
        inputs["key"][is_nan] = np.nan


def nan_tokens(case: Case) -> np.ndarray:
    """Return which tokens of a case are NaN, (B, S)."""
    is_nan = np.zeros((case.batch, case.key_len), bool)
    if case.not_finite == "visible":
        is_nan[-1, case.key_len // 2] = True
    elif case.not_finite == "hidden" and case.is_cached:
        for step, chunk in enumerate(case.chunks):
            start = sum(case.chunks[:step])
            is_padding = np.arange(chunk) >= np.array(case.added(step))[:, None]
            is_nan[:, start : start + chunk] = is_padding
    elif case.not_finite == "hidden":
        is_nan[:] = np.arange(case.key_len) >= np.array(case.key_padding_lengths)[:, None]
    return is_nan


def _draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def _strided(x: np.ndarray) -> np.ndarray:
    """Return the same values with the first and last axis exchanged in memory."""
    return np.ascontiguousarray(x.swapaxes(0, -1)).swapaxes(0, -1)
