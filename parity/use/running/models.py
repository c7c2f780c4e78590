"""Layers of a model -> report: the weights of each layer in every backend, and in the model's own
module.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

import numpy as np

from mha_spec import AttentionSpec, GridBias, InputError
from parity.explain.identification.folders import (
    code_of_transformers,
    observe_folder,
    observed_file,
)
from parity.measure.core import reference
from parity.measure.core.case import Case
from parity.measure.core.compare import SAME_PRECISION, Label, compare
from parity.measure.core.problem import Problem, make_problem
from parity.measure.core.stages import run_steps
from parity.measure.files.small import check_small_files
from parity.measure.text import counted, printable, some_of
from parity.port.conversion.checkpoint import Checkpoint, CheckpointLayers
from parity.port.conversion.hints import CALLER, LayerHints, LayerKeywords
from parity.port.conversion.layers import FileLayer
from parity.port.conversion.not_compared import NotCompared
from parity.port.models.specs import ModelLayer, layers_of_parts
from parity.use.running.lengths import check_memory, further_cases, not_exercised
from parity.use.running.report import Report, SkippedCase
from parity.use.running.run import OnCompared, run_cases

if TYPE_CHECKING:
    from parity.explain.identification.layers import LiveLayer
    from parity.port.foreign.transformers import Skeleton

AGAINST = ("transformers",)
"""Libraries whose own modules run in addition to the backends."""

SEQ_LEN = 9
"""Default number of tokens."""

SHORTEST = 4
"""Smallest number of tokens: a prompt of two, and two steps."""

LONGEST = 1 << 17
"""Largest number of tokens, the context of most models. No machine has the memory for the scores of
that many: see `check_memory`.
"""


def cases_of(
    name: str,
    spec: AttentionSpec,
    *,
    is_causal: bool | None = None,
    is_cross: bool = False,
    seq_len: int = SEQ_LEN,
) -> list[Case]:
    """Return the cases for a layer of a file: cross-attention, or causal with and without a cache,
    or not causal.

    Args:
        name: prefix of the names of the cases.
        spec: the layer.
        is_causal: True if tokens attend to no later token; None, if unknown, returns causal and
            other cases.
        is_cross: True if the keys come from another sequence; implied by a different width of keys.
        seq_len: number of tokens, for cross-attention of the keys.

    Raises:
        ValueError: if there are fewer than `SHORTEST` tokens, more than `LONGEST`, more than a grid
            of biases has, or more than fit into memory.
    """
    if not SHORTEST <= seq_len <= LONGEST:
        raise InputError("seq_len", f"be from {SHORTEST} to {LONGEST}", seq_len=seq_len)
    bias = spec.relative_bias
    if isinstance(bias, GridBias) and bias.num_tokens < seq_len:
        # A default, unlike a requested number, becomes smaller without an error.
        if seq_len != SEQ_LEN:
            rule = f"be at most {bias.num_tokens}, the tokens of the grid of {name}"
            raise InputError("seq_len", rule, seq_len=seq_len)
        seq_len = bias.num_tokens
    check_memory(spec, seq_len)
    name = printable(name, keep="")  # it comes from a file
    if is_cross or spec.d_kv != spec.d_in:
        num_queries = seq_len - seq_len // 3
        about = "queries and keys of different sequences"
        return [Case(f"{name}-cross", spec, about, seq_len=num_queries, seq_len_k=seq_len)]
    full = Case(f"{name}-full", spec, "every token attends to every token", seq_len=seq_len)
    causal = Case(
        f"{name}-causal", spec, "no token attends to a later one", seq_len=seq_len, is_causal=True
    )
    chunks = (seq_len - 2, 1, 1)
    about = "a prompt, then token by token"
    decode = Case(
        f"{name}-decode", spec, about, seq_len=seq_len, chunks=chunks, capacity=seq_len + 1
    )
    if is_causal is None:
        return [full, causal, decode]
    if is_causal:
        return [causal, decode]
    return [full]


def run_model(
    path: str | os.PathLike[str],
    backends: Sequence[str] | None = None,
    dtypes: Sequence[str] = ("float32",),
    *,
    layers: Collection[int] | None = None,
    against: str | None = None,
    seq_len: int | None = None,
    with_gradients: bool = False,
    device: str = "cpu",
    on_case: Callable[[str, str, str], None] = lambda case, dtype, backend: None,
    on_compared: OnCompared = lambda trace, reference, comparisons: None,
    layout: str | None = None,
    prefix: str | None = None,
    **keywords: Unpack[LayerKeywords],
) -> Report:
    """Run the attention layers of a model on backends, each with its own weights, and check every
    stage.

    Memory holds the weights of one layer at a time.

    Args:
        path: a folder with a config.json and weights, or a file of weights.
        backends, dtypes, with_gradients, device, on_case, on_compared: arguments of `run_cases`.
        layers: numbers of the layers; default: all.
        against: `transformers`, to also compare the output of the library's own module, in float32.
            If no rules describe the model, its layers are observed, and the warnings of the report
            have the evidence.
        seq_len: number of tokens; by default 9, and more cases for the first layer of each
            specification, which exercise what 9 tokens from position 0 do not: see `further_cases`.
            The report lists these cases, and the features that none of them exercises.
        layout, prefix, keywords: arguments of `load`.

    Returns:
        The report of all layers. The cases are named after layers: `layer-17-decode`. Attention
        layers of the model that are not read count as not compared, unless `layers` or `prefix`
        selects some.

    Raises:
        ModuleNotFoundError, OSError, ValueError: as `run_cases` and `load`, or if a layer does not
            exist.
    """
    if against not in (None, *AGAINST):
        raise InputError("against", f"be one of {', '.join(AGAINST)}", against=against)
    reports: list[Report] = []
    cases_by_layer: dict[str, list[Case]] = {}
    is_specified = layout is not None or any(value is not None for value in keywords.values())
    observed: dict[str, LiveLayer] = {}
    with ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint.open(path))
        source = checkpoint
        if against is not None and not is_specified:
            source, observed = _observed(checkpoint, stack)
        opened = source.layers(LayerHints.by(CALLER, **keywords), layout, prefix)
        all_layers = opened.in_order
        names = names_of(all_layers)
        chosen = chosen_layers(all_layers, layers)
        if against:
            _check_known(chosen, against, observed)
        skeleton = skeleton_of(checkpoint) if against and not observed else None
        # All before any of them runs, because a length that does not fit one is an error.
        for layer in chosen:
            name = names[layer.label]
            cases_by_layer[name] = _cases_of_layer(name, layer, observed.get(layer.label), seq_len)
        further_by_layer = further_cases(cases_by_layer, dtypes, with_more_tokens=seq_len is None)
        for layer in chosen:
            live = observed.get(layer.label)
            further = further_by_layer[names[layer.label]]
            cases = [*cases_by_layer[names[layer.label]], *further]
            weights, _ = layer.load()
            received = received_by(layer, all_layers, cases)
            report_of_layer = run_cases(
                cases,
                backends,
                dtypes,
                with_gradients=with_gradients,
                weights=weights,
                device=device,
                received=received,
                on_case=on_case,
                on_compared=on_compared,
            )
            # The library has no cache of ours: its module runs the cases without one.
            if skeleton is not None:
                for case in [cases[0], *_from_position_0(further)]:
                    problem = make_problem(case, "float32", weights, received.get(case.name))
                    _compare_own_module(report_of_layer, layer, problem, skeleton)
            if live is not None:
                _add_observed(report_of_layer, live, cases[0])
            reports.append(report_of_layer)
    if not reports:
        raise InputError("there", "be an attention layer to run", f"none in {path}")
    report = reports[0]
    for report_of_layer in reports[1:]:
        report.add(report_of_layer)
    if layers is None:
        for live in observed.values():
            if live.spec is None:
                report.skipped_cases.append(
                    SkippedCase(live.name, "float32", "transformers", live.reason)
                )
    if layers is None and prefix is None:
        report.left_out.extend(_left_out(checkpoint, opened, is_observed=bool(observed)))
    for layer in chosen:
        if layer.label in observed:
            live = observed[layer.label]
            report.warnings.append(f"no rules of a family, observed with random inputs: {live}")
    return with_exercised(report, cases_by_layer, further_by_layer, dtypes)


def with_exercised(
    report: Report,
    cases_by_layer: Mapping[str, list[Case]],
    further_by_layer: Mapping[str, list[Case]],
    dtypes: Iterable[str],
) -> Report:
    """Return a report with the features that its cases exercise or not.

    Args:
        report: report of all cases.
        cases_by_layer, further_by_layer: cases of layers, and those that `further_cases` added.
        dtypes: names of the dtypes of the run.
    """
    all_cases: dict[str, list[Case]] = {}
    exercised: list[str] = []
    for layer, cases in cases_by_layer.items():
        further = further_by_layer[layer]
        all_cases[layer] = [*cases, *further]
        exercised += [f"{case.name}: {case.about}" for case in further]
    return replace(report, exercised=exercised, not_exercised=not_exercised(all_cases, dtypes))


def _cases_of_layer(
    name: str, layer: FileLayer, live: LiveLayer | None, seq_len: int | None
) -> list[Case]:
    """Return the cases of a layer, causal as observed, or as the model's configuration says."""
    is_causal = None
    if seq_len is None:
        seq_len = SEQ_LEN
    if live is not None:
        is_causal = live.is_causal
    elif layer.model is not None:
        is_causal = layer.model.is_causal
    return cases_of(name, layer.spec, is_causal=is_causal, is_cross=layer.is_cross, seq_len=seq_len)


def _observed(checkpoint: Checkpoint, stack: ExitStack) -> tuple[Checkpoint, dict[str, LiveLayer]]:
    """Return the checkpoint to read layers from, and its observed layers by name, of which there
    are none if rules specify its layers.
    """
    if not checkpoint.is_unknown:
        return checkpoint, {}
    observed = {layer.name: layer for layer in observe_folder(checkpoint.path)}
    if not observed:
        return checkpoint, {}
    path = stack.enter_context(observed_file([*observed.values()]))
    return stack.enter_context(Checkpoint.open(path)), observed


def _check_known(layers: Sequence[FileLayer], against: str, observed: Collection[str]) -> None:
    """Reject layers that the library has no module for: neither rules nor observation know them."""
    unknown = [
        layer.label for layer in layers if layer.model is None and layer.label not in observed
    ]
    if unknown:
        raise InputError(
            "against",
            "have layers of a model whose config.json is of a known family",
            f"against={against!r} for {some_of(unknown)}",
        )


def _left_out(
    checkpoint: Checkpoint, opened: CheckpointLayers, *, is_observed: bool
) -> Iterator[NotCompared]:
    """Yield the layers of a model that no backend computed, although all were requested.

    Args:
        checkpoint: the folder or file.
        opened: its layers.
        is_observed: the layers were found by observation, not by a configuration.
    """
    path = checkpoint.path
    if opened.missing:
        what = f"{counted(len(opened.missing), 'layer')}, {some_of(opened.missing)}"
        reason = f"not in {path}, although its configuration or its metadata describes them"
        yield NotCompared(what, reason)
    if opened.undescribed:
        reason = f"not read, because the config.json of {path} does not describe them"
        yield NotCompared(some_of(opened.undescribed), reason)
    if is_observed:
        return
    try:
        config = checkpoint.config_of_folder
        if config is None:
            return
        unknown = config.unknown_parts
        kinds = Counter(
            layer.kind for layer in layers_of_parts(config.values) if layer.spec is None
        )
    except (OSError, ValueError, RecursionError):
        # There is no configuration, or nothing of it was read.
        return
    for name, reason in unknown.items():
        what = name or str(config.values["model_type"])
        yield NotCompared(printable(what, keep=""), printable(reason, keep=""))
    for kind, number in kinds.items():
        reason = f"{printable(kind, keep='')} is not attention over keys"
        yield NotCompared(counted(number, "layer"), reason, is_open=False)


def received_by(
    layer: FileLayer, layers: Sequence[FileLayer], cases: Sequence[Case]
) -> dict[str, dict[str, np.ndarray]]:
    """Return the keys and values that a layer receives from another one, by case; none if it makes
    its own.

    The other layer makes them of inputs of its own.

    Raises:
        ValueError: if that layer is not there.
    """
    if layer.model is None or layer.model.kv_source is None:
        return {}
    weights, spec = _source_of(layer, layer.model, layers).load()
    received = {}
    for case in cases:
        source = replace(case, name=f"{case.name}-source", spec=spec, chunks=(), capacity=0)
        problem = make_problem(source, "float32", weights)
        arithmetic = reference.Arithmetic(np.dtype(np.float32))
        heads = reference.Layer(problem, arithmetic).qkv({})
        received[case.name] = {"k": heads["k"], "v": heads["v"]}
    return received


def _source_of(layer: FileLayer, model: ModelLayer, layers: Sequence[FileLayer]) -> FileLayer:
    """Return the layer whose keys and values another one shares."""
    candidates = []
    for other in layers:
        if other.model is None or other.model.part != model.part:
            continue
        if other.model.index == model.kv_source:
            candidates.append(other)
    if not candidates:
        rule = f"have layer {model.kv_source}, whose keys and values it shares"
        raise InputError(layer.label, rule, "no such layer in the file")
    # Parts of one name may be under several prefixes: the prefix of the layer itself is the right
    # one.
    for candidate in candidates:
        if _label_before_path(candidate) == _label_before_path(layer):
            return candidate
    return candidates[0]


def _label_before_path(layer: FileLayer) -> str:
    """Return the beginning of a label before the path of its layer, the same for all layers of a
    part.
    """
    path = "" if layer.model is None else layer.model.path
    return layer.label.removesuffix(path)


def chosen_layers(layers: Sequence[FileLayer], numbers: Collection[int] | None) -> list[FileLayer]:
    """Return the layers of some numbers, or all.

    Raises:
        ValueError: if a number has no layer.
    """
    if numbers is None:
        return list(layers)
    existing = {number_of(layer) for layer in layers}
    missing = sorted(set(numbers) - existing)
    if missing:
        rule = f"be among the layers with attention over keys, {sorted(existing)}"
        raise InputError("layers", rule, layers=missing)
    return [layer for layer in layers if number_of(layer) in numbers]


def number_of(layer: FileLayer) -> int:
    """Return the number of a layer in its model."""
    if layer.model is not None:
        return layer.model.index
    return layer.indices[-1] if layer.indices else 0


def names_of(layers: Sequence[FileLayer]) -> dict[str, str]:
    """Return the names of the cases of layers, by label: made of the numbers if these differ."""
    numbers = [number_of(layer) for layer in layers]
    are_unique = len(set(numbers)) == len(numbers)
    names = {}
    for layer, number in zip(layers, numbers, strict=True):
        names[layer.label] = f"layer-{number}" if are_unique else layer.label
    return names


# ---- The model's own module ----------------------------------------------------------------------


def skeleton_of(checkpoint: Checkpoint, attn_implementation: str = "eager") -> Skeleton:
    """Return the model of the config.json in a folder, or next to a file, without weights.

    Raises:
        FileNotFoundError: if there is no config.json.
        ModuleNotFoundError: if transformers is not installed.
        ValueError: if it has no such model, or cannot read the configuration.
    """
    from transformers import AutoConfig

    from parity.port.foreign.transformers import Skeleton

    path = checkpoint.path
    folder = os.fspath(path) if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    check_small_files(folder)
    if checkpoint.config is None:
        raise FileNotFoundError(
            f"the folder of a model must have a config.json, and {folder} has none"
        )
    with code_of_transformers(folder):
        # transformers reads the file itself, because it changes some values while it does: the
        # comparison is with the model that it makes of them.
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        return Skeleton(config, attn_implementation)


def _from_position_0(cases: Iterable[Case]) -> list[Case]:
    """Return the cases that a module without a cache can run, which counts its own positions."""
    return [case for case in cases if not case.is_cached and not case.first_position]


def _add_observed(report: Report, layer: LiveLayer, case: Case) -> None:
    """Add the comparisons of an observed layer to a report, or the reason why there are none."""
    for comparison in layer.comparisons:
        report.comparisons.append(
            replace(comparison, case=case.name, backend="transformers", library="transformers")
        )
    if not layer.comparisons:
        meanings = {**layer.identification.inputs, "output": layer.identification.output}
        parts = ", ".join(f"{name}={meaning}" for name, meaning in meanings.items())
        _skip_own_module(report, case, f"its module is more than attention: {parts}")


def _skip_own_module(report: Report, case: Case, reason: str) -> None:
    report.skipped_cases.append(SkippedCase(case.name, "float32", "transformers", reason))


def _compare_own_module(
    report: Report, layer: FileLayer, problem: Problem, skeleton: Skeleton
) -> None:
    """Add the comparison of the library's own module to a report, or the reason why there is
    none.
    """
    case = problem.case
    if layer.model is None:
        _skip_own_module(report, case, "its configuration does not determine its module")
        return
    from parity.port.foreign.transformers import NotAlone

    # With sections a token has several positions, which the module does not count by itself.
    has_sections = case.spec.rope is not None and bool(case.spec.rope.sections)
    try:
        result = skeleton.run(
            layer.model,
            layer.label,
            layer.tensors(),
            problem.inputs["query"],
            keys=problem.inputs.get("key"),
            positions=case.positions() if has_sections else None,
        )
    except NotAlone as error:
        _skip_own_module(report, case, str(error))
        return
    # The model may change its input before the module, whose own input the reference starts from.
    problem = replace(problem, inputs={**problem.inputs, "query": result.input})
    expected = run_steps(reference.steps(problem, "float64"))["output"]
    same = run_steps(reference.steps(problem, SAME_PRECISION["float32"]))["output"]
    label = Label(case.name, "transformers", "float32", "output")
    comparison = compare(result.output, expected, same, label)
    report.comparisons.append(replace(comparison, library="transformers"))
