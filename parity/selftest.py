"""Would the harness notice? Every mistake that it knows is made in a sibling on purpose; it must be seen, and named.

The mistakes are planted in the siblings' own functions, in their frameworks, or in the weights that they are given, and
share no code with `parity.hypotheses`, which says what they would look like.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from parity.backends import load_backend, why_missing
from parity.compare import first_difference
from parity.diagnose import Diagnosis, diagnose
from parity.hypotheses import PRECISIONS, hypotheses_for
from parity.problem import Problem, make_problem
from parity.run import Reference, judge, record
from parity.spec import CASES, AttentionSpec, Case, stage_kind
from parity.weights import Weights, random_weights

BACKENDS = ("jax", "torch")

Function = Callable[..., Any]
Breaks = Callable[[Function], Function]

SELFTEST_CASES = [
    Case("mha", AttentionSpec(32, 4), "heads with biases, and a bias on the scores", seq_len=7, bias=True),
    Case(
        "gqa-rope-causal",
        AttentionSpec(48, 6, num_kv_heads=2, head_dim=8, rope_theta=10000.0),
        "shared heads, rotary positions, two masks",
        seq_len=9,
        is_causal=True,
        key_padding_lengths=(7, 9),
    ),
    Case(
        "cross",
        AttentionSpec(32, 4, d_in=24, d_kv=40),
        "keys of another width and length",
        seq_len=4,
        seq_len_k=7,
        is_causal=True,
        key_padding_lengths=(2, 7),
    ),
    Case("window", AttentionSpec(32, 4, qkv_bias=False), "a sliding window", seq_len=9, window_size=3),
    Case("nan", AttentionSpec(32, 4), "a token that is NaN", seq_len=6, is_causal=True, not_finite="visible"),
    Case(
        "cached",
        AttentionSpec(32, 4, num_kv_heads=2, head_dim=8, rope_theta=10000.0),
        "prompt and steps of sequences of different lengths",
        seq_len=8,
        chunks=(4, 1, 3),
        new_lengths=((4, 2), (1, 1), (2, 3)),
        capacity=10,
    ),
    CASES["trained-anarcii-causal"],
    CASES["trained-smollm2-causal"],
]
"""Where the mistakes are planted: three different specifications, what only a window or a cache has, trained layers."""


@dataclass(frozen=True)
class Outcome:
    """What became of a mistake that was planted.

    Attributes:
        hypothesis: its name; empty where nothing was planted.
        case, backend, seed: where.
        expected: the stages at one of which it must be seen.
        stage: the stage at which it was; empty if it was not.
        named: the mistakes that the diagnosis names, the first one first.
        others: what it says cannot be told from them.
        kind: the diagnosis' own.
    """

    hypothesis: str
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
        """Whether it was seen at its stage; where nothing was planted, whether nothing was seen."""
        return self.stage in self.expected if self.hypothesis else not self.stage

    @property
    def is_named(self) -> bool:
        """Whether the diagnosis names it and nothing else; where nothing was planted, whether it names nothing."""
        return {*self.named} == ({self.hypothesis} if self.hypothesis else set())  # perhaps on more than one path

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON takes them."""
        return {**asdict(self), "is_caught": self.is_caught, "is_named": self.is_named}


def selftest(
    backends: Sequence[str] | None = None,
    cases: Iterable[Case] | None = None,
    *,
    seeds: Sequence[int] = (0,),
    on_mistake: Callable[[str, str, str], None] = lambda hypothesis, case, backend: None,
) -> Iterator[Outcome]:
    """Plant every mistake in every case of every backend, with random weights or trained ones, and nothing once each.

    Args:
        backends: names; those of jax and torch that are installed when absent.
        cases: of `SELFTEST_CASES`; all when absent.
        seeds: of the random weights.
        on_mistake: called before each, with the names of the mistake, the case and the backend.
    """
    for name in backends if backends is not None else [name for name in BACKENDS if not why_missing(name)]:
        for case in SELFTEST_CASES if cases is None else cases:
            for seed in seeds if case.trained is None else seeds[:1]:
                for hypothesis in ("", *mistakes_in(case)):
                    on_mistake(hypothesis or "nothing", case.name, name)
                    yield plant(hypothesis, case, name, seed=seed)


def mistakes_in(case: Case) -> list[str]:
    """The names of the mistakes that can be planted in a case."""
    known = dict.fromkeys(hypothesis.name for hypothesis in hypotheses_for(case))
    return [*known, *([] if case.is_cached else [f"precision-{kind}" for kind in PRECISIONS])]


def plant(hypothesis: str, case: Case, backend: str, *, seed: int = 0) -> Outcome:
    """Run a case on a backend with a mistake planted in it, judge and diagnose it.

    Raises:
        ValueError: if the mistake cannot be planted there.
    """
    weights = None if case.trained is not None else random_weights(case.spec, seed)
    problem = make_problem(case, "float32", weights)
    expected = Reference(problem)
    with planted(hypothesis, problem, backend) as given:
        trace = record(backend, expected, given)
    difference = first_difference(judge(trace, expected))
    found = diagnose(trace.accumulated, problem) if difference is not None else Diagnosis("none")
    return Outcome(
        hypothesis,
        case.name,
        backend,
        seed,
        _stages_of(hypothesis, case),
        "" if difference is None else stage_kind(difference.stage),
        tuple(name for explanation in found.explanations for name in explanation.hypotheses),
        tuple(words for explanation in found.explanations for words in explanation.others),
        found.kind,
    )


@contextmanager
def planted(hypothesis: str, problem: Problem, backend: str) -> Iterator[Problem]:
    """A backend with a mistake in its functions, and the problem to give it, with the mistake in its weights.

    Raises:
        ValueError: if there is no such mistake.
    """
    sibling = importlib.import_module(f"mha_{backend}")
    plan = _Plan(problem, backend)
    if hypothesis and not plan.make(hypothesis):
        raise ValueError(f"hypothesis must be one that can be planted in {problem.case.name}, got {hypothesis!r}")
    holders = [
        sibling,
        *(importlib.import_module(f"mha_{backend}.{part}") for part in ("masks", "rope", "mha", "cache_mha")),
    ]
    before = []
    try:
        for name, breaks in plan.functions.items():
            original = getattr(sibling, name)
            broken = breaks(original)
            for holder in holders:
                if getattr(holder, name, None) is original:
                    before.append((holder, name, original))
                    setattr(holder, name, broken)
        yield replace(problem, weights=plan.weights)
    finally:
        for holder, name, original in before:
            setattr(holder, name, original)


# ---- The mistakes, in the frameworks' words --------------------------------------------------------------------------


class _Plan:
    """What to break for a mistake: functions by their names, and weights."""

    def __init__(self, problem: Problem, backend: str) -> None:
        self.problem = problem
        self.spec = problem.spec
        self.case = problem.case
        self.backend = load_backend(backend)
        self.sibling: Any = importlib.import_module(f"mha_{backend}")
        self.xp: Any = importlib.import_module({"jax": "jax.numpy", "torch": "torch"}[backend])
        self.weights: Weights = dict(problem.weights)
        self.functions: dict[str, Breaks] = {}

    def make(self, hypothesis: str) -> bool:
        """Plan a mistake, if there is one of that name."""
        for planner in (
            self.weight_mistake,
            self.rope_mistake,
            self.head_mistake,
            self.mask_mistake,
            self.other_mistake,
        ):
            if planner(hypothesis):
                return True
        return False

    # ---- In the weights ----------------------------------------------------------------------------------------------

    def weight_mistake(self, name: str) -> bool:
        weights, spec = self.weights, self.spec
        projection, _, what = name.partition("-")
        if what == "transposed":
            weights[f"{projection}.weight"] = weights[f"{projection}.weight"].T
        elif name.endswith("-swapped") and not (name == "k-v-swapped" and spec.rope_theta):
            one, other, _ = name.split("-")
            for leaf in ("weight", "bias"):
                names = f"{one}_proj.{leaf}", f"{other}_proj.{leaf}"
                if names[0] in weights:
                    weights[names[0]], weights[names[1]] = weights[names[1]], weights[names[0]]
        elif name.endswith("bias-missing") and name != "score-bias-missing":
            whose = {"all": ("q_proj", "k_proj", "v_proj", "out_proj"), "qkv": ("q_proj", "k_proj", "v_proj")}
            for each in whose.get(projection, (projection,)):
                weights[f"{each}.bias"] = np.zeros_like(weights[f"{each}.bias"])
        elif name.startswith("rope-weights-"):
            half = spec.head_dim // 2
            for each in name.partition("interleaved-")[2] or "qk":
                for leaf in ("weight", "bias"):
                    if (full := f"{each}_proj.{leaf}") in weights:
                        x = weights[full]
                        halves = (2, half) if "deinterleaved" not in name else (half, 2)
                        x = x.reshape(-1, *halves, *x.shape[1:]).swapaxes(1, 2)
                        weights[full] = np.ascontiguousarray(x).reshape(weights[full].shape)
        elif name.startswith("fused-qkv-"):
            self.mix_qkv(per_head="per-head" in name)
        else:
            return False
        return True

    def mix_qkv(self, *, per_head: bool) -> None:
        """Pack q, k and v in one order and unpack them in the other."""
        spec, group = self.spec, self.spec.num_heads // self.spec.num_kv_heads
        sizes = [spec.q_width, spec.kv_width, spec.kv_width]
        for leaf in ("weight", "bias"):
            if f"q_proj.{leaf}" not in self.weights:
                continue
            parts = [self.weights[f"{each}_proj.{leaf}"] for each in "qkv"]
            tail = parts[0].shape[1:]
            if per_head:  # packed one after the other, read group by group
                heads = np.concatenate(parts).reshape(spec.num_kv_heads, group + 2, spec.head_dim, *tail)
                read = [heads[:, :group], heads[:, group], heads[:, group + 1]]
            else:  # packed group by group, read one after the other
                groups = [part.reshape(spec.num_kv_heads, -1, *tail) for part in parts]
                packed = np.concatenate(groups, axis=1).reshape(-1, *tail)
                read = np.split(packed, np.cumsum(sizes)[:-1])
            for each, part in zip("qkv", read, strict=True):
                self.weights[f"{each}_proj.{leaf}"] = np.ascontiguousarray(part).reshape(-1, *tail)

    # ---- In RoPE -----------------------------------------------------------------------------------------------------

    def rope_mistake(self, name: str) -> bool:
        if not name.startswith(("rope-", "cache-position-")):
            return False
        kind, whose = (name[:-2], name[-1]) if name.endswith(("-q", "-k")) else (name, "qk")
        size = self.spec.head_dim
        evens_first = np.array([*range(0, size, 2), *range(1, size, 2)])

        def breaks(rope: Function) -> Function:
            calls = []  # project_qkv turns q, then k

            def broken(x: Any, positions: Any, theta: float) -> Any:
                calls.append(None)
                if "qk"[(len(calls) - 1) % 2] not in whose:
                    return rope(x, positions, theta)
                if kind == "rope-interleaved":
                    return rope(x[..., evens_first], positions, theta)[..., np.argsort(evens_first)]
                if kind == "rope-missing":
                    return x
                if kind == "rope-reversed":
                    return rope(x, -positions, theta)
                if kind.startswith("rope-off-by"):
                    return rope(x, positions + (-1 if "minus" in kind else 1), theta)
                if kind == "cache-position-off-by-one":
                    later = self.xp.where(positions[:, :1] > 0, positions + 1, positions)
                    return rope(x, later, theta)
                if kind == "cache-position-restarted":
                    return rope(x, positions - positions[:, :1], theta)
                return rope(x, positions, float(kind.removeprefix("rope-theta-")))

            return broken

        self.functions["apply_rope"] = breaks
        return True

    # ---- In the heads ------------------------------------------------------------------------------------------------

    def head_mistake(self, name: str) -> bool:
        if name == "kv-heads-tiled":
            self.functions["repeat_kv_heads"] = lambda _: lambda x, n: x[:, np.arange(n) % x.shape[1]]
        elif name == "heads-innermost":
            self.functions["split_heads"] = lambda _: (
                lambda x, n: x.reshape(*x.shape[:2], -1, n).swapaxes(1, 3).swapaxes(2, 3)
            )
        elif name == "heads-not-moved":
            self.functions["split_heads"] = lambda _: lambda x, n: x.reshape(x.shape[0], n, x.shape[1], -1)
        elif name == "heads-combined-innermost":
            self.functions["combine_heads"] = lambda _: (
                lambda x: x.swapaxes(1, 3).swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)
            )
        elif name == "heads-not-moved-back":
            self.functions["combine_heads"] = lambda _: lambda x: x.reshape(x.shape[0], x.shape[2], -1)
        elif name.endswith(("-heads-reversed", "-heads-rolled")):
            self.functions["project_qkv"] = lambda f: lambda *a, **o: self.reorder(name, f(*a, **o))
        elif name == "k-v-swapped":
            self.functions["project_qkv"] = lambda f: lambda *a, **o: (lambda q, k, v: (q, v, k))(*f(*a, **o))
        else:
            return False
        return True

    def reorder(self, name: str, qkv: Sequence[Any]) -> list[Any]:
        found = list(qkv)
        which = "qkv".index(name[0])
        heads = np.arange(found[which].shape[1])
        order = heads[::-1].copy() if name.endswith("reversed") else np.roll(heads, 1)
        found[which] = found[which][:, order]
        return found

    # ---- In the masks ------------------------------------------------------------------------------------------------

    def mask_mistake(self, name: str) -> bool:
        later = {
            "causal-off-by-one": lambda f: lambda t, s: f(t + 1, s)[1:],
            "causal-excludes-self": lambda f: lambda t, s: self.one_early(f(t, s)),
            "causal-bottom-right": lambda f: lambda t, s: f(s, s)[s - t :],
            "causal-ignored": lambda f: lambda t, s: f(t, s) & False,
        }
        cached = {
            "causal-top-left": lambda f: lambda lengths, t, s, **o: f(lengths * 0, t, s, **o),
            "causal-off-by-one": lambda f: lambda lengths, t, s, **o: f(lengths, t + 1, s, **o)[:, :, 1:],
            "causal-excludes-self": lambda f: lambda lengths, t, s, **o: self.one_early(f(lengths, t, s, **o)),
        }
        windowed = {
            "causal-off-by-one": self.window(lambda distance, size: (distance < -1) | (distance >= size)),
            "causal-excludes-self": self.window(lambda distance, size: (distance <= 0) | (distance >= size)),
            "window-one-too-wide": self.window(lambda distance, size: (distance < 0) | (distance >= size + 1)),
            "window-one-too-narrow": self.window(lambda distance, size: (distance < 0) | (distance >= size - 1)),
            "window-ignored": self.window(lambda distance, size: distance < 0),
        }
        padded = {
            "padding-ignored": lambda f: lambda lengths, s: f(lengths, s) & False,
            "padding-on-the-left": lambda f: lambda lengths, s: self.flipped(f(lengths, s)),
            "padding-off-by-one": lambda f: lambda lengths, s: self.shifted(f(lengths, s), 1),
            "padding-off-by-minus-one": lambda f: lambda lengths, s: self.shifted(f(lengths, s), -1),
        }
        if name == "mask-flipped":
            self.functions["masked_softmax"] = lambda f: lambda s, m=None: f(s, None if m is None else ~m)
        elif name == "mask-ignored":
            self.functions["masked_softmax"] = lambda f: lambda s, m=None: f(s)
        elif name == "mask-after-softmax":
            self.functions["masked_softmax"] = lambda f: lambda s, m=None: self.emptied(f(s), m)
        elif name == "causal-unasked":
            self.functions["create_attention_mask"] = lambda f: (
                lambda t, s=None, **o: f(t, s, **{**o, "is_causal": True})
            )
        elif self.case.is_cached and name in cached:
            self.functions["create_cache_mask"] = cached[name]
        elif self.case.window_size is not None and name in windowed:
            self.functions["create_sliding_window_mask"] = windowed[name]
        elif name in later:
            self.functions["create_attention_mask"] = lambda _: self.joined(causal=later[name])
        elif name in padded:
            self.functions["create_attention_mask"] = lambda _: self.joined(padding=padded[name])
        else:
            return False
        return True

    def joined(self, causal: Breaks = lambda f: f, padding: Breaks = lambda f: f) -> Function:
        """A mask for causality and padding, made of one for each of them."""

        def broken(t: int, s: int, *, is_causal: bool = False, key_padding_lengths: Any = None) -> Any:
            mask = (self.sibling.create_causal_mask(t, s) & False)[None, None]
            if is_causal:
                mask = mask | causal(self.sibling.create_causal_mask)(t, s)[None, None]
            if key_padding_lengths is not None:
                mask = mask | padding(self.sibling.create_padding_mask)(key_padding_lengths, s)
            return mask

        return broken

    def emptied(self, attn_weights: Any, mask: Any) -> Any:
        return attn_weights if mask is None else self.xp.where(mask, 0.0, attn_weights)

    def one_early(self, mask: Any) -> Any:
        """A causal mask that hides one key more in each row."""
        return self.xp.concatenate([mask[..., 1:], mask[..., :1] | True], axis=-1)

    def flipped(self, mask: Any) -> Any:
        return mask[..., np.arange(mask.shape[-1])[::-1].copy()]

    def shifted(self, mask: Any, by: int) -> Any:
        """A padding mask of sequences that are longer."""
        ends = mask[..., -1:] | True
        if by > 0:
            return self.xp.concatenate([ends & False, mask[..., :-1]], axis=-1)
        return self.xp.concatenate([mask[..., 1:], ends], axis=-1)

    def window(self, hides: Callable[[Any, int], Any]) -> Breaks:
        def broken(t: int, s: int | None = None, *, window_size: int, **_: Any) -> Any:
            distance = self.xp.arange(t)[:, None] - self.xp.arange(t if s is None else s)[None, :]
            return hides(distance, window_size)

        return lambda _: broken

    # ---- In the scores, the softmax, the output and the cache --------------------------------------------------------

    def other_mistake(self, name: str) -> bool:
        size = self.spec.head_dim
        factors = {
            "scale-missing": size**0.5,
            "scale-squared": size**-0.5,
            "scale-by-d-model": (size / self.spec.d_model) ** 0.5,
        }
        caches = {
            "cache-keys-as-values": lambda f: lambda cache, k, v, **o: f(cache, k, k, **o),
            "cache-keys-rolled": lambda f: (
                lambda cache, k, v, **o: f(cache, k[:, :, np.roll(np.arange(k.shape[2]), 1)], v, **o)
            ),
            "cache-slot-late": lambda f: lambda cache, k, v, **o: self.moved(f, cache, k, v, **o),
            "cache-slot-stale": lambda f: lambda cache, k, v, **o: self.stale(f, cache, k, v, **o),
            "cache-holds-padding": lambda f: lambda cache, k, v, **o: self.with_padding(f, cache, k, v, **o),
        }
        if name in factors:
            self.functions["attention_scores"] = lambda f: lambda q, k, bias=None: f(q * factors[name], k, bias)
        elif name == "scale-after-softmax":
            self.functions["attention_scores"] = lambda f: lambda q, k, bias=None: f(q * size**0.5, k, bias)
            self.functions["masked_softmax"] = lambda f: lambda s, m=None: f(s, m) / size**0.5
        elif name == "score-bias-scaled":
            self.functions["attention_scores"] = lambda f: (
                lambda q, k, bias=None: f(q, k, None if bias is None else bias / size**0.5)
            )
        elif name in ("score-bias-missing", "score-bias-after-softmax"):
            self.functions["attention_scores"] = lambda f: lambda q, k, bias=None: f(q, k)
            if name == "score-bias-after-softmax":
                bias = self.backend.from_numpy(self.problem.inputs["bias"])
                self.functions["masked_softmax"] = lambda f: lambda s, m=None: f(s, m) + bias
        elif name.startswith("softmax-over-"):
            axis = {"queries": 2, "heads": 1, "batch": 0}[name.removeprefix("softmax-over-")]
            self.functions["masked_softmax"] = lambda f: lambda s, m=None: self.over(axis, f, s, m)
        elif name == "nan-swallowed":
            without_nan = lambda x: self.xp.where(x != x, self.xp.zeros_like(x), x)  # noqa: E731
            self.functions["masked_softmax"] = lambda f: lambda s, m=None: without_nan(f(s, m))
            self.functions["scaled_dot_product_attention"] = lambda f: (
                lambda *a, **o: tuple(x if x is None else without_nan(x) for x in f(*a, **o))
            )
        elif name == "nan-leaks":
            self.functions["scaled_dot_product_attention"] = lambda _: self.naive
        elif name == "out-proj-missing":
            self.functions["project_with"] = lambda f: (
                lambda weights: lambda which, x: x if which == "out_proj" else f(weights)(which, x)
            )
        elif name in caches:
            self.functions["append_to_cache"] = caches[name]
        elif name.startswith("precision-"):
            bits = {"tf32": 10, "bfloat16": 7, "lofi": 4}[name.removeprefix("precision-")]
            self.weights = {n: x if n.endswith("bias") else _fewer_bits(np, x, bits) for n, x in self.weights.items()}
            cut = lambda x: _fewer_bits(self.xp, x, bits)  # noqa: E731
            self.functions["project_with"] = lambda f: lambda weights: lambda which, x: f(weights)(which, cut(x))
            self.functions["attention_scores"] = lambda f: lambda q, k, bias=None: f(cut(q), cut(k), bias)
            self.functions["attention_context"] = lambda f: lambda w, v: f(cut(w), cut(v))
        else:
            return False
        return True

    def naive(self, query: Any, key: Any, value: Any, *, mask: Any, bias: Any = None, **_: Any) -> tuple[Any, Any]:
        """Attention as its formula has it, from the stage functions: whoever asks for weights gets that."""
        attn_weights = self.sibling.masked_softmax(self.sibling.attention_scores(query, key, bias), mask)
        return self.sibling.attention_context(attn_weights, value), attn_weights

    def over(self, axis: int, softmax: Function, scores: Any, mask: Any) -> Any:
        """The softmax over another axis."""
        if mask is not None:
            mask = (mask | (scores != scores) & False).swapaxes(axis, 3)  # of the scores' whole shape
        return softmax(scores.swapaxes(axis, 3), mask).swapaxes(axis, 3)

    def moved(self, append: Function, cache: Any, k: Any, v: Any, **options: Any) -> Any:
        """Tokens after the first call one slot late, the lengths as they should be."""
        lengths = self.xp.where(cache.lengths > 0, cache.lengths + 1, cache.lengths)
        late = append(type(cache)(cache.keys, cache.values, lengths), k, v, **options)
        return type(cache)(late.keys, late.values, append(cache, k, v, **options).lengths)

    def stale(self, append: Function, cache: Any, k: Any, v: Any, *, new_lengths: Any = None) -> Any:
        """The last token of each sequence not written, the lengths as they should be."""
        added = cache.lengths * 0 + k.shape[2] if new_lengths is None else new_lengths
        right = append(cache, k, v, new_lengths=new_lengths)
        short = append(cache, k, v, new_lengths=self.xp.where(added > 0, added - 1, added))
        return type(cache)(short.keys, short.values, right.lengths)

    def with_padding(self, append: Function, cache: Any, k: Any, v: Any, *, new_lengths: Any = None) -> Any:
        """Padding written, too, the lengths as they should be."""
        right = append(cache, k, v, new_lengths=new_lengths)
        whole = append(cache, k, v)
        return type(cache)(whole.keys, whole.values, right.lengths)


def _fewer_bits(xp: Any, x: Any, bits: int) -> Any:
    """x with so many explicit bits of its mantissa, rounded."""
    tiny = 2.0**-100  # what is smaller may stay as it is
    exponent = xp.floor(xp.log2(xp.where(abs(x) < tiny, xp.ones_like(x), abs(x))))
    step = xp.exp2(exponent - bits)
    return xp.where(abs(x) < tiny, x, xp.round(x / step) * step)


def _stages_of(hypothesis: str, case: Case) -> tuple[str, ...]:
    """The stages at one of which a mistake must be seen first: those that it is made in."""
    tables = {
        ("q_proj", "q-heads", "fused-qkv", "heads-innermost", "heads-not-moved", "rope-", "cache-position"): ("q", "k"),
        ("q-k-", "q-v-", "qkv-", "all-bias", "precision"): ("q",),
        ("k_proj", "k-heads", "k-v-"): ("k",),
        ("v_proj", "v-heads"): ("v",),
        ("out_proj", "out-proj", "heads-combined", "heads-not-moved-back"): ("output",),
        ("kv-heads-tiled", "scale-", "score-bias"): ("scores",),
        ("mask-", "softmax-over"): ("attn_weights",),
        ("causal-", "padding-", "window-"): ("mask",),
        ("nan-swallowed",): ("attn_weights",),
        ("nan-leaks",): ("module.output",),
        ("cache-keys-as-values",): ("cache.values",),
        ("cache-",): ("cache.keys",),
    }
    longest = max(
        (prefix for prefixes in tables for prefix in prefixes if hypothesis.startswith(prefix)), key=len, default=""
    )
    return next((stages for prefixes, stages in tables.items() if longest in prefixes), ())
