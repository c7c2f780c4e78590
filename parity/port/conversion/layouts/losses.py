"""Everything that layers lose in a layout, in one error.

A layer may lose features, weights without a name in the layout, or need biases that it lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from mha_spec import AttentionSpec, InputError
from parity.measure.text import some_of
from parity.port.conversion.layouts.detection import LayoutMismatchError, placements
from parity.port.conversion.layouts.layout import CARRIED, Layout, lost_in, without
from parity.port.conversion.layouts.tables import LAYOUTS


class LossyError(InputError):
    """A layout loses features of layers, or needs biases; the remedy accepts that.

    Attributes:
        command: command line that accepts it, which the message ends with; empty if there is none.
    """

    command = ""

    def __str__(self) -> str:
        message = super().__str__()
        if self.command:
            message = f"{message}: {self.command}"
        return message


class Written(NamedTuple):
    """A layer to write, with the conditions for it.

    Attributes:
        spec: the layer.
        but_for: features that may be lost unasked. Default: plain RoPE, which some programs apply
            outside the layer.
        unread: attention keys that no specification contains, with their values. Only a layout that
            carries every feature accepts them.
    """

    spec: AttentionSpec
    but_for: Collection[str] = ("rope",)
    unread: Mapping[str, Any] | None = None


def check_losses(
    layers: Sequence[Written],
    target: Layout,
    drop: Collection[str] = (),
    *,
    fill_bias: bool = False,
) -> None:
    """Reject a layout that cannot hold layers; the error has all losses of all layers.

    Args:
        layers: the layers to write.
        target: layout to write.
        drop: losses that the caller accepts, by name.
        fill_bias: the caller accepts zero biases.

    Raises:
        LossyError: if the caller can accept the losses; the remedy is how.
        LayoutMismatchError: if no layer with these weights fits, whatever is left out; the error
            lists layouts that do.
    """
    features = _lost_features(layers, target, drop)
    rules: list[str] = []
    if features:
        rules.append(f"be one that weights in {target.name} and their module can express")
    biases: dict[str, Any] = {}
    for spec in dict.fromkeys(layer.spec for layer in layers):
        lost = lost_in(target, spec)
        accepted = without(spec, [name for name in lost if name in drop])
        obstacle = _obstacle(accepted, target)
        if obstacle is None:
            continue
        # Perhaps more features, or zero biases, would help: only then is there a remedy.
        reduced = without(spec, lost)
        remaining = _obstacle(reduced, target)
        if remaining is not None:
            if _obstacle(with_all_biases(reduced), target) is not None:
                raise _impossible(remaining, features, layers)
            if fill_bias:
                continue
            biases |= {"qkv_bias": spec.qkv_bias, "out_bias": spec.out_bias}
        rules.append(obstacle.rule)
    if features or biases:
        raise _acceptable(features, biases, rules, drop)


def _lost_features(
    layers: Iterable[Written], target: Layout, drop: Collection[str]
) -> dict[str, Any]:
    """Return the features that layers lose without consent, each with its first value."""
    features: dict[str, Any] = {}
    for layer in layers:
        for name, value in _lost(layer, target).items():
            if name not in drop and name not in layer.but_for:
                features.setdefault(name, value)
    return features


def _acceptable(
    features: Mapping[str, Any],
    biases: Mapping[str, Any],
    rules: Iterable[str],
    drop: Iterable[str],
) -> LossyError:
    """Return the error for losses that the caller can accept, with how to do so as its remedy."""
    remedy: dict[str, Any] = {}
    advice: list[str] = []
    if features:
        names = list(dict.fromkeys([*drop, *features]))
        remedy["drop"] = ",".join(names)
        advice.append("leaves them out" if len(names) > 1 else "leaves it out")
    if biases:
        remedy["fill_bias"] = True
        advice.append("adds zero biases")
    rule = ", and ".join(dict.fromkeys(rules))
    got = {**features, **biases}
    return LossyError("the layer", rule, got, remedy=remedy, hint=" and ".join(advice))


def with_all_biases(spec: AttentionSpec) -> AttentionSpec:
    """Return a layer with a bias in each of its projections."""
    return replace(spec, qkv_bias=True, out_bias=spec.out_proj)


def _lost(layer: Written, target: Layout) -> dict[str, Any]:
    """Return what a layout loses of a layer, by name."""
    lost = lost_in(target, layer.spec)
    # The meaning of unread keys is unknown: only a layout that carries everything carries them.
    carries_all = {*CARRIED} <= {*target.carries}
    if layer.unread is not None and not carries_all:
        lost |= layer.unread
    return lost


def _obstacle(spec: AttentionSpec, layout: Layout) -> LayoutMismatchError | None:
    """Return why a layout cannot hold a layer, apart from lost features; None if it can."""
    try:
        placements(spec, layout)
    except LayoutMismatchError as error:
        return error
    return None


def _impossible(
    obstacle: LayoutMismatchError, features: Iterable[str], layers: Sequence[Written]
) -> LayoutMismatchError:
    """Return the error for a layer that does not fit whatever is left out.

    It lists the layouts that hold all of it.
    """
    able = [name for name, layout in LAYOUTS.items() if _holds_all(layout, layers)]
    hint = "nothing can be left out to change that"
    lost = ", ".join(features)
    if lost:
        hint += f", and {lost} would be lost"
    if able:
        hint += f"; {some_of(able, 4)} can hold the whole layer"
    return LayoutMismatchError("the layer", obstacle.rule, obstacle.got, hint=hint)


def _holds_all(layout: Layout, layers: Iterable[Written]) -> bool:
    """Return whether a layout holds layers without losses."""
    for layer in layers:
        if _obstacle(layer.spec, layout) is not None or _lost(layer, layout):
            return False
    return True
