"""The pictures of the site, drawn from results that are computed when it is built."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import plots
from reference import simulated

import parity
from parity.explain.diagnosis.bugs import bugs_for, edited_layer, page_by_bug
from parity.explain.diagnosis.trial import Trial
from parity.measure.core.compare import Label, compare
from parity.measure.core.problem import Problem
from parity.measure.core.trace import Reference
from parity.measure.sharding.shard import ShardPlan, shard
from parity.use.reporting.figure import NotebookFigure

RIGHT, WRONG, GRAY = "#1a7f37", "#c62828", "#757b83"
STYLE = Path(__file__).resolve().parents[2] / "docs" / "tutorials" / "site.mplstyle"
"""Colors that fit the light and the dark site; notebooks have the same."""

CASES = (
    *(
        "full",
        "causal",
        "gqa-causal",
        "padding",
        "cross",
        "window",
        "rope-gqa",
        "qk-norm",
        "alibi",
        "gate",
    ),
    "trained-anarcii-cross",
)
"""Cases without a cache, the last of them a trained layer."""


def pictures() -> dict[str, bytes]:
    """Each picture as SVG, by its file name."""
    with mpl.rc_context(fname=STYLE):
        drawn = {
            "error-and-budget": error_and_budget(),
            "funnel": funnel(),
            "rope-pairs": rope_pairs(),
            "rope-error": rope_error(),
            "divided-heads": divided_heads(),
            "simulated-blackhole": simulated_blackhole(),
            **plots.plots(),
        }
        return {f"{name}.svg": figure.image("svg") for name, figure in drawn.items()}


# ---- Tolerances ----------------------------------------------------------------------------------


def errors_of_bugs(name: str) -> list[tuple[float, float]]:
    """Tolerance and error of the output of a case in float32, with each known bug that changes the
    function.
    """
    problem = parity.make_problem(name, "float32")
    reference = Reference(problem)
    expected = reference.expected(local=False)["output"]
    same = reference.same_precision(local=False)["output"]
    points = []
    for bug in bugs_for(problem.case):
        exact = edited_layer(problem, "float64", [bug]).forward()["output"]
        if (
            np.isfinite(exact).all()
            and np.abs(exact - expected).max() > 1e-12 * np.abs(expected).max()
        ):
            actual = edited_layer(problem, "float32", [bug]).forward()["output"]
            comparison = compare(
                actual, expected, same, Label(name, "reference", "float32", "output")
            )
            points.append((comparison.budget, comparison.error))
    return points


def of_torch(name: str) -> tuple[float, float]:
    """Tolerance and error of the output of mha_torch."""
    report = parity.run_cases([parity.CASES[name]], ["torch"])
    (of_output,) = (comparison for comparison in report.comparisons if comparison.stage == "output")
    return of_output.budget, of_output.error


def error_and_budget() -> NotebookFigure:
    """Errors of right layers and of known bugs against the tolerance of each."""
    right = [of_torch(name) for name in CASES]
    with np.errstate(all="ignore"):  # bugs overflow
        wrong = [point for name in CASES for point in errors_of_bugs(name)]
    figure = NotebookFigure(figsize=(7, 4.6), layout="constrained")
    axes = figure.add_subplot()
    limits = np.array([1e-8, 1e-1])
    axes.plot(limits, limits, color=GRAY)
    axes.axhline(1e-5, color=GRAY, linestyle="--")
    axes.scatter(
        *zip(*wrong, strict=True),
        marker="x",
        s=18,
        color=WRONG,
        linewidths=1,
        label=f"{len(wrong)} injections of known bugs",
    )
    axes.scatter(
        *zip(*right, strict=True), s=30, color=RIGHT, label=f"mha_torch, {len(right)} cases"
    )
    axes.annotate("tolerance of mha-parity", (4e-4, 1.5e-4))
    axes.annotate("atol=1e-5", (1.3e-8, 1.3e-5), color=GRAY)
    axes.set(
        xscale="log", yscale="log", xlabel="tolerance", ylabel="error of the output", xlim=limits
    )
    axes.legend(loc="lower right")
    return figure


# ---- Search for a bug ----------------------------------------------------------------------------

STAGES = ("mask", "q", "k", "v", "scores", "attn_weights", "context", "output")


def searched_layer(bug: str) -> tuple[Problem, dict[str, np.ndarray]]:
    """A layer with shared heads, and its stages with a bug, in float32."""
    problem = parity.make_problem("gqa-causal", "float32")
    (injected,) = (candidate for candidate in bugs_for(problem.case) if candidate.name == bug)
    values = edited_layer(problem, "float32", [injected]).forward()
    return problem, {name: values[name] for name in STAGES}


def funnel_counts(bug: str) -> tuple[dict[str, int], str]:
    """Numbers of bugs that remain after each rule of a search, and the name of the last one."""
    problem, observed = searched_layer(bug)
    trial = Trial(problem, observed, "ieee")
    wrong = trial.wrong(trial.stages, ())
    right = [stage for stage in trial.stages if stage not in wrong]
    stage = wrong[0]
    expected = trial.stage(stage, ())
    changing = [
        bug for bug in trial.known if not np.array_equal(expected, trial.stage(stage, (bug,)))
    ]
    fitting = [bug for bug in changing if trial.deviation(stage, (bug,)).ratio <= 1.0]
    left = [bug for bug in fitting if not trial.wrong(right, (bug,))]
    counts = {
        "known bugs": len(page_by_bug()),
        "can occur in this layer": len(trial.known),
        f"change its {stage}": len(changing),
        "explain them up to rounding": len(fitting),
        "spoil no correct stage": len(left),
    }
    return counts, ", ".join(bug.name for bug in left)


def funnel() -> NotebookFigure:
    """A search for a missing scale, rule by rule."""
    counts, name = funnel_counts("scale-missing")
    figure = NotebookFigure(figsize=(7, 2.4), layout="constrained")
    axes = figure.add_subplot()
    colors = [*[GRAY] * (len(counts) - 1), RIGHT]
    axes.barh([*counts], [*counts.values()], color=colors)
    for row, count in enumerate(counts.values()):
        words = f"{count}: {name}" if row == len(counts) - 1 else str(count)
        axes.annotate(words, (count + 3, row), va="center")
    axes.invert_yaxis()
    axes.set(xlim=(0, max(counts.values()) * 1.1), xticks=[])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return figure


# ---- RoPE ----------------------------------------------------------------------------------------

COLORS = ("#1f6feb", "#bf8700", "#8250df", "#1a7f37")
PAIRS = {
    "half-split: (i, i + H/2)": [(i, i + 4) for i in range(4)],
    "interleaved: (2i, 2i + 1)": [(2 * i, 2 * i + 1) for i in range(4)],
}


def rope_pairs() -> NotebookFigure:
    """The features of a head of 8 that RoPE rotates together, in both conventions."""
    figure = NotebookFigure(figsize=(7, 1.9), layout="constrained")
    for axes, (title, pairs) in zip(figure.subplots(1, 2), PAIRS.items(), strict=True):
        for color, pair in zip(COLORS, pairs, strict=True):
            center, radius = sum(pair) / 2, (pair[1] - pair[0]) / 2
            angles = np.linspace(0, np.pi, 40)
            axes.plot(
                center + radius * np.cos(angles),
                0.45 + 0.55 * radius**0.5 * np.sin(angles),
                color=color,
            )
            axes.scatter(pair, (0, 0), s=330, color=color)
        for feature in range(8):
            axes.annotate(str(feature), (feature, 0), ha="center", va="center", color="white")
        axes.set(title=title, xlim=(-0.6, 7.6), ylim=(-0.6, 1.8))
        axes.axis("off")
    return figure


def rope_error() -> NotebookFigure:
    """The score of two tokens by their distance, rotated in either convention, for weights that
    expect half-split.
    """
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 64, 8))
    distances = range(17)
    figure = NotebookFigure(figsize=(7, 2.6), layout="constrained")
    axes = figure.add_subplot()
    half, interleaved = (
        [scores(query, key, pairs, distance) for distance in distances] for pairs in PAIRS.values()
    )
    pairs = zip(half, interleaved, strict=True)
    differences = np.array([np.sqrt(((a - b) ** 2).mean() / (a**2).mean()) for a, b in pairs])
    axes.bar(distances, 100 * differences, color=WRONG)
    axes.set(
        xlabel="distance of query and key, tokens", ylabel="error of scores, %", xticks=distances
    )
    return figure


def scores(
    query: np.ndarray, key: np.ndarray, pairs: list[tuple[int, int]], distance: int
) -> np.ndarray:
    """Dot products of queries and keys whose positions differ by a distance, (64,)."""
    rotated = query.copy()
    for i, (first, second) in enumerate(pairs):
        angle = distance * 10000.0 ** (-i / 4)
        cos, sin = np.cos(angle), np.sin(angle)
        rotated[:, first] = query[:, first] * cos - query[:, second] * sin
        rotated[:, second] = query[:, second] * cos + query[:, first] * sin
    return (rotated * key).sum(-1)


# ---- Several devices -----------------------------------------------------------------------------


def held_heads(
    num_ranks: int, num_heads: int = 8, num_kv_heads: int = 2
) -> list[tuple[set[int], set[int]]]:
    """The query heads and the key/value heads whose weights each rank holds."""
    spec = parity.AttentionSpec(
        num_heads, num_heads, num_kv_heads=num_kv_heads, qkv_bias=False, out_bias=False
    )
    weights = {name: np.ones(shape, np.float32) for name, shape in spec.weight_shapes.items()}
    for name in ("q_proj.weight", "k_proj.weight"):
        weights[name] *= np.arange(weights[name].shape[0], dtype=np.float32)[
            :, None
        ]  # each row is its head's number
    shares = [
        shard(weights, spec, ShardPlan(tensor=num_ranks), rank)[0] for rank in range(num_ranks)
    ]
    return [
        ({*share["q_proj.weight"][:, 0].astype(int)}, {*share["k_proj.weight"][:, 0].astype(int)})
        for share in shares
    ]


def divided_heads() -> NotebookFigure:
    """Who holds which of 8 query heads and 2 key/value heads, on 2 and on 4 ranks."""
    figure = NotebookFigure(figsize=(7, 2.9), layout="constrained")
    for axes, num_ranks in zip(figure.subplots(1, 2), (2, 4), strict=True):
        for rank, (queries, keys) in enumerate(held_heads(num_ranks)):
            for column, head in [
                *((head, head) for head in queries),
                *((9 + head, head) for head in keys),
            ]:
                kv_head = head // 4 if column < 8 else head
                axes.add_patch(patch(column, -rank, COLORS[kv_head]))
                axes.annotate(
                    str(head), (column + 0.45, 0.4 - rank), ha="center", va="center", color="white"
                )
        axes.set(
            title=f"{num_ranks} ranks",
            xlim=(-0.2, 11.2),
            ylim=(0.8 - num_ranks, 1.1),
            xticks=[4, 10],
        )
        axes.set(
            xticklabels=["query heads", "key/value heads"],
            yticks=[0.4 - rank for rank in range(num_ranks)],
        )
        axes.set_yticklabels([f"rank {rank}" for rank in range(num_ranks)])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    return figure


def patch(x: float, y: float, color: str):
    """A block for one head."""
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), 0.9, 0.8, color=color)


# ---- A simulated card ----------------------------------------------------------------------------

NOT_FINITE = 1.15
"""Position on the axis of a case without a finite share."""


def simulated_blackhole() -> NotebookFigure:
    """The worst share of the budget of each case on a simulated Blackhole."""
    cases = simulated()["cases"]
    figure = NotebookFigure(figsize=(7, 2.6), layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(1, color=GRAY)
    scatter = np.random.default_rng(0).uniform(-0.25, 0.25, (2, len(cases)))
    for row, (dtype, offsets) in enumerate(zip(("bfloat16", "float32"), scatter, strict=True)):
        shares = {name: by_dtype[dtype] for name, by_dtype in cases.items() if dtype in by_dtype}
        shares_drawn = np.array(
            [NOT_FINITE if share is None else share for share in shares.values()]
        )
        heights = row + offsets[: len(shares_drawn)]
        axes.scatter(shares_drawn, heights, s=14, color=np.where(shares_drawn > 1, WRONG, RIGHT))
        worst = int(shares_drawn.argmax())
        point = (shares_drawn[worst], heights[worst])
        axes.annotate(list(shares)[worst], point, (0, 6), textcoords="offset points", ha="center")
    axes.set(xlim=(0, 1.3), ylim=(1.5, -0.5), yticks=[0, 1], yticklabels=["bfloat16", "float32"])
    axes.set_xlabel("worst error / tolerance of a case")
    return figure
