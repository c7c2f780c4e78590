"""Bugs injected into one attention layer of a live transformers model, in the terms of that
library.

They share no code with the records of `parity.explain.diagnosis.bugs`, which must identify them.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mha_spec import AttentionSpec


@dataclass(frozen=True)
class Injection:
    """An injected bug.

    Attributes:
        names: accepted diagnoses.
        stages: stages that may fail first.
        inject: injects it into an attention module of a model until the stack is closed.
        fits: returns True if a layer with this specification can have it.
    """

    names: tuple[str, ...]
    stages: tuple[str, ...]
    inject: Callable[[nn.Module, nn.Module, ExitStack], None]
    fits: Callable[[AttentionSpec], bool] = lambda spec: True


@contextmanager
def inject(bug: Injection, model: nn.Module, module: nn.Module) -> Iterator[None]:
    """Inject a bug into one layer of the model."""
    with ExitStack() as stack:
        bug.inject(model, module, stack)
        yield


# ---- Tools ---------------------------------------------------------------------------------------


def set_in(owner: object, name: str, value: object, stack: ExitStack) -> None:
    before = getattr(owner, name)
    setattr(owner, name, value)
    stack.callback(setattr, owner, name, before)


def weights(**changes: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    """Transform weights in place: each keyword names a parameter, such as `q_proj` or
    `q_proj_bias`.
    """

    def inject(model, module, stack):
        for name, change in changes.items():
            linear = getattr(module, name.removesuffix("_bias"))
            leaf = "bias" if name.endswith("_bias") else "weight"
            parameter = getattr(linear, leaf)
            before = parameter.data
            parameter.data = change(before.clone()).contiguous()
            stack.callback(setattr, parameter, "data", before)

    return inject


def exchanged(one: str, other: str) -> Callable[..., None]:
    """Swap two children of the module."""

    def inject(model, module, stack):
        first, second = getattr(module, one), getattr(module, other)
        set_in(module, one, second, stack)
        set_in(module, other, first, stack)

    return inject


def child(*names: str) -> Callable[..., None]:
    """Replace children by the identity."""

    def inject(model, module, stack):
        for name in names:
            set_in(module, name, nn.Identity(), stack)

    return inject


def attribute(name: str, value: Callable[[nn.Module], object]) -> Callable[..., None]:
    return lambda model, module, stack: set_in(module, name, value(module), stack)


def argument(name: str, change: Callable[..., object]) -> Callable[..., None]:
    """Change one keyword argument of the module's call."""

    def inject(model, module, stack):
        def hook(_, args, kwargs):
            return args, {**kwargs, name: change(kwargs[name], module=module, **kwargs)}

        stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    return inject


def at(
    change_positions: Callable[[Tensor], Tensor], theta: float | None = None
) -> Callable[..., None]:
    """Compute cosines and sines for other positions, or with a different theta."""

    def change(embeddings, module, position_ids, **_):
        is_half = "GptOss" in type(module).__name__  # its tables hold each angle once
        width = embeddings[0].shape[-1] * (2 if is_half else 1)
        base = module.config.rope_parameters["rope_theta"] if theta is None else theta
        frequencies = 1.0 / base ** (torch.arange(0, width, 2).float() / width)
        angles = change_positions(position_ids)[..., None].float() * frequencies
        angles = angles if is_half else torch.cat([angles, angles], dim=-1)
        return angles.cos().to(embeddings[0].dtype), angles.sin().to(embeddings[0].dtype)

    return argument("position_embeddings", change)


def combined(change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    """Change the context (B, T, N, H) before out_proj."""

    def inject(model, module, stack):
        def hook(_, args):
            x = args[0]
            return (change(x.unflatten(-1, (-1, module.head_dim))).reshape(x.shape),)

        stack.callback(module.o_proj.register_forward_pre_hook(hook).remove)

    return inject


def function(attend: Callable[..., Tensor]) -> Callable[..., None]:
    """Replace the attention function by one from scores and mask to attention weights, or by one
    with tiled heads.
    """

    def inject(model, module, stack):
        import sys

        modeling = sys.modules[type(module).__module__]
        right = modeling.eager_attention_forward

        def eager(which, query, key, value, attention_mask, scaling, **kwargs):
            if which is not module:
                return right(which, query, key, value, attention_mask, scaling, **kwargs)
            groups = query.shape[1] // key.shape[1]
            if attend is tiled:
                key, value = key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1)
            else:
                key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
            scores = query @ key.transpose(2, 3) * scaling
            mask = 0.0 if attention_mask is None else attention_mask[..., : key.shape[2]]
            context = attend(scores, mask)
            return (context @ value).transpose(1, 2).contiguous(), context

        set_in(modeling, "eager_attention_forward", eager, stack)

    return inject


def tiled(scores: Tensor, mask: Tensor) -> Tensor:
    return (scores + mask).softmax(-1)


def cached(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[..., None]:
    """Change the keys and values written to the cache."""

    def inject(model, module, stack):
        def hook(_, args, kwargs):
            layer = kwargs["past_key_values"].layers[module.layer_idx]
            if "update" not in vars(layer):
                update = layer.update
                layer.update = lambda k, v, *more, **others: update(*change(k, v), *more, **others)

        stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    return inject


def seeing(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., None]:
    """Change the mask to a function of distance (0 for the query's own position), over all tokens
    so far.
    """

    def another(mask, module, position_ids, hidden_states, **_):
        queries = torch.arange(mask.shape[3] - hidden_states.shape[1], mask.shape[3])
        distance = queries[:, None] - torch.arange(mask.shape[3])
        is_visible = change(
            distance, module.config.get_text_config().to_dict().get("sliding_window")
        )
        return (
            torch.where(is_visible, 0.0, torch.finfo(mask.dtype).min).expand_as(mask).contiguous()
        )

    return argument("attention_mask", another)


def stale(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k, v = k.clone(), v.clone()
    k[:, :, -1], v[:, :, -1] = 0.0, 0.0
    return k, v


def to_meta(weight: Tensor) -> Tensor:
    """Reorder the rows of half-split RoPE pairs as interleaved ones, with 8 features per head."""
    return weight.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)


# ---- Bugs ----------------------------------------------------------------------------------------


def is_square(spec: AttentionSpec) -> bool:
    return spec.q_width == spec.d_model


def is_shared(spec: AttentionSpec) -> bool:
    return 1 < spec.num_kv_heads < spec.num_heads


def has_plain_scale(spec: AttentionSpec) -> bool:
    return spec.scale is None


def has_bias(spec: AttentionSpec) -> bool:
    return "q_proj.bias" in spec.weight_shapes


def has_window(spec: AttentionSpec) -> bool:
    return spec.window_size is not None


def is_plain(spec: AttentionSpec) -> bool:
    """Return True if the scores are plain products, scaled and masked."""
    return spec.soft_cap is None and not spec.sinks


QK, K = ("q", "k"), ("k",)
SEEN = ("mask", "attn_weights", "context")
HEAD = 8
BUGS = {
    "q transposed": Injection(("q_proj-transposed",), QK, weights(q_proj=lambda w: w.T), is_square),
    "o transposed": Injection(
        ("out_proj-transposed",), ("output",), weights(o_proj=lambda w: w.T), is_square
    ),
    "q of Meta": Injection(
        ("rope-weights-interleaved-q",), QK, weights(q_proj=to_meta), lambda s: not has_bias(s)
    ),
    "qk of Meta": Injection(
        ("rope-weights-interleaved",),
        QK,
        weights(q_proj=to_meta, k_proj=to_meta),
        lambda s: not has_bias(s),
    ),
    "k and v": Injection(("k-v-swapped",), K, exchanged("k_proj", "v_proj")),
    "k heads": Injection(
        ("k-heads-reversed", "k-heads-rolled"),
        K,
        weights(k_proj=lambda w: w.roll(HEAD, 0)),
        lambda s: not has_bias(s),
    ),
    "v heads": Injection(
        ("v-heads-reversed", "v-heads-rolled"),
        ("v",),
        weights(v_proj=lambda w: w.roll(HEAD, 0)),
        lambda s: not has_bias(s),
    ),
    "q bias": Injection(
        ("q_proj-bias-missing",), QK, weights(q_proj_bias=torch.zeros_like), has_bias
    ),
    "k bias": Injection(
        ("k_proj-bias-missing",), K, weights(k_proj_bias=torch.zeros_like), has_bias
    ),
    "v bias": Injection(
        ("v_proj-bias-missing",), ("v",), weights(v_proj_bias=torch.zeros_like), has_bias
    ),
    "out bias": Injection(
        ("out_proj-bias-missing",),
        ("output",),
        weights(o_proj_bias=torch.zeros_like),
        lambda s: "out_proj.bias" in s.weight_shapes,
    ),
    "no out_proj": Injection(("out-proj-missing",), ("output",), child("o_proj"), is_square),
    "no norms": Injection(
        ("qk-norm-missing",), QK, child("q_norm", "k_norm"), lambda s: bool(s.norms)
    ),
    "no norm of k": Injection(("qk-norm-missing-k",), K, child("k_norm"), lambda s: bool(s.norms)),
    "norms exchanged": Injection(
        ("qk-norms-swapped",), QK, exchanged("q_norm", "k_norm"), lambda s: bool(s.norms)
    ),
    "no RoPE": Injection(
        ("rope-missing",),
        QK,
        argument(
            "position_embeddings", lambda x, **_: (torch.ones_like(x[0]), torch.zeros_like(x[1]))
        ),
    ),
    "RoPE reversed": Injection(
        ("rope-reversed",), QK, argument("position_embeddings", lambda x, **_: (x[0], -x[1]))
    ),
    "one further": Injection(("rope-off-by-one",), QK, at(lambda p: p + 1)),
    "one before": Injection(("rope-off-by-minus-one",), QK, at(lambda p: p - 1)),
    "theta": Injection(("rope-theta-1000000",), QK, at(lambda p: p, 1e6)),
    "other theta": Injection(("rope-theta-500000",), QK, at(lambda p: p, 5e5)),
    "restarted": Injection(("cache-position-restarted",), QK, at(lambda p: p - p[:, :1])),
    "one further in steps": Injection(
        ("cache-position-off-by-one",), QK, at(lambda p: p + (p[:, :1] > 0).to(p.dtype))
    ),
    "no scale": Injection(
        ("scale-missing",), SEEN, attribute("scaling", lambda m: 1.0), has_plain_scale
    ),
    "scale twice": Injection(
        ("scale-squared",), SEEN, attribute("scaling", lambda m: 1.0 / m.head_dim), has_plain_scale
    ),
    "scale of width": Injection(
        ("scale-by-d-model",),
        SEEN,
        attribute("scaling", lambda m: m.config.hidden_size**-0.5),
        has_plain_scale,
    ),
    "no cap": Injection(
        ("soft-cap-ignored",),
        SEEN,
        attribute("attn_logit_softcapping", lambda m: None),
        lambda s: s.soft_cap,
    ),
    "sinks of 0": Injection(
        ("sinks-zero",),
        SEEN,
        lambda model, module, stack: set_in(
            module.sinks, "data", torch.zeros_like(module.sinks.data), stack
        ),
        lambda s: s.sinks,
    ),
    "no sinks": Injection(
        ("sinks-ignored",),
        SEEN,
        function(lambda scores, mask: (scores + mask).softmax(-1)),
        lambda s: s.sinks,
    ),
    "tiled": Injection(
        ("kv-heads-tiled",), SEEN, function(tiled), lambda s: is_shared(s) and is_plain(s)
    ),
    "mask ignored": Injection(
        ("mask-ignored", "causal-ignored"),  # equivalent if nothing is padded
        SEEN,
        function(lambda scores, mask: scores.softmax(-1)),
        is_plain,
    ),
    "mask too late": Injection(
        ("mask-after-softmax",),
        SEEN,
        function(lambda scores, mask: scores.softmax(-1) * (mask == 0)),
        is_plain,
    ),
    "the next, too": Injection(
        ("causal-off-by-one",), SEEN, seeing(lambda d, w: d >= -1), lambda s: not has_window(s)
    ),
    "window narrow": Injection(
        ("window-one-too-narrow",), SEEN, seeing(lambda d, w: (d >= 0) & (d < w - 1)), has_window
    ),
    "window wide": Injection(
        ("window-one-too-wide",), SEEN, seeing(lambda d, w: (d >= 0) & (d < w + 1)), has_window
    ),
    "no window": Injection(("window-ignored",), SEEN, seeing(lambda d, w: d >= 0), has_window),
    "combined innermost": Injection(
        ("heads-combined-innermost",),
        ("output",),
        combined(lambda x: x.transpose(2, 3)),
        lambda s: s.out_proj,
    ),
    "not moved back": Injection(
        ("heads-not-moved-back",), ("output",), combined(lambda x: x.transpose(1, 2))
    ),
    "keys as values": Injection(
        ("cache-keys-as-values",), ("cache.values",), cached(lambda k, v: (k, k))
    ),
    "keys rolled": Injection(
        ("cache-keys-rolled",), ("cache.keys",), cached(lambda k, v: (k.roll(1, 2), v))
    ),
    "stale slot": Injection(("cache-slot-stale",), ("cache.keys",), cached(stale)),
}
