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
from parity.explain.conformance.answers import Answer, Finding, Kind, Question
from parity.explain.conformance.calls import Failed, Refused, Result, run
from parity.explain.conformance.rules import merge, of_error
from parity.explain.conformance.subjects import (
    BATCH,
    NUM_HEADS,
    SEED,
    TOKENS,
    Inputs,
    Path,
    Subject,
)
from parity.measure.core.compare import unit_of_rounding
from parity.measure.core.weights import Weights

LARGE = {"float32": 1e5, "bfloat16": 1e5, "float16": 30.0}
"""Size of a perturbation: large enough to outweigh a finite penalty on a hidden key, small enough
for the dtype.
"""


class Examination:
    """A subject under examination: its inputs, its paths, and the form of its mask.

    Raises:
        ValueError: if even a plain call fails.
    """

    def __init__(self, subject: Subject, dtypes: Sequence[str] | None = None) -> None:
        self.subject = subject
        self.paths = list(subject.paths(dtypes or subject.dtypes))
        self.base = self.paths[0]
        try:
            run(subject, self.base, self.inputs())
        except (Refused, Failed) as error:
            shapes = describe_shapes(self.inputs())
            raise InputError(
                subject.name, f"attend over inputs of shapes {shapes}", str(error)
            ) from error
        self.weights_refusal: Refused | None = None
        if "need_weights" in subject.takes:
            try:
                run(subject, replace(self.base, need_weights=True), self.inputs())
            except Refused as refused:  # the path with weights is not supported
                self.weights_refusal = refused
                self.paths = [path for path in self.paths if not path.need_weights]
            except Failed:  # the questions will report it
                pass
        self.known: dict[Any, Any] = {}  # results that several questions share

    @property
    def steady_paths(self) -> list[Path]:
        """Return the paths on which no requested dropout makes outputs random."""
        return [path for path in self.paths if not path.drops]

    def hidden_randomness(self, path: Path) -> str:
        """Return the largest difference between two calls on a path, in words; empty if they agree.

        Only a layer without a settable dropout rate is tested: it may have a rate of its own. A
        call that fails is not random, so that the question itself reports it.
        """
        if "dropout" in self.subject.takes:
            return ""
        asked = ("hidden_randomness", path)
        if asked not in self.known:
            inputs = self.inputs()
            try:
                first, second = (
                    self.run(path, inputs, seed=seed).output for seed in (SEED, SEED + 1)
                )
            except (Refused, Failed):
                return ""
            is_random, seen = change(first, second, path, range(TOKENS))
            self.known[asked] = seen if is_random else ""
        return self.known[asked]

    @property
    def plain_paths(self) -> list[Path]:
        """Return the steady paths in the first dtype, without gradients, for questions independent
        of dtype.
        """
        return [
            path for path in self.steady_paths if path.dtype == self.base.dtype and not path.grad
        ]

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

    @property
    def takes_mask(self) -> bool:
        """Return whether its mask has an effect."""
        return "mask" in self.subject.takes and self.polarity.words in ("hides", "shows")

    @cached_property
    def padding_true_hides(self) -> bool:
        """Return whether True in a padding mask hides, tested on the last key."""
        inputs = self.inputs()
        padding = np.zeros((BATCH, TOKENS), bool)
        padding[:, -1] = True
        others = perturbed(inputs, TOKENS - 1, self.base, scale=3.0)
        return not self.moved(self.base, inputs, others, [0, 1], padding=padding)[0]

    def inputs(
        self, num_keys: int | None = None, num_queries: int = TOKENS, seed: int = SEED
    ) -> Inputs:
        """Return random inputs; a layer gets one array three times, or two arrays if the number of
        keys is given.
        """
        rng = np.random.default_rng(seed)
        if self.subject.is_layer:
            query = rng.standard_normal((BATCH, num_queries, self.subject.width))
            key = (
                query
                if num_keys is None
                else rng.standard_normal((BATCH, num_keys, self.subject.width))
            )
            return query, key, key
        num_keys = num_queries if num_keys is None else num_keys
        sizes = (num_queries, num_keys, num_keys)
        shapes = [(BATCH, NUM_HEADS, num_tokens, self.subject.head_dim) for num_tokens in sizes]
        return tuple(rng.standard_normal(shape) for shape in shapes)  # type: ignore[return-value]

    @property
    def separate_keys(self) -> tuple[tuple[str, str], ...]:
        """Return the inputs that can differ from the query, as letters and as words."""
        if "key" not in self.subject.takes:
            return ()
        return (("k", "key"), ("v", "value")) if "value" in self.subject.takes else (("kv", "key"),)

    def separate_inputs(self, num_tokens: int = TOKENS) -> Inputs:
        """Return random inputs that are distinct arrays, as far as the subject allows it."""
        if "key" not in self.subject.takes:
            return self.inputs(num_queries=num_tokens)
        query, key, value = self.inputs(num_tokens, num_tokens)
        return query, key, value if "value" not in self.subject.takes else value.copy()

    def run(
        self, path: Path, inputs: Inputs, hidden: np.ndarray | None = None, **options: Any
    ) -> Result:
        """Call the subject, with a mask that hides (T, S) where it is true."""
        if hidden is None:
            return run(self.subject, path, inputs, **options)
        return run(self.subject, path, inputs, mask=self.mask(hidden), **options)

    def mask(self, hidden: np.ndarray) -> np.ndarray:
        """Convert a mask, True = hidden, to the values of the subject."""
        return (hidden if self.true_hides else ~hidden)[None, None]

    @property
    def true_hides(self) -> bool:
        """Return whether True in a mask hides, by observation; by its claim if that fails."""
        return (
            self.polarity.words == "hides" if self.takes_mask else self.subject.mask_true != "shows"
        )

    @cached_property
    def polarity(self) -> Finding:
        """Determine the effect of True in a mask: it hides, shows, is ignored or hides all."""
        one_true = np.zeros((1, 1, TOKENS, TOKENS), bool)
        one_true[..., 2] = True  # key 2 alone
        inputs = self.inputs()
        row = TOKENS - 1  # the last row attends to every key, even under causal attention
        before = run(self.subject, self.base, inputs, mask=one_true).output
        felt = []
        for token in (2, 3):
            after = run(
                self.subject,
                self.base,
                perturbed(inputs, token, self.base, scale=3.0),
                mask=one_true,
            ).output
            felt.append(
                float(np.abs(before - after)[..., row, :].max())
                > tolerance(before, self.base.dtype)
            )
        seen = f"mask True at key 2 only; row {row} feels key 2: {felt[0]}, key 3: {felt[1]}"
        if felt[0] == felt[1]:
            return Finding("ignored" if felt[0] else "hides all", Kind.BROKEN, seen)
        return Finding("shows" if felt[0] else "hides", Kind.KEPT, seen)

    def moved(
        self, path: Path, inputs: Inputs, others: Inputs, rows: Sequence[int], **options: Any
    ) -> tuple[bool, str]:
        """Return whether the outputs of some queries differ between two sets of inputs, and the
        numbers.
        """
        before, after = (
            self.run(path, given, **options).output[..., list(rows), :]
            for given in (inputs, others)
        )
        return change(before, after, path, rows)

    def only(self, question: Question, finding: Finding, about: str = "") -> Answer:
        """Return an answer that holds on the first path alone."""
        return merge(self.subject, question, {self.base: finding}, about)

    def answer(
        self,
        question: Question,
        ask: Callable[[Path], Finding],
        paths: Iterable[Path] | None = None,
        about: str = "",
        also: Finding | None = None,
    ) -> Answer:
        """Ask on every path, and merge the findings; see `rules.merge`."""
        findings: dict[Path, Finding] = {}
        for path in self.paths if paths is None else paths:
            try:
                findings[path] = ask(path)
            except (Refused, Failed) as error:
                findings[path] = of_error(error)
        return merge(self.subject, question, findings, about, also)


def perturbed(
    inputs: Inputs, token: int, path: Path, arrays: str = "qkv", scale: float | None = None
) -> Inputs:
    """Return the inputs with a large change of one token in each selected array (query, key,
    value).
    """
    rng = np.random.default_rng(SEED + 1)
    scale = LARGE[path.dtype] if scale is None else scale
    changed: dict[int, np.ndarray] = {}
    for letter, x in zip("qkv", inputs, strict=True):
        if letter in arrays and id(x) not in changed and token < x.shape[-2]:
            changed[id(x)] = x.copy()
            changed[id(x)][..., token, :] = scale * rng.standard_normal(x[..., token, :].shape)
    return tuple(changed.get(id(x), x) for x in inputs)  # type: ignore[return-value]


def mapped(inputs: Inputs, function: Callable[[np.ndarray], np.ndarray]) -> Inputs:
    """Apply a function to each of the inputs; equal ones stay one array."""
    done = {id(x): function(x) for x in inputs}
    return tuple(done[id(x)] for x in inputs)  # type: ignore[return-value]


def tolerance(x: np.ndarray, dtype: str) -> float:
    """Return the rounding difference between two calls of the same shapes: 16 units of the largest
    value.
    """
    finite = np.abs(x[np.isfinite(x)])
    return 16 * unit_of_rounding(dtype) * (float(finite.max()) if finite.size else 1.0)


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
    place = [int(i) for i in where]
    place[-2] = rows[place[-2]]
    seen = (
        f"output[{', '.join(map(str, place))}] changes from {before[where]:.6g} to "
        f"{after[where]:.6g}"
    )
    return bool(difference.max() > tolerance(before, path.dtype)), seen


def changed_rows(before: np.ndarray, after: np.ndarray, path: Path) -> list[bool]:
    """Return for each row of two outputs (…, rows, width) whether it differs, see `change`."""
    return [
        change(before[..., [t], :], after[..., [t], :], path, [t])[0]
        for t in range(before.shape[-2])
    ]


def numbers(x: np.ndarray) -> str:
    """Format the first few values of a row."""
    return f"[{', '.join(f'{value:.4g}' for value in x[:3])}, …]"


def describe_shapes(inputs: Inputs) -> str:
    """Return the shapes of query, key and value as text."""
    if inputs[0] is inputs[1] and inputs[1] is inputs[2]:
        return f"x {inputs[0].shape}"
    return ", ".join(
        f"{name} {x.shape}" for name, x in zip(("query", "key", "value"), inputs, strict=True)
    )


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
