"""Tensor and context parallelism of a layer, based on `torch.distributed.tensor.parallel`.

Each rank computes some of the query heads, and an all-reduce sums the outputs. A norm over the
width of all heads needs an all-reduce of one number per token before. Gradients of replicated
tensors are partial: the gradient of the input is all-reduced, and the gradient of a weight stays a
`Partial` DTensor.
"""

from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel, parallelize_module

from mha_spec import AttentionSpec, InputError, InputTypeError
from mha_spec.shares import OF_QUERIES, axis_of_heads, local_heads
from mha_torch.arrays import is_distributed
from mha_torch.features.latent_mha import hooks_of
from mha_torch.features.norms import NormLayer
from mha_torch.masks import Mask
from mha_torch.mha import AttentionLayer
from mha_torch.parallel.local import PLACES, ShardedNorm, WidthShard, local_weight
from mha_torch.parallel.ring import RingAttention, check_ring_supports
from mha_torch.scores import Scores

# ---- Functions -----------------------------------------------------------------------------------


def shard(
    layer: AttentionLayer, mesh: DeviceMesh, *, heads: str | None = None, tokens: str | None = None
) -> AttentionLayer:
    """Divide the heads of a layer over a dimension of a mesh, or the tokens of its sequences, or
    both.

    `heads` is tensor parallelism: each rank calls the layer with the whole input and gets the whole
    output. Attention weights, masks and biases with an axis of heads, and the cache of `init_cache`
    are local: for the rank's heads.

    `tokens` is context parallelism by `ring_attention`: each rank calls the layer with its own
    tokens, (B, T / n, d_in), parts of equal length and in order, and gets their output. Default
    positions are those in the whole sequence, and `key_padding_lengths` are of whole sequences. The
    gradient of the input covers the rank's tokens and includes the outputs of all ranks. Gradients
    of weights must be summed over ranks.

    Args:
        layer: any attention module of this package, without a cache if `tokens` is set; changed in
            place.
        mesh: device mesh.
        heads: name of the mesh dimension that heads are divided over.
        tokens: name of the mesh dimension that tokens are divided over.

    Returns:
        The layer.

    Raises:
        TypeError: if the layer is not one of this package.
        ValueError: if the mesh has no such dimension, or the layer cannot be divided: by heads as
            for `plan`; by tokens if it has a cache, or RoPE whose frequencies depend on the last
            position of a call. Calls with divided tokens raise it for masks, biases, attention
            weights and dropout.

    Source: Megatron-LM, arXiv:1909.08053, section 3; Ring Attention, arXiv:2310.01889.
    """
    if not isinstance(layer, AttentionLayer):
        raise InputTypeError("layer", "be an attention module of mha_torch", type(layer).__name__)
    names = mesh.mesh_dim_names or ()
    for name, dimension in (("heads", heads), ("tokens", tokens)):
        if dimension is not None and dimension not in names:
            raise InputError(
                name, "name a dimension of the mesh", {name: dimension, "names": names}
            )
    if heads is None and tokens is None:
        raise InputError("heads or tokens", "name a dimension of the mesh", "neither")
    if tokens is not None:
        check_divides_tokens(layer)
    if heads is not None:
        parallelize_module(layer, mesh[heads], plan(layer))
    if tokens is not None:
        _divide_tokens(layer, RingAttention.over(mesh[tokens].get_group()))
    return layer


def _divide_tokens(layer: AttentionLayer, kernel: RingAttention) -> None:
    """Set ring attention as the kernel of a layer, and default positions to the positions of local
    tokens.
    """

    def enter(
        _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if inputs:
            x = inputs[0]
        else:
            x = named.get("query", named.get("x"))
        if named.get("need_weights"):
            rule = "be False where tokens are divided, which stores no weights"
            raise InputError("need_weights", rule, need_weights=True)
        check_ring_supports(Mask(named.get("mask")), layer.scores(named.get("bias")))
        if isinstance(x, Tensor) and layer.spec.has_positions and named.get("positions") is None:
            positions = kernel.positions(x.shape[-2], x.device)
            if x.ndim == 2:  # one sequence, without a batch axis
                positions = positions[0]
            named = named | {"positions": positions}
        return inputs, named

    layer.kernel = kernel
    layer.register_forward_pre_hook(enter, with_kwargs=True)


def plan(layer: AttentionLayer) -> dict[str, ParallelStyle]:
    """Return a plan for `parallelize_module` that divides the heads of a layer, to compose with
    other plans.

    Each of R ranks has N / R consecutive query heads: their rows of q_proj, gate_proj and, with
    latents, q_b_proj and kv_b_proj; their columns of out_proj and of a relative bias; their sinks
    and slopes; and their key/value heads. If R does not divide the key/value heads, k_proj and
    v_proj are replicated, as are projections to latents and norms whose weights the heads share.
    Norms over the width of all heads have local weights and sum the squares of all ranks: one
    all-reduce of a number per token, forward and backward.

    Args:
        layer: any attention module of this package; apply the plan to this module.

    Returns:
        Style of each module by name. The others require the layer's own style, "".

    Raises:
        TypeError: if the layer is not one of this package.
        ValueError: when applied, if R does not divide the query heads, q, k and v are one
            projection, norms have weights per key/value head and R does not divide these, or
            outputs have dropout. When called, if a norm over the width was left out of the plan.
    """
    if not isinstance(layer, AttentionLayer):
        raise InputTypeError("layer", "be an attention module of mha_torch", type(layer).__name__)
    spec = layer.spec
    styles = dict[str, ParallelStyle]({"": _Layer()})
    for name in spec.projections:
        if name in ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj"):
            styles[name] = _OfQueries()
        elif name in ("k_proj", "v_proj"):
            styles[name] = _OfKeys(spec)
        elif name in ("q_a_proj", "kv_a_proj"):
            styles[name] = _Shared()
    styles |= {name: _OfNorm(spec, name) for name in spec.norms}
    if spec.out_proj:
        styles["out_proj"] = RowwiseParallel()
    return styles


# ---- Local layers --------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class _LocalSpec(AttentionSpec):
    """Local specification of a layer with ALiBi, whose slopes depend on the number of all heads."""

    _: KW_ONLY
    local_slopes: tuple[float, ...] = ()

    @cached_property
    def alibi_slopes(self) -> tuple[float, ...] | None:
        return self.local_slopes


def _spec_of(spec: AttentionSpec, size: int, rank: int) -> AttentionSpec:
    """Return the specification of one of `size` ranks."""
    queries, keys = local_heads(spec, size, rank)
    local_sizes: dict[str, Any] = {"num_heads": len(queries), "num_kv_heads": len(keys)}
    if spec.alibi_slopes is None:
        return replace(spec, **local_sizes)
    whole_fields = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return _LocalSpec(
        **whole_fields | local_sizes, local_slopes=spec.alibi_slopes[queries.start : queries.stop]
    )


def _heads_of_norm(spec: AttentionSpec, name: str) -> int:
    if name in OF_QUERIES:
        return spec.num_heads
    return spec.num_kv_heads


def _width_of(spec: AttentionSpec, name: str, mesh: DeviceMesh) -> WidthShard:
    """Return a rank's part of the width of a norm."""
    heads_of_ranks = [
        local_heads(spec, mesh.size(), rank) for rank in range(mesh.get_local_rank() + 1)
    ]
    *others, own = [
        list(local.queries) if name in OF_QUERIES else local.keys for local in heads_of_ranks
    ]
    before = {head for heads in others for head in heads}
    # A head that several ranks share, or that this one has twice, is counted once.
    counted = [index for index, head in enumerate(own) if head not in {*before, *own[:index]}]
    return WidthShard(mesh, own, counted, _heads_of_norm(spec, name))


class _Sharded(AttentionLayer):
    """Layer with the heads of one rank, whose parameters are distributed.

    Attributes:
        mesh: ranks of all heads.
    """

    mesh: DeviceMesh

    def scores(self, bias: Tensor | None) -> Scores:
        """Return the scores of a call, with the learned weights of local heads."""
        learned = {name: local_weight(getattr(self, name)) for name in self.spec.score_shapes}
        return replace(super().scores(bias), learned=learned)

    def _kv_b(self) -> Tensor | None:
        """Return the local part of the weight of kv_b_proj; None if kv_b_proj must be called."""
        kv_b_proj = self.kv_b_proj
        hooks = hooks_of(kv_b_proj)
        is_plain = (
            type(kv_b_proj) is nn.Linear
            and kv_b_proj.bias is None
            and "forward" not in vars(kv_b_proj)
        )
        is_placed = bool(hooks) and all(hasattr(hook, PLACES) for hook in hooks)
        if is_plain and is_placed:
            return local_weight(kv_b_proj.weight)
        return None


def _as_sharded_norm(module: nn.Module) -> ShardedNorm:
    """Turn a norm of the layer into one of local heads."""
    if not isinstance(module, NormLayer) or type(module).forward not in (
        NormLayer.forward,
        ShardedNorm.forward,
    ):
        raise InputTypeError(
            "a norm", "equal the style of its layer to be divided", type(module).__name__
        )
    module.__class__ = ShardedNorm
    return cast(ShardedNorm, module)


@cache
def _sharded(kind: type[AttentionLayer]) -> type[AttentionLayer]:
    """Return a subclass of a layer's class for some of the heads, like the classes of FSDP2."""
    return type(
        f"Sharded{kind.__name__}",
        (_Sharded, kind),
        {"__module__": kind.__module__, "__doc__": kind.__doc__},
    )


# ---- Styles --------------------------------------------------------------------------------------


class _Layer(ParallelStyle):
    """Style of the layer itself: its inputs, its parameters of scores, and its local
    specification.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, AttentionLayer):
            raise InputTypeError(
                "layer", "be an attention module of mha_torch", type(module).__name__
            )
        if any(is_distributed(weight) for weight in module.parameters()):
            raise InputError(
                "layer",
                "be divided by heads once, before it is by anything else, "
                'and by its own style, "", first',
                "DTensors in it",
            )
        check_divides(module.spec, device_mesh.size())
        for name in module.spec.score_shapes:
            axis = axis_of_heads(name, module.spec)
            if axis is None:
                placement = Replicate()
            else:
                placement = Shard(axis)
            _distribute(module, name, device_mesh, placement, self.src_data_rank)
        for name in module.spec.wide_norms if device_mesh.size() > 1 else ():
            norm = _as_sharded_norm(getattr(module, name))
            norm.width = _width_of(module.spec, name, device_mesh)
        module.spec = _spec_of(module.full_spec, device_mesh.size(), device_mesh.get_local_rank())
        module.__class__ = _sharded(type(module))
        vars(module)["mesh"] = device_mesh

        def enter(
            _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict]:
            entered: dict[int, Any] = {}  # one tensor in several arguments stays one

            def once(x: Any) -> Any:
                if isinstance(x, Tensor) and id(x) not in entered:
                    entered[id(x)] = _entered(x, device_mesh)
                return entered.get(id(x), x)

            own = {
                name: once(x)
                if name in ("x", "query", "key", "value")
                else _local_argument(name, x, device_mesh, module.full_spec)
                for name, x in named.items()
            }
            return tuple(once(x) for x in inputs), own

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module


class _Linear(ParallelStyle):
    """Style of a projection with local input and output; the gradient of its input is partial."""

    placement: Placement = Replicate()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise InputTypeError(
                "a projection", "be an nn.Linear to be divided", type(module).__name__
            )
        for name in ("weight", "bias"):
            _distribute(module, name, device_mesh, self.placement, self.src_data_rank)

        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
            return DTensor.from_local(
                inputs[0], device_mesh, [Replicate()], grad_placements=[Partial()]
            )

        def leave(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            return self.own(local_weight(output), device_mesh)

        setattr(enter, PLACES, True)
        setattr(leave, PLACES, True)
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module

    def own(self, output: Tensor, mesh: DeviceMesh) -> Tensor:
        """Return the local part of the output."""
        return output


class _OfQueries(_Linear):
    """Rows of local query heads."""

    placement = Shard(0)


class _Shared(_Linear):
    """All rows (replicated)."""


class _OfKeys(_Linear):
    """Rows of local key/value heads; or all rows, with these heads selected from the output."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.spec.num_kv_heads % device_mesh.size():
            self.placement = Replicate()
        else:
            self.placement = Shard(0)
        return super()._apply(module, device_mesh)

    def own(self, output: Tensor, mesh: DeviceMesh) -> Tensor:
        if self.placement.is_shard():
            return output
        keys = local_heads(self.spec, mesh.size(), mesh.get_local_rank()).keys
        return output.unflatten(-1, (self.spec.num_kv_heads, -1))[..., keys, :].flatten(-2)


class _OfNorm(ParallelStyle):
    """Weights of local heads if each has its own; replicated if heads share them, or ranks share
    key/value heads.
    """

    def __init__(self, spec: AttentionSpec, name: str) -> None:
        super().__init__()
        self.spec, self.name = spec, name

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        count = _heads_of_norm(self.spec, self.name)
        _as_sharded_norm(module)
        is_divided = (
            axis_of_heads(self.name, self.spec) is not None and count % device_mesh.size() == 0
        )
        for name in ("weight", "bias"):
            _distribute(
                module,
                name,
                device_mesh,
                Shard(0) if is_divided else Replicate(),
                self.src_data_rank,
            )
        return module


def _distribute(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: int | None
) -> None:
    """Distribute a parameter over the mesh."""
    parameter = getattr(module, name)
    if parameter is not None:
        placed = distribute_tensor(parameter, mesh, [placement], src_data_rank=source)
        module.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))


def _entered(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a replicated input whose gradient is partial."""
    if isinstance(x, DTensor):
        whole = x.redistribute(mesh, [Replicate()])
    else:
        whole = None
    if whole is None:
        if not x.requires_grad:
            return x
        whole = DTensor.from_local(x, mesh, [Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def _local_argument(name: str, x: Any, mesh: DeviceMesh, spec: AttentionSpec) -> Any:
    """Return an argument other than tokens: the local heads of a distributed mask or bias."""
    if not isinstance(x, DTensor):
        return x
    is_by_heads = name in ("mask", "bias") and x.ndim > 2 and x.shape[-3] == spec.num_heads
    if is_by_heads:
        placement = gradient = Shard(x.ndim - 3)
    else:
        placement = Replicate()
        gradient = Partial()
    return x.redistribute(mesh, [placement]).to_local(grad_placements=[gradient])


# ---- Validation ----------------------------------------------------------------------------------


def check_divides(spec: AttentionSpec, size: int) -> None:
    """Reject a layer whose heads cannot be divided over `size` ranks."""
    if size == 1:
        return
    if spec.num_heads % size:
        raise InputError(
            "num_heads",
            "be a multiple of the number of processes",
            num_heads=spec.num_heads,
            size=size,
        )
    if spec.shared_kv:
        raise InputError(
            "shared_kv",
            "be False to be divided, since the keys come from another layer",
            shared_kv=True,
        )
    if spec.fused_qkv:
        raise InputError(
            "fused_qkv",
            "be False to be divided, since the rows of qkv_proj hold all of q, then k, then v",
            fused_qkv=True,
            hint="a layer with three projections takes the same weights (parity.load_into)",
        )
    for name, norm in spec.norms.items():
        if name not in OF_QUERIES and norm.per_head and spec.num_kv_heads % size:
            raise InputError(
                name,
                "not be per_head where processes share key/value heads",
                num_kv_heads=spec.num_kv_heads,
                size=size,
            )
    if spec.output_dropout and spec.out_proj:
        raise InputError(
            "output_dropout",
            "be 0 to be divided, since each process would drop other outputs",
            output_dropout=spec.output_dropout,
        )


def check_divides_tokens(layer: AttentionLayer) -> None:
    """Reject a layer whose tokens cannot be divided."""
    if hasattr(layer, "init_cache"):
        raise InputError(
            "layer", "be one without a cache for its tokens to be divided", type(layer).__name__
        )
    if layer.spec.shared_kv:
        raise InputError(
            "shared_kv",
            "be False to be divided, since the keys come from another layer",
            shared_kv=True,
        )
    if layer.spec.rope is not None and layer.spec.rope.depends_on_length:
        raise InputError(
            "rope",
            "not depend on the last position of a call for tokens to be divided",
            rope=layer.spec.rope,
        )
