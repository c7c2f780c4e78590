"""The examination of a subject: its inputs, its paths, the form of its mask, and probes of its
outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from mha_spec import AttentionSpec, InputError
from parity.explain.conformance.answers import Answer, Kind, PathAnswer, Question
from parity.explain.conformance.calls import Failed, RejectedCall, Result, run
from parity.explain.conformance.rules import merge, of_error
from parity.explain.conformance.subjects import (
    BATCH,
    NUM_HEADS,
    SEED,
    TOKENS,
    Inputs,
    Path,
    Subject,
    by_letters,
    from_letters,
)
from parity.measure.core.compare import unit_of_rounding
from parity.measure.core.weights import Weights

LARGE = {"float32": 1e5, "bfloat16": 1e5, "float16": 30.0}
"""Size of a perturbation: large enough to outweigh a finite penalty on a hidden key, small enough
for the dtype.
"""


FUTURE_KEYS = ~np.tri(TOKENS, dtype=bool)
"""The keys after each query, (T, S): a causal mask hides them."""


class Examination:
    """A subject under examination: its inputs, its paths, and the form of its mask.

    Attributes:
        subject: the subject.
        paths: the paths on which questions call it.
        base: path of plain calls.
        weights_rejection: error of a call that requests attention weights, which `paths` then do
            not request; None if there is none.
        shared: results that several questions share, by their name and arguments.

    Raises:
        ValueError: if even a plain call fails.
    """

    def __init__(self, subject: Subject, dtypes: Sequence[str] | None = None) -> None:
        self.subject = subject
        self.paths = list(subject.paths(dtypes or subject.dtypes))
        self.base = self.paths[0]
        self.shared: dict[tuple[Any, ...], Any] = {}
        try:
            run(subject, self.base, self.inputs())
        except (RejectedCall, Failed) as error:
            shapes = describe_shapes(self.inputs())
            raise InputError(
                subject.name, f"attend over inputs of shapes {shapes}", str(error)
            ) from error
        self.weights_rejection = self._rejection_of_weights()
        if self.weights_rejection is not None:
            self.paths = [path for path in self.paths if not path.need_weights]

    def _rejection_of_weights(self) -> RejectedCall | None:
        """Return the deliberate error of a call that requests attention weights, if any."""
        if "need_weights" not in self.subject.takes:
            return None
        try:
            run(self.subject, replace(self.base, need_weights=True), self.inputs())
        except RejectedCall as rejected:
            return rejected
        except Failed:  # the questions will report it
            return None
        return None

    # ---- Paths -----------------------------------------------------------------------------------

    @property
    def steady_paths(self) -> list[Path]:
        """Return the paths on which no requested dropout makes outputs random."""
        return [path for path in self.paths if not path.drops]

    @property
    def paths_of_base_dtype(self) -> list[Path]:
        """Return the paths in the first dtype."""
        return [path for path in self.paths if path.dtype == self.base.dtype]

    @property
    def plain_paths(self) -> list[Path]:
        """Return the steady paths in the first dtype, without gradients, for questions independent
        of dtype.
        """
        return [path for path in self.paths_of_base_dtype if not (path.drops or path.grad)]

    def hidden_randomness(self, path: Path) -> str:
        """Return the largest difference between two calls on a path, in words; empty if they agree.

        Only a layer without a settable dropout rate is tested: it may have a rate of its own. A
        call that fails is not random, so that the question itself reports it.
        """
        if "dropout" in self.subject.takes:
            return ""
        key = ("hidden randomness", path)
        if key not in self.shared:
            try:
                self.shared[key] = self._difference_of_two_calls(path)
            except (RejectedCall, Failed):
                return ""
        return self.shared[key]

    def _difference_of_two_calls(self, path: Path) -> str:
        inputs = self.inputs()
        first = self.run(path, inputs, seed=SEED).output
        second = self.run(path, inputs, seed=SEED + 1).output
        is_random, difference = change(first, second, path, range(TOKENS))
        if is_random:
            return difference
        return ""

    # ---- Inputs ----------------------------------------------------------------------------------

    def inputs(
        self, num_keys: int | None = None, num_queries: int = TOKENS, seed: int = SEED
    ) -> Inputs:
        """Return random inputs; a layer gets one array three times, or two arrays if the number of
        keys is given.
        """
        rng = np.random.default_rng(seed)
        if self.subject.is_layer:
            query = rng.standard_normal((BATCH, num_queries, self.subject.width))
            if num_keys is None:
                return query, query, query
            key = rng.standard_normal((BATCH, num_keys, self.subject.width))
            return query, key, key
        if num_keys is None:
            num_keys = num_queries
        query = rng.standard_normal((BATCH, NUM_HEADS, num_queries, self.subject.head_dim))
        key = rng.standard_normal((BATCH, NUM_HEADS, num_keys, self.subject.head_dim))
        value = rng.standard_normal((BATCH, NUM_HEADS, num_keys, self.subject.head_dim))
        return query, key, value

    @property
    def separate_keys(self) -> tuple[tuple[str, str], ...]:
        """Return the inputs that can differ from the query, as letters and as words."""
        if "key" not in self.subject.takes:
            return ()
        if "value" not in self.subject.takes:
            return (("kv", "key"),)
        return (("k", "key"), ("v", "value"))

    def separate_inputs(self, num_tokens: int = TOKENS) -> Inputs:
        """Return random inputs that are distinct arrays, as far as the subject allows it."""
        if "key" not in self.subject.takes:
            return self.inputs(num_queries=num_tokens)
        query, key, value = self.inputs(num_tokens, num_tokens)
        if "value" in self.subject.takes:
            value = value.copy()
        return query, key, value

    # ---- Calls -----------------------------------------------------------------------------------

    def run(
        self, path: Path, inputs: Inputs, hidden: np.ndarray | None = None, **options: Any
    ) -> Result:
        """Call the subject, with a mask that hides (T, S) where it is true."""
        if hidden is None:
            return run(self.subject, path, inputs, **options)
        return run(self.subject, path, inputs, mask=self.mask(hidden), **options)

    def moved(
        self, path: Path, inputs: Inputs, others: Inputs, rows: Sequence[int], **options: Any
    ) -> tuple[bool, str]:
        """Return whether the outputs of some queries differ between two sets of inputs, and the
        values.
        """
        before = self.run(path, inputs, **options).output[..., list(rows), :]
        after = self.run(path, others, **options).output[..., list(rows), :]
        return change(before, after, path, rows)

    @cached_property
    def felt(self) -> np.ndarray:
        """Return which outputs of a plain call change with which token, (T, S)."""
        inputs = self.inputs()
        before = run(self.subject, self.base, inputs).output
        felt = np.zeros((TOKENS, TOKENS), bool)
        for s in range(TOKENS):
            after = run(self.subject, self.base, perturbed(inputs, s, self.base, scale=3.0)).output
            felt[:, s] = changed_rows(before, after, self.base)
        return felt

    @property
    def is_causal_itself(self) -> bool:
        """Return whether it is causal by default."""
        return not np.triu(self.felt, 1).any()

    # ---- Masks -----------------------------------------------------------------------------------

    @property
    def takes_mask(self) -> bool:
        """Return whether its mask has an effect."""
        return "mask" in self.subject.takes and self.polarity.words in ("hides", "shows")

    def mask(self, hidden: np.ndarray) -> np.ndarray:
        """Convert a mask, True = hidden, to the values of the subject."""
        if self.true_hides:
            return hidden[None, None]
        return ~hidden[None, None]

    @property
    def true_hides(self) -> bool:
        """Return whether True in a mask hides, by observation; by its claim if that fails."""
        if self.takes_mask:
            return self.polarity.words == "hides"
        return self.subject.mask_true != "shows"

    @cached_property
    def polarity(self) -> PathAnswer:
        """Determine the effect of True in a mask: it hides, shows, is ignored or hides all."""
        one_true = np.zeros((1, 1, TOKENS, TOKENS), bool)
        one_true[..., 2] = True  # key 2 alone
        row = TOKENS - 1  # the last row attends to every key, even under causal attention
        before = run(self.subject, self.base, self.inputs(), mask=one_true).output
        feels_key_2 = self._feels_key(2, row, before, one_true)
        feels_key_3 = self._feels_key(3, row, before, one_true)
        evidence = (
            f"mask True at key 2 only; row {row} feels key 2: {feels_key_2}, key 3: {feels_key_3}"
        )
        if feels_key_2 and feels_key_3:
            return PathAnswer("ignored", Kind.BROKEN, evidence)
        if feels_key_2:
            return PathAnswer("shows", Kind.OK, evidence)
        if feels_key_3:
            return PathAnswer("hides", Kind.OK, evidence)
        return PathAnswer("hides all", Kind.BROKEN, evidence)

    def _feels_key(self, token: int, row: int, before: np.ndarray, mask: np.ndarray) -> bool:
        """Return whether a row of the output differs from before if a key changes."""
        others = perturbed(self.inputs(), token, self.base, scale=3.0)
        after = run(self.subject, self.base, others, mask=mask).output
        difference = float(np.abs(before - after)[..., row, :].max())
        return difference > tolerance(before, self.base.dtype)

    @cached_property
    def padding_true_hides(self) -> bool:
        """Return whether True in a padding mask hides, tested on the last key."""
        inputs = self.inputs()
        padding = np.zeros((BATCH, TOKENS), bool)
        padding[:, -1] = True
        others = perturbed(inputs, TOKENS - 1, self.base, scale=3.0)
        is_felt, _ = self.moved(self.base, inputs, others, [0, 1], padding=padding)
        return not is_felt

    # ---- Answers ---------------------------------------------------------------------------------

    def only(self, question: Question, finding: PathAnswer, about: str = "") -> Answer:
        """Return an answer that holds on the first path alone."""
        return merge(self.subject, question, {self.base: finding}, about)

    def answer(
        self,
        question: Question,
        ask: Callable[[Path], PathAnswer],
        paths: Iterable[Path] | None = None,
        about: str = "",
        also: PathAnswer | None = None,
    ) -> Answer:
        """Ask on every path, and merge the findings; see `rules.merge`."""
        if paths is None:
            paths = self.paths
        findings: dict[Path, PathAnswer] = {}
        for path in paths:
            try:
                findings[path] = ask(path)
            except (RejectedCall, Failed) as error:
                findings[path] = of_error(error)
        return merge(self.subject, question, findings, about, also)


# ---- Changed inputs ------------------------------------------------------------------------------


def perturbed(
    inputs: Inputs, token: int, path: Path, letters: str = "qkv", scale: float | None = None
) -> Inputs:
    """Return the inputs with a large change of one token in each array that has one of the letters
    (query, key, value).
    """
    if scale is None:
        scale = LARGE[path.dtype]
    rng = np.random.default_rng(SEED + 1)
    arrays = by_letters(inputs)
    for own_letters, x in arrays.items():
        if set(own_letters) & set(letters) and token < x.shape[-2]:
            other = x.copy()
            other[..., token, :] = scale * rng.standard_normal(x[..., token, :].shape)
            arrays[own_letters] = other
    return from_letters(arrays)


def mapped(inputs: Inputs, function: Callable[[np.ndarray], np.ndarray]) -> Inputs:
    """Apply a function to each of the inputs; equal ones stay one array."""
    return from_letters({letters: function(x) for letters, x in by_letters(inputs).items()})


# ---- Compared outputs ----------------------------------------------------------------------------


def tolerance(x: np.ndarray, dtype: str) -> float:
    """Return the rounding difference between two calls of the same shapes: 16 units of the largest
    value.
    """
    largest = 1.0
    finite = np.abs(x[np.isfinite(x)])
    if finite.size:
        largest = float(finite.max())
    return 16 * unit_of_rounding(dtype) * largest


def change(
    before: np.ndarray, after: np.ndarray, path: Path, rows: Sequence[int]
) -> tuple[bool, str]:
    """Return whether two outputs (…, rows, width) differ, with NaN equal to NaN, and the largest
    change.
    """
    same_nan = np.isnan(before) & np.isnan(after)
    with np.errstate(invalid="ignore"):
        difference = np.where(same_nan | (before == after), 0.0, np.abs(after - before))
    difference = np.where(np.isnan(difference), np.inf, difference)
    where = np.unravel_index(int(difference.argmax()), difference.shape)
    index = [int(i) for i in where]
    index[-2] = rows[index[-2]]
    evidence = (
        f"output[{', '.join(map(str, index))}] changes from {before[where]:.6g} to "
        f"{after[where]:.6g}"
    )
    return bool(difference.max() > tolerance(before, path.dtype)), evidence


def changed_rows(before: np.ndarray, after: np.ndarray, path: Path) -> list[bool]:
    """Return for each row of two outputs (…, rows, width) whether it differs, see `change`."""
    are_changed = []
    for t in range(before.shape[-2]):
        is_changed, _ = change(before[..., [t], :], after[..., [t], :], path, [t])
        are_changed.append(is_changed)
    return are_changed


def relative_error(output: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, as a part of the largest expected value."""
    return float(np.abs(output - expected).max() / np.abs(expected).max())


# ---- In words ------------------------------------------------------------------------------------


def numbers(x: np.ndarray) -> str:
    """Format the first few values of a row."""
    return f"[{', '.join(f'{value:.4g}' for value in x[:3])}, …]"


def describe_shapes(inputs: Inputs) -> str:
    """Return the shapes of query, key and value as text."""
    if inputs[0] is inputs[1] and inputs[1] is inputs[2]:
        return f"x {inputs[0].shape}"
    query, key, value = inputs
    return f"query {query.shape}, key {key.shape}, value {value.shape}"


def plain_layer(subject: Subject, num_kv_heads: int = NUM_HEADS) -> dict[str, Any]:
    """Return spec and weights of a layer with identity projections, so that only its attention
    remains.
    """
    spec = AttentionSpec(NUM_HEADS * subject.head_dim, NUM_HEADS, num_kv_heads=num_kv_heads)
    widths = {
        "q_proj": spec.q_width,
        "k_proj": spec.k_width,
        "v_proj": spec.v_width,
        "out_proj": spec.d_model,
    }
    weights: Weights = {}
    for name, width in widths.items():
        weights[f"{name}.weight"] = np.eye(width, spec.d_model, dtype=np.float32)
        weights[f"{name}.bias"] = np.zeros(width, np.float32)
    return {"spec": spec, "weights": weights}
