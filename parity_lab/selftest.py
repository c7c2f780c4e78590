"""Test of the harness: known bugs are injected into an implementation, and each must be detected
and identified.

`parity_lab.injections` has at least one for each page of `parity/bugs`. They change the
implementations' own functions, in their frameworks, or the weights.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column
from rich.text import Text

from mha_spec import (
    Alibi,
    AttentionSpec,
    Gate,
    GridBias,
    Latent,
    LongRopeScaling,
    Norm,
    ProportionalScaling,
    RelativeBias,
    RelativeProducts,
    Rope,
    Temperature,
    YarnScaling,
)
from parity.explain.diagnosis.diagnose import Diagnosis, diagnose
from parity.measure.backends import BACKENDS, why_missing
from parity.measure.backends.record import record
from parity.measure.core.case import Case
from parity.measure.core.cases import CASES, cases_of_other_records
from parity.measure.core.compare import first_difference
from parity.measure.core.problem import Problem, make_problem
from parity.measure.core.quantization import CacheQuantization
from parity.measure.core.stages import stage_named
from parity.measure.core.trace import Reference, compare_trace
from parity.measure.core.weights import random_weights
from parity.use.reporting.console import print_table
from parity_lab.injections import Injection, bug_to_inject, bugs_to_inject, plan_of

SELFTESTED = [name for name, backend in BACKENDS.items() if backend.has_all_bugs]
"""Backends that support all bugs. Only masks of mha_tt are arrays: `tests/siblings/mha_tt` injects
a few bugs there.
"""

HOLDERS = (
    "features.alibi",
    "features.relative_bias",
    "features.relative_products",
    "masks",
    "features.rope",
    "features.norms",
    "weights",
    "projections",
    "stages",
    "mha",
    "cache",
    "cache_mha",
    "features.latent",
    "features.latent_mha",
    "heads",
    "features.temperature",
    "mask_arrays",
    "functional",
)
"""Modules of an implementation that have its functions, in addition to the package itself."""


def _rotating(rope: Rope) -> AttentionSpec:
    """Return a layer with few features but RoPE, so that few other bugs apply."""
    return AttentionSpec(20, 2, head_dim=12, qkv_bias=False, out_bias=False, rope=rope)


SELFTEST_CASES = [
    Case(
        "mha",
        AttentionSpec(32, 4),
        "heads with biases, and a bias on the scores",
        seq_len=7,
        bias=True,
    ),
    Case(
        "gqa-rope-causal",
        AttentionSpec(48, 6, num_kv_heads=2, head_dim=8, rope=Rope(10000.0)),
        "shared heads, rotary positions, two masks",
        seq_len=9,
        is_causal=True,
        key_padding_lengths=(7, 9),
    ),
    Case(
        "cross",
        AttentionSpec(32, 4, d_in=24, d_kv=40),
        "keys of a different width and length",
        seq_len=4,
        seq_len_k=7,
        is_causal=True,
        key_padding_lengths=(2, 7),
    ),
    Case(
        "window",
        AttentionSpec(32, 4, qkv_bias=False, scale=0.5),
        "a sliding window, a different scale",
        seq_len=9,
        window_size=3,
    ),
    Case(
        "nan",
        AttentionSpec(32, 4),
        "a token that is NaN",
        seq_len=6,
        is_causal=True,
        not_finite="visible",
    ),
    Case(
        "cached",
        AttentionSpec(32, 4, num_kv_heads=2, head_dim=8, rope=Rope(10000.0)),
        "prompt and steps of sequences of different lengths",
        seq_len=8,
        chunks=(4, 1, 3),
        new_lengths=((4, 2), (1, 1), (2, 3)),
        capacity=10,
    ),
    CASES["trained-anarcii-causal"],
    CASES["trained-smollm2-causal"],
    Case(
        "norms",
        AttentionSpec(
            *(48, 6),
            num_kv_heads=2,
            head_dim=8,
            rope=Rope(10000.0),
            qk_norm=Norm(per_head=True, eps=0.01),
            v_norm=Norm(weight=None),
            gate=Gate(bias=True),
        ),
        "norms of heads, each with its own weight, and of values; a gate",
        seq_len=7,
        is_causal=True,
    ),
    Case(
        "norms-after-rope",
        AttentionSpec(
            *(32, 4),
            rope=Rope(10000.0),
            qk_norm=Norm("layer", weight="1+w", bias=True, after_rope=True),
            context_norm=Norm(over="width", eps=0.01),
        ),
        "layer norms after RoPE, their weight 1 + w, and a norm of the context",
        seq_len=7,
        is_causal=True,
    ),
    Case(
        "norms-of-width",
        AttentionSpec(
            32, 4, qkv_bias=(True, False, True), qk_norm=Norm(over="width", eps=0.01), clip_qkv=0.5
        ),
        "norms over the width of all heads, of clipped projections; keys have no bias",
        seq_len=7,
        is_causal=True,
    ),
    Case(
        "shared-kv",
        AttentionSpec(
            *(32, 4),
            num_kv_heads=2,
            head_dim=12,
            shared_kv=True,
            qk_norm=Norm(eps=0.01),
            rope=Rope(10000.0),
        ),
        "keys and values of another layer, which has rotated them",
        seq_len=7,
        is_causal=True,
    ),
    Case(
        "rope-yarn",
        _rotating(
            Rope(
                scaling=YarnScaling(4.0, 64, mscale=1.0, mscale_all_dim=0.4),
                rotary_dim=8,
                rotated="last",
                pairs="interleaved",
            )
        ),
        "the last features of a head, interleaved pairs, scaled",
        seq_len=9,
    ),
    Case("rope-partial", _rotating(Rope(rotary_dim=8)), "the first features of a head", seq_len=9),
    Case(
        "rope-proportional",
        _rotating(Rope(scaling=ProportionalScaling(0.5))),
        "half of all pairs",
        seq_len=9,
    ),
    Case(
        "rope-longrope",
        _rotating(
            Rope(
                scaling=LongRopeScaling(
                    4.0, 6, (1.0, 1.1, 1.2, 1.3, 1.4, 1.5), (1.0, 1.5, 2.0, 4.0, 6.0, 9.0)
                )
            )
        ),
        "short factors, then long ones",
        seq_len=9,
        chunks=(4, 1, 3, 1),
        capacity=13,
    ),
    Case(
        "rope-sections",
        _rotating(Rope(100.0, scaling=YarnScaling(4.0, 64, truncate=False), sections=(3, 2, 1))),
        "positions on three axes, a ramp that is not truncated",
        seq_len=9,
    ),
    Case(
        "rope-sections-interleaved",
        _rotating(Rope(100.0, sections=(3, 2, 1), section_order="interleaved")),
        "positions on three axes, their pairs in turn",
        seq_len=9,
    ),
    Case(
        "rope-sections-own",
        _rotating(Rope(100.0, sections=(3, 3), section_frequencies="own")),
        "rows and columns, each with a series of frequencies",
        seq_len=9,
    ),
    Case(
        "soft-cap",
        AttentionSpec(32, 4, num_kv_heads=2, soft_cap=1.5),
        "capped scores, with a bias",
        seq_len=7,
        is_causal=True,
        bias=True,
        gain=3.0,
    ),
    Case(
        "value-head-dim",
        AttentionSpec(32, 4, num_kv_heads=2, head_dim=12, value_head_dim=8),
        "values narrower than keys",
        seq_len=7,
        is_causal=True,
    ),
    Case(
        "sinks",
        AttentionSpec(
            32,
            4,
            num_kv_heads=2,
            qkv_bias=False,
            out_bias=False,
            sinks=True,
            alibi=Alibi(scaled=True),
        ),
        "a sink logit for each head; ALiBi, scaled",
        seq_len=7,
        is_causal=True,
    ),
    Case(
        "temperature",
        AttentionSpec(32, 4, temperature=Temperature(3, scale=0.5, first_position=1)),
        "a temperature beyond two lengths",
        seq_len=8,
        chunks=(4, 1, 3),
        new_lengths=((4, 2), (1, 1), (2, 3)),
        capacity=10,
    ),
    Case(
        "alibi",
        AttentionSpec(48, 6, num_kv_heads=2, qkv_bias=False, out_bias=False, alibi=Alibi()),
        "ALiBi, from a cache",
        seq_len=7,
        chunks=(4, 1, 2),
        capacity=8,
    ),
    Case(
        "relative-bias",
        AttentionSpec(32, 4, qkv_bias=False, out_bias=False, relative_bias=RelativeBias(8, 8)),
        "a relative bias by buckets of distance",
        seq_len=9,
    ),
    Case(
        "relative-bias-cached",
        AttentionSpec(
            32,
            4,
            qkv_bias=False,
            out_bias=False,
            relative_bias=RelativeBias(6, 7, bidirectional=False),
        ),
        "a relative bias of earlier keys only, from a cache",
        seq_len=9,
        chunks=(4, 1, 4),
        capacity=10,
    ),
    Case(
        "relative-products",
        AttentionSpec(
            *(32, 4),
            qkv_bias=False,
            out_bias=False,
            relative_products=RelativeProducts(3, 4, num_exact=2, max_distance=6, of_keys=True),
        ),
        "products with vectors of distances",
        seq_len=9,
    ),
    Case(
        "relative-products-cached",
        AttentionSpec(
            32, 4, qkv_bias=False, out_bias=False, relative_products=RelativeProducts(4, 0)
        ),
        "the same of queries alone, from a cache",
        seq_len=9,
        chunks=(4, 1, 4),
        capacity=10,
    ),
    Case(
        "grid-bias",
        AttentionSpec(
            32, 4, qkv_bias=False, out_bias=False, relative_bias=GridBias(2, 4, class_token=True)
        ),
        "a relative bias by positions on a grid",
        seq_len=9,
    ),
    Case(
        "latents",
        AttentionSpec(
            *(32, 4),
            head_dim=12,
            value_head_dim=6,
            qkv_bias=False,
            out_bias=False,
            latent=Latent(10, 4, q_rank=14, eps=0.01, q_factor=1.5, kv_factor=1.8),
            rope=Rope(
                100.0,
                rotary_dim=4,
                rotated="last",
                pairs="interleaved",
                scaling=YarnScaling(4.0, 64, mscale=1.0, mscale_all_dim=0.4),
            ),
        ),
        "queries, keys and values made of latents times factors; mscale in the scale",
        seq_len=8,
        is_causal=True,
    ),
    Case(
        "empty-rows",
        AttentionSpec(32, 4, qkv_bias=False, out_bias=False),
        "any mask, with rows without a key",
        seq_len=6,
        random_mask=True,
    ),
    Case(
        "chunk", AttentionSpec(32, 4, chunk_size=3), "a layer of chunks", seq_len=8, is_causal=True
    ),
    Case(
        "padded",
        AttentionSpec(32, 4, qkv_bias=False, out_bias=False),
        "sequences of three lengths, all of them padded",
        batch=3,
        seq_len=7,
        key_padding_lengths=(5, 3, 6),
    ),
    CASES["packed-padding"],
    Case(
        "rope-far",
        _rotating(Rope()),
        "positions that a bfloat16 cannot count",
        seq_len=9,
        first_position=1000,
    ),
    CASES["rope-llama3"],
    Case(
        "left-padding",
        AttentionSpec(32, 4, num_kv_heads=2, head_dim=8, rope=Rope(10000.0)),
        "padding on the left, as a mask and positions",
        seq_len=7,
        is_causal=True,
        mask=np.array([[0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0]], bool)[:, None, None],
        position_ids=np.array([[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 1, 2, 3]]),
    ),
    Case(
        "quantized-cache",
        AttentionSpec(32, 4, num_kv_heads=2, head_dim=8, rope=Rope(10000.0)),
        "a cache of int8, with a scale for each head of each token",
        seq_len=8,
        chunks=(4, 1, 3),
        capacity=8,
        cache_quantization=CacheQuantization("int8", "token_head"),
    ),
    CASES["packed"],
]
SELFTEST_CASES += cases_of_other_records(SELFTEST_CASES)
"""Cases for injected bugs: three different specifications, a window, a cache, trained layers, and
then single features with the bugs that only they allow.
"""

NUM_GENERAL = [case.name for case in SELFTEST_CASES].index("trained-smollm2-causal") + 1
"""Number of cases that have every bug that applies to them; later cases have those that no earlier
case has, not counting trained layers.
"""


@dataclass(frozen=True)
class Outcome:
    """Outcome of an injected bug.

    Attributes:
        bug: name of the bug; empty if none was injected.
        case, backend, seed: where the bug was injected.
        expected: stages at one of which the first difference must be.
        stage: stage of the first difference; empty if there is none.
        named: bugs that the diagnosis names, in its order.
        others: bugs that it cannot distinguish from them.
        kind: kind of the diagnosis.
    """

    bug: str
    case: str
    backend: str
    seed: int
    expected: tuple[str, ...]
    stage: str
    named: tuple[str, ...]
    others: tuple[str, ...]
    kind: str

    @property
    def is_caught(self) -> bool:
        """True if the bug was detected at its stage; without a bug, if no stage differs."""
        if not self.bug:
            return not self.stage
        return self.stage in self.expected

    @property
    def is_named(self) -> bool:
        """True if the diagnosis names the bug and no other; without a bug, if it names none."""
        if not self.bug:
            return not self.named
        return {*self.named} == {self.bug}  # perhaps on more than one path

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            **asdict(self),
            "is_caught": self.is_caught,
            "is_named": self.is_named,
        }


def selftest(
    backends: Sequence[str] | None = None,
    cases: Iterable[Case] | None = None,
    *,
    seeds: Sequence[int] = (0,),
    on_bug: Callable[[str, str, str], None] | None = None,
) -> Iterator[Outcome]:
    """Inject each bug into every case of every backend, with random or trained weights, and once no
    bug.

    Args:
        backends: names; default: jax and torch, if installed.
        cases: cases of `SELFTEST_CASES`; default: all.
        seeds: seeds of the random weights.
        on_bug: called before each run, with the names of the bug, the case and the backend.
    """
    if backends is None:
        backends = [name for name in SELFTESTED if not why_missing(name)]
    if cases is None:
        cases = SELFTEST_CASES
    for backend, case in itertools.product(backends, list(cases)):
        seeds_of_case = seeds
        if case.trained is not None:
            seeds_of_case = seeds[:1]  # its weights belong to the trained layer
        for seed in seeds_of_case:
            for bug in ("", *selftest_bugs(case)):
                if on_bug is not None:
                    on_bug(bug or "nothing", case.name, backend)
                yield run_with_bug(bug, case, backend, seed=seed)


def bugs_in(case: Case) -> list[str]:
    """Return the names of the bugs that can be injected into a case."""
    return [*bugs_to_inject(case)]


def selftest_bugs(case: Case) -> list[str]:
    """Return the names of the bugs that the self-test injects into one of its cases."""
    index = SELFTEST_CASES.index(case)
    before = {
        name
        for earlier in SELFTEST_CASES[:index]
        if earlier.trained is None
        for name in bugs_in(earlier)
    }
    return [name for name in bugs_in(case) if index < NUM_GENERAL or name not in before]


def run_with_bug(bug: str, case: Case, backend: str, *, seed: int = 0) -> Outcome:
    """Run a case on a backend with an injected bug, compare and diagnose it.

    Raises:
        ValueError: if the bug cannot be injected there.
    """
    # Bugs of the backward pass show in gradients alone.
    has_gradients = bool(bug) and bool(bug_to_inject(bug, case).backward)
    expected = _reference(case, seed, with_gradients=has_gradients)
    problem = expected.problem
    with inject(bug, problem, backend) as given:
        trace = record(backend, expected, given)
    difference = first_difference(compare_trace(trace, expected))
    stage = ""
    diagnosis = Diagnosis()
    if difference is not None:
        stage = stage_named(difference.stage).kind
        diagnosis = diagnose(trace.accumulated, problem)
    expected_stages: tuple[str, ...] = ()
    if bug:
        expected_stages = bug_to_inject(bug, case).stages
    named: list[str] = []
    others: list[str] = []
    for finding in diagnosis.named:
        named += finding.bugs
        others += finding.others
    return Outcome(
        bug,
        case.name,
        backend,
        seed,
        expected_stages,
        stage,
        tuple(named),
        tuple(others),
        diagnosis.kind,
    )


@lru_cache(maxsize=len(SELFTEST_CASES))
def _reference(case: Case, seed: int, *, with_gradients: bool = False) -> Reference:
    """Return the reference for all bugs in a case."""
    weights = None
    if case.trained is None:
        weights = random_weights(case.spec, seed)
    return Reference(make_problem(case, "float32", weights), with_gradients)


@contextmanager
def inject(bug: str | Injection, problem: Problem, backend: str) -> Iterator[Problem]:
    """Inject a bug into the functions of a backend, and yield the problem, with the bug in its
    weights.

    Raises:
        ValueError: if there is no such bug.
    """
    plan = plan_of(bug, problem, backend)
    sibling = plan.sibling
    holders = [sibling]
    for part in HOLDERS:
        holders.append(importlib.import_module(f"{sibling.__name__}.{part}"))
    before = []
    try:
        for name, override in plan.functions.items():
            defining = next(holder for holder in holders if hasattr(holder, name))
            function = inspect.unwrap(getattr(defining, name))
            for holder in holders:
                original = getattr(holder, name, None)
                # The package has a checked form of the function that its modules have.
                if original is None or inspect.unwrap(original) is not function:
                    continue
                broken = partial(override, plan, original)
                if name == "apply_rope":  # bugs change the positions themselves
                    broken = partial(_rotated_by_positions, broken)
                before.append((holder, name, original))
                setattr(holder, name, broken)
        yield replace(problem, weights=plan.weights)
    finally:
        for holder, name, original in before:
            setattr(holder, name, original)


def _rotated_by_positions(rotate: Callable[..., Any], x: Any, positions: Any, rope: Any) -> Any:
    """Call `apply_rope` with positions instead of their rotations, which implementations compute
    once for q and k.
    """
    return rotate(x, getattr(positions, "positions", positions), rope)


def print_selftest(outcomes: list[Outcome], out: Console) -> None:
    """Print the outcomes: a row for each bug, undetected and unidentified ones, and a sum."""
    columns: list[Column] = []
    for name in ("bug", "stage"):
        columns.append(Column(name, overflow="fold", no_wrap=out.width >= 80))
    for name in ("injected", "detected", "named"):
        columns.append(Column(name, justify="right", no_wrap=True))
    rows, styles = [], []
    outcomes_by_bug: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        outcomes_by_bug.setdefault(outcome.bug or "(none)", []).append(outcome)
    for bug, of_bug in outcomes_by_bug.items():
        num_detected, num_named = _counts(of_bug)
        style = "red"
        if num_detected == num_named == len(of_bug):
            style = ""
        styles.append(style)
        stages = dict.fromkeys(outcome.stage for outcome in of_bug if outcome.stage)
        in_words = ", ".join(stages) or "—"
        rows.append((bug, in_words, str(len(of_bug)), str(num_detected), str(num_named)))
    print_table(
        out,
        "Injected bugs: detected at their stage, and named by the diagnosis",
        columns,
        rows,
        styles,
    )
    for outcome in outcomes:
        where = f"{outcome.bug or 'nothing'} in {outcome.case} on {outcome.backend}"
        if not outcome.is_caught:
            text = f"NOT DETECTED: {where}: {outcome.stage or 'all stages passed'}"
            out.print(Text(text, style="bold red"), soft_wrap=True)
        elif not outcome.is_named:
            names = ", ".join(outcome.named) or "nothing"
            text = f"not named: {where}: the diagnosis names {names}"
            out.print(Text(text, style="yellow"), soft_wrap=True)
    num_detected, num_named = _counts(outcomes)
    style = "bold red"
    if num_detected == len(outcomes):
        style = "bold green"
    counts = f"{num_detected} detected at their stage, {num_named} named"
    out.print(Text(f"{len(outcomes)} injected, {counts}", style=style))


def _counts(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Return how many bugs were detected, and how many named."""
    num_detected = sum(outcome.is_caught for outcome in outcomes)
    num_named = sum(outcome.is_named for outcome in outcomes)
    return num_detected, num_named
