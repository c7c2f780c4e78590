"""RoPE from configurations: `rope_parameters`, or, before transformers 5, `rope_theta` and
`rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mha_spec import (
    DynamicScaling,
    InputError,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from parity.port.models.config import Config, Value

KINDS = {"su": "longrope", "mrope": "default"}
"""Older names of scalings."""


def read_rope(
    config: Config,
    head_dim: int,
    *,
    layer_type: str,
    theta: float | None,
    fraction: float | None = None,
    local_theta: float | None = None,
    names: tuple[str, str] = ("rope_theta", "rope_local_base_freq"),
    **fields: Any,
) -> Value:
    """Return the RoPE of a layer.

    Args:
        config: configuration of the model.
        head_dim: features of a head for RoPE.
        layer_type: type of layer, for `rope_parameters` by type.
        theta: default base of this family; None if the configuration must have one.
        fraction: default fraction of rotated features; None in families that always rotate all.
        local_theta: separate base of layers with a window, which then have no scaling.
        names: keys of both bases, before `rope_parameters` existed.
        fields: other fields of `Rope` in this family; `sections` are defaults.

    Raises:
        ValueError: if a key is missing, the scaling is unknown, or a fraction is set in a family
            without one.
    """
    values, is_local = _parameters(config, layer_type, local_theta)
    base = _base(config, values, theta, local_theta if is_local else None, names)
    kind, word = _kind_of_scaling(values)
    sources = [base]
    if kind is not None and word != "default":
        sources.append(Value(kind.value, f"{kind.origin} {kind.value}"))
    share = _once(
        values.find("partial_rotary_factor"), config.find("partial_rotary_factor", "rotary_pct")
    )
    if word == "proportional":
        # This scaling rotates a part by its frequencies, so that `rotary_dim` stays the whole.
        scaling = _proportional(values, _rotated_share(share, fraction))
        return Value.derived(Rope(base.value, scaling=scaling, **fields), *sources)

    part = _rotated_share(share, fraction)
    if part != 1.0:
        if share is not None and fraction is None:
            rule = "be 1 in models of this family, which rotate whole heads"
            raise InputError(share.origin, rule, {share.origin: part})
        if "rotary_dim" in fields:
            # The family has a key for the number of features, and the fraction repeats it.
            _check_repeated(fields["rotary_dim"], part, share, config)
        else:
            fields["rotary_dim"] = int(head_dim * part)
            if share is None:
                origin = f"{part} of a head: this family's default"
            else:
                origin = f"{share.origin} {part}"
            sources.append(Value(part, origin))
    if "sections" in fields:
        sections = values.find("mrope_section")
        if sections is None:
            sections = Value(fields["sections"], "family default: mrope_section is not set")
        else:
            values.find("mrope_interleaved")  # these families have one order
            fields["sections"] = tuple(sections.value)
        sources.append(sections)
    if word == "default":
        # transformers reads neither key without a scaling.
        for section in (values, config):
            section.find("factor", "original_max_position_embeddings")
        return Value.derived(Rope(base.value, **fields), *sources)
    scaling = SCALINGS[word](values, config)
    return Value.derived(Rope(base.value, scaling=scaling, **fields), *sources)


def rope_section(config: Config) -> Config | None:
    """Return the parameters of RoPE or, in older configurations, its scaling; None without both."""
    for name in ("rope_parameters", "rope_scaling"):
        if name in config:
            return config.section(name)
    return None


def _parameters(config: Config, layer_type: str, local_theta: float | None) -> tuple[Config, bool]:
    """Return the RoPE parameters of a layer, and whether they are a family's older keys for layers
    with a window.
    """
    if "rope_parameters" in config:
        values = config.section("rope_parameters")
        # transformers 5 nests them if each kind of layer has its own.
        is_by_type = values.pass_over(Mapping)
        if is_by_type:
            values = values.section(layer_type)
        return values, False
    is_local = local_theta is not None and layer_type == "sliding_attention"
    if is_local or "rope_scaling" not in config:
        config.find("rope_scaling")  # counts as read, since layers with a window have no scaling
        return Config({}), is_local
    return config.section("rope_scaling"), False


def _base(
    config: Config,
    values: Config,
    theta: float | None,
    local_theta: float | None,
    names: tuple[str, str],
) -> Value:
    """Return the base of the frequencies; `local_theta` is None in layers that use the model's."""
    of_model, of_windows = (names[0], "rotary_emb_base"), names[1]
    if local_theta is not None:
        config.find(*of_model)  # counts as read
        return config.read(of_windows, default=local_theta)
    base = _once(values.find("rope_theta"), config.find(*of_model))
    if base is None:
        return config.read(*of_model, default=theta)
    return base


def _once(own: Value | None, of_model: Value | None) -> Value | None:
    """Return a value from the parameters of RoPE, or else from the model.

    Raises:
        ValueError: if both exist and differ.
    """
    if own is None:
        return of_model
    if of_model is not None and own.value != of_model.value:
        both = f"{own.origin}={own.value} and {of_model.origin}={of_model.value}"
        raise InputError(of_model.origin, "be set once, or to equal values", both)
    return own


def _kind_of_scaling(values: Config) -> tuple[Value | None, str]:
    """Return the kind of scaling as the configuration has it, and its name in this module.

    Raises:
        ValueError: if it is unknown.
    """
    kind = values.find("rope_type", "type")
    if kind is None:
        return None, "default"
    word = KINDS.get(str(kind.value), str(kind.value))
    if word not in ("default", "proportional", *SCALINGS):
        raise InputError(f"{values.where}rope_type", f"be one of {sorted(SCALINGS)}", repr(word))
    return kind, word


def _rotated_share(share: Value | None, fraction: float | None) -> float:
    """Return the rotated fraction of a head: the configuration's, or the family's, or all."""
    if share is not None:
        return share.value
    if fraction is not None:
        return fraction
    return 1.0


def _check_repeated(rotary_dim: int, part: float, share: Value | None, config: Config) -> None:
    """Raise an error if a fraction of a head is not the known number of rotated features."""
    whole = config.read("head_dim").value
    if int(whole * part) != rotary_dim:
        origin = "the rotated part" if share is None else share.origin
        rule = f"give {rotary_dim} of head_dim={whole} features"
        raise InputError(origin, rule, {origin: part})


# ---- Scaling -------------------------------------------------------------------------------------


def _original_length(values: Config, config: Config) -> int:
    """Return the length before the extension; it may be a key of RoPE, or of the model."""
    of_rope = values.find("original_max_position_embeddings")
    of_model = config.find("original_max_position_embeddings")
    length = of_rope or of_model or config.read("max_position_embeddings")
    return length.value


def _factor(values: Config, config: Config, original: int) -> float:
    """Return the extension of the context; default: the ratio of both lengths."""
    factor = values.find("factor")
    if factor is not None:
        return factor.value
    return config.read("max_position_embeddings").value / original


def _present(values: Config, *names: str) -> dict[str, Any]:
    """Return the values of the keys that are present."""
    present = {}
    for name in names:
        value = values.find(name)
        if value is not None:
            present[name] = value.value
    return present


def _proportional(values: Config, part: float) -> ProportionalScaling:
    factor = values.find("factor")
    if factor is None:
        return ProportionalScaling(part)
    return ProportionalScaling(part, factor.value)


def _linear(values: Config, config: Config) -> LinearScaling:
    return LinearScaling(values.read("factor").value)


def _dynamic(values: Config, config: Config) -> DynamicScaling:
    values.find("original_max_position_embeddings")  # transformers uses the other length
    return DynamicScaling(values.read("factor").value, config.read("max_position_embeddings").value)


def _llama3(values: Config, config: Config) -> Llama3Scaling:
    return Llama3Scaling(
        values.read("factor").value,
        _original_length(values, config),
        values.read("low_freq_factor").value,
        values.read("high_freq_factor").value,
    )


def _yarn(values: Config, config: Config) -> YarnScaling:
    original = _original_length(values, config)
    options = _present(values, "beta_fast", "beta_slow", "truncate", "attention_factor")
    mscales = _present(values, "mscale", "mscale_all_dim")
    # transformers ignores one alone, one that is 0, and both if there is an attention_factor.
    has_both = mscales.get("mscale") and mscales.get("mscale_all_dim")
    if has_both and "attention_factor" not in options:
        options |= mscales
    return YarnScaling(_factor(values, config, original), original, **options)


def _longrope(values: Config, config: Config) -> LongRopeScaling:
    original = _original_length(values, config)
    short = tuple(values.read("short_factor").value)
    long = tuple(values.read("long_factor").value)
    options = _present(values, "attention_factor")
    # PhiMoE's names of the factor of the scores.
    short_scale = values.find("short_mscale")
    long_scale = values.find("long_mscale")
    if short_scale is not None and long_scale is not None:
        if short_scale.value != long_scale.value:
            both = (
                f"{short_scale.origin}={short_scale.value} and "
                f"{long_scale.origin}={long_scale.value}"
            )
            raise InputError("calls of both lengths", "have one factor", both)
        options["attention_factor"] = long_scale.value
    return LongRopeScaling(_factor(values, config, original), original, short, long, **options)


SCALINGS: Mapping[str, Callable[[Config, Config], Any]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
