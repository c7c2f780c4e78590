"""How people record the stages of their layers: in the forms in which their code has them, or in customary ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from parity.measure.core.problem import Problem
from parity.measure.core.stages import STAGES, stage_named

Recorded = dict[str, np.ndarray]
Recording = Callable[[Recorded, Problem], Recorded]

PLAIN = ("q", "k", "v", "scores", "attn_weights", "context", "output")
CACHE = ("cache.keys", "cache.values", "cache.lengths")


def canonical(noted: Mapping[str, np.ndarray], problem: Problem) -> Recorded:
    """Return the stages that a port noted, with a broadcast mask."""
    case, spec, stages = problem.case, problem.spec, dict(noted)
    for name, value in noted.items():
        stage = stage_named(name)
        chunk = case.seq_len if stage.step is None else case.chunks[stage.step]
        if stage.quantity == "mask":
            keys = case.key_len if stage.step is None else value.shape[-1]
            stages[name] = np.broadcast_to(value, (case.batch, spec.num_heads, chunk, keys))
    return stages


def _pick(noted: Recorded, names: tuple[str, ...]) -> Recorded:
    """The stages of these names, of every call."""
    stages = {name: stage_named(name) for name in noted}
    return {
        name: noted[name]
        for name, stage in stages.items()
        if not stage.is_gradient and stage.quantity in names and (stage.step is not None or stage.quantity not in CACHE)
    }


def plain(noted: Recorded, problem: Problem) -> Recorded:
    """Every stage by its name, in its canonical form; with a cache that grows, filled up with zeros."""
    return grown_to_capacity(_pick(noted, ("mask", *PLAIN, *CACHE)), problem)


def no_mask(noted: Recorded, problem: Problem) -> Recorded:
    """The same without the mask, which many ports never have as a tensor of its own."""
    return grown_to_capacity(_pick(noted, (*PLAIN, *CACHE)), problem)


def grown_to_capacity(noted: Recorded, problem: Problem) -> Recorded:
    """Caches, scores, weights and masks of all slots of the capacity: slots without a token are 0, or hidden."""
    stages, capacity = {}, problem.case.capacity
    for name, value in noted.items():
        stage = stage_named(name)
        axes = STAGES.get(stage.quantity, ())
        is_of_cache = stage.quantity in ("cache.keys", "cache.values", "scores", "attn_weights", "mask")
        if problem.case.is_cached and is_of_cache and "S" in axes and value.shape[axes.index("S")] < capacity:
            widths = [(0, capacity - value.shape[i] if letter == "S" else 0) for i, letter in enumerate(axes)]
            value = np.pad(value, widths, constant_values=stage.quantity == "mask")
            # The scores of empty slots, whose keys are 0, are 0.
        stages[name] = value
    return stages


def output(noted: Recorded, problem: Problem) -> Recorded:
    """The output alone."""
    return _pick(noted, ("output",))


def last_stages(noted: Recorded, problem: Problem) -> Recorded:
    """The weights and the output, as a layer returns them with its weights requested."""
    return grown_to_capacity(_pick(noted, ("attn_weights", "output")), problem)


def first_and_last(noted: Recorded, problem: Problem) -> Recorded:
    """The stages that forward hooks on the projections record: q, k, v by heads, context and output."""
    return _pick(noted, ("q", "k", "v", "context", "output"))


BETWEEN = tuple(f"grad.{name}" for name in ("context", "attn_weights", "v", "scores", "q", "k", "gate"))


def gradients(noted: Recorded, problem: Problem) -> Recorded:
    """The stages of a training step, and all gradients that it has."""
    return plain(noted, problem) | {name: x for name, x in noted.items() if stage_named(name).is_gradient}


def gradients_alone(noted: Recorded, problem: Problem) -> Recorded:
    """The gradients of weights and inputs, which people compare first."""
    recorded = gradients(noted, problem)
    return {name: x for name, x in recorded.items() if stage_named(name).is_gradient and name not in BETWEEN}


def gradients_between(noted: Recorded, problem: Problem) -> Recorded:
    """The gradients of stages alone, as hooks record them."""
    return {name: x for name, x in noted.items() if name in BETWEEN}


def growing(noted: Recorded, problem: Problem) -> Recorded:
    """A cache as long as the tokens so far, and scores, weights and masks of as many keys."""
    stages, filled = plain(noted, problem), np.cumsum(problem.case.chunks)
    for name, value in stages.items():
        stage = stage_named(name)
        axes = STAGES.get(stage.quantity, ())
        if "S" in axes and stage.quantity not in ("k", "v"):
            stages[name] = np.take(value, range(int(filled[stage.step or 0])), axis=axes.index("S"))
    return stages


def dirty_slots(noted: Recorded, problem: Problem) -> Recorded:
    """A cache that was not emptied: slots that hold nothing yet are not 0, nor are their scores; they are hidden."""
    stages, filled = plain(noted, problem), np.cumsum(problem.case.chunks)
    rng = np.random.default_rng(0)
    for name, value in stages.items():
        stage = stage_named(name)
        if stage.quantity in ("cache.keys", "cache.values", "scores"):
            axis = 3 if stage.quantity == "scores" else 2
            junk = rng.standard_normal(value.shape).astype(value.dtype)
            slots = np.arange(value.shape[axis]).reshape([-1 if i == axis else 1 for i in range(4)])
            stages[name] = np.where(slots < filled[stage.step or 0], value, junk)
    return stages


def recorded_as(**others: str) -> Recording:
    """Stages under whose name a different value was recorded."""

    def record(noted: Recorded, problem: Problem) -> Recorded:
        swapped = dict(noted)
        for name, value in noted.items():
            stage = stage_named(name)
            prefix = "" if stage.step is None else f"step{stage.step}."
            for own, other in others.items():
                if stage.quantity == other:
                    swapped[f"{prefix}{own}"] = value
        return plain(swapped, problem)

    return record


def changed(names: tuple[str, ...], change: Callable[[np.ndarray], np.ndarray]) -> Recording:
    """Stages in a different form."""

    def record(noted: Recorded, problem: Problem) -> Recorded:
        stages = plain(noted, problem)
        return {name: change(value) if stage_named(name).quantity in names else value for name, value in stages.items()}

    return record


def bthd(x: np.ndarray) -> np.ndarray:
    """(B, N, T, H) as (B, T, N, H)."""
    return x.swapaxes(1, 2)


def flat(x: np.ndarray) -> np.ndarray:
    """(B, N, T, H) as (B, T, N * H)."""
    return bthd(x).reshape(x.shape[0], x.shape[2], -1)


def zeroed_padding(noted: Recorded, problem: Problem) -> Recorded:
    """Outputs of padding set to 0, as many models do after the layer."""
    stages, lengths = plain(noted, problem), problem.case.key_padding_lengths
    if lengths is not None and problem.case.seq_len_k is None:
        is_real = np.arange(problem.case.seq_len) < np.array(lengths)[:, None]
        stages["output"] = np.where(is_real[:, :, None], stages["output"], np.zeros_like(stages["output"]))
    return stages


def batch_second(noted: Recorded, problem: Problem) -> Recorded:
    """The output (T, B, E), as layers without batch_first give it."""
    return {name: value.swapaxes(0, 1) if name == "output" else value for name, value in plain(noted, problem).items()}


def heads_into_batch(x: np.ndarray) -> np.ndarray:
    """(B, N, T, …) as (B * N, T, …), as in fairseq."""
    return x.reshape(-1, *x.shape[2:])


QKVC = ("q", "k", "v", "context")

RECORDINGS: dict[str, Recording] = {
    "plain": plain,
    "no-mask": no_mask,
    "output": output,
    "last-stages": last_stages,
    "hooks": first_and_last,
    "growing": growing,
    "gradients": gradients,
    "gradients-alone": gradients_alone,
    "gradients-between": gradients_between,
    "dirty-slots": dirty_slots,
    "bthd": changed(QKVC, bthd),
    "flat": changed(QKVC, flat),
    "heads-into-batch": changed((*QKVC, "scores", "attn_weights"), heads_into_batch),
    "batch-second": batch_second,
    "before-rope": recorded_as(q="q.before_rope", k="k.before_rope"),
    "before-norm": recorded_as(q="q.before_norm", k="k.before_norm"),
    "kv-repeated": recorded_as(k="k.repeated", v="v.repeated"),
    "scores-unscaled": recorded_as(scores="scores.unscaled"),
    "scores-masked": recorded_as(scores="scores.masked"),
    "mask-t-s": changed(("mask",), lambda mask: mask[0, 0]),
    "mask-broadcast": changed(("mask",), lambda mask: mask[:, :1]),
    "mask-visible": changed(("mask",), np.logical_not),
    "mask-additive": changed(("mask",), lambda mask: np.where(mask, np.float32(-np.inf), np.float32(0.0))),
    "mean-heads": changed(("attn_weights",), lambda x: x.astype(np.float32).mean(axis=1).astype(x.dtype)),
    "zeroed-padding": zeroed_padding,
    "upcast": changed((*PLAIN, "cache.keys", "cache.values"), lambda x: x.astype(np.float32)),
}
"""Functions from the stages that a port noted to those that are diagnosed, by name."""
