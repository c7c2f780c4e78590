"""The support matrix: features by framework and path, found by calling small layers.

    for name in jax torch; do .venv/bin/python tools/docs-site/support.py $name; done
    .venv-tt/bin/python tools/docs-site/support.py tt

records the answers of each framework in support-<name>.json, from which the site is built. Tests
compare the files with the answers of today's layers.
"""

import json
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mha_spec import (  # noqa: E402
    Alibi,
    AttentionSpec,
    DynamicScaling,
    Gate,
    GridBias,
    InputError,
    InputTypeError,
    Latent,
    Norm,
    RelativeBias,
    RelativeProducts,
    Rope,
    Temperature,
)
from mha_spec.aliases import UNKNOWN_ARGUMENT  # noqa: E402

HERE = Path(__file__).parent
B, T = 2, 128
SPEC = AttentionSpec(128, 4, qkv_bias=False)
"""The layer that has none of the features: heads of one TTNN tile, and tokens of one block of a
TPU.
"""


class Feature(NamedTuple):
    """A row of the matrix.

    Attributes:
        name: field of `AttentionSpec`, or argument of a call.
        value: the value in words; empty if the name says it.
        fields: fields of the specification.
        call: arguments of a call, by the numbers of its queries and keys.
        dtype: dtype of the layer.
        is_training: the layer is in training.
    """

    name: str
    value: str
    fields: Mapping[str, Any] = {}
    call: Callable[[int, int], dict[str, Any]] = lambda t, s: {}
    dtype: str = "float32"
    is_training: bool = False

    @property
    def key(self) -> str:
        """The name and the value."""
        if not self.value:
            return self.name
        return f"{self.name}: {self.value}"

    @property
    def title(self) -> str:
        """The key in Markdown."""
        if not self.value:
            return f"`{self.name}`"
        return f"`{self.name}`: {self.value}"


def _of(name: str, *values: tuple[str, Any], **others: Any) -> list[Feature]:
    return [Feature(name, words, {name: value} | others) for words, value in values]


LATENT = Latent(kv_rank=32, rope_dim=32)
LATENT_ROPE = Rope(rotary_dim=32, rotated="last", pairs="interleaved")

FEATURES = [
    Feature("d_model", "", {"d_model": 256, "head_dim": 32, "d_in": 128}),
    Feature("num_heads", "", {"num_heads": 8}),
    *_of("num_kv_heads", ("2 of 4", 2), ("1 of 4", 1)),
    *_of("head_dim", ("64", 64)),
    *_of("d_in", ("64", 64)),
    Feature("d_kv", "64", {"d_kv": 64}, lambda t, s: {"key": np.ones((B, s, 64))}),
    *_of("value_head_dim", ("64", 64)),
    *_of("qkv_bias", ("True", True), ("one for each", (True, False, True))),
    *_of("out_bias", ("False", False)),
    *_of("out_proj", ("False", False)),
    *_of("fused_qkv", ("", True)),
    Feature(
        "shared_kv",
        "",
        {"shared_kv": True},
        lambda t, s: dict.fromkeys(("key", "value"), np.ones((B, 4, s, 32))),
    ),
    Feature(
        "latent", "", {"latent": LATENT, "rope": LATENT_ROPE, "head_dim": 64, "value_head_dim": 32}
    ),
    *_of(
        "qk_norm",
        ("of heads", Norm()),
        ("`per_head`", Norm(per_head=True)),
        ("of the width", Norm(over="width")),
    ),
    *_of("v_norm", ("", Norm())),
    *_of("clip_qkv", ("", 8.0)),
    *_of("context_norm", ("", Norm(over="width"))),
    *_of("gate", ("", Gate())),
    *_of("rope", ("", Rope()), ("sections", Rope(sections=(4, 6, 6)))),
    *_of(
        "rope",
        ("by the length of a call", Rope(scaling=DynamicScaling(factor=2.0, original_length=64))),
    ),
    *_of("scale", ("", 0.5)),
    *_of("temperature", ("", Temperature(64, scale=0.1))),
    *_of("soft_cap", ("", 50.0)),
    *_of("sinks", ("", True)),
    *_of("alibi", ("", Alibi())),
    *_of("relative_bias", ("`RelativeBias`", RelativeBias()), ("`GridBias`", GridBias(16, 16))),
    *_of("relative_products", ("", RelativeProducts(8, 8))),
    *_of("window_size", ("", 16)),
    *_of("chunk_size", ("", 16)),
    Feature("dropout", "in training", {"dropout": 0.1}, is_training=True),
    Feature("output_dropout", "in training", {"output_dropout": 0.1}, is_training=True),
]
"""Every field of `AttentionSpec`."""

ARGUMENTS = [
    Feature("key", "cross-attention", {}, lambda t, s: {"key": np.ones((B, s, 128))}),
    Feature("is_causal", "", {}, lambda t, s: {"is_causal": True}),
    Feature(
        "key_padding_lengths",
        "",
        {},
        lambda t, s: {"key_padding_lengths": np.array([100, 128], np.int32)},
    ),
    Feature("segment_ids", "", {}, lambda t, s: {"segment_ids": np.ones((B, t), np.int32)}),
    Feature("mask", "", {}, lambda t, s: {"mask": np.eye(t, s, dtype=bool)}),
    Feature("bias", "", {}, lambda t, s: {"bias": np.ones((t, s))}),
    Feature(
        "positions",
        "",
        {"rope": Rope()},
        lambda t, s: {"positions": np.arange(t, dtype=np.int32)[None]},
    ),
    Feature("new_lengths", "", {}, lambda t, s: {"new_lengths": np.array([0, 1], np.int32)}),
    Feature("dtype", "float64", dtype="float64"),
    Feature("dtype", "float32", dtype="float32"),
    Feature("dtype", "float16", dtype="float16"),
    Feature("dtype", "bfloat16", dtype="bfloat16"),
]
"""Arguments of a call, and dtypes of a layer."""

PATHS = ("weights", "output", "cache", "heads", "tokens")
"""Ways to call a layer, by the names of methods of `Framework`."""

YES, NO_ARGUMENT = "yes", "no argument"


def support(name: str) -> dict[str, dict[str, str]]:
    """Ask a framework.

    Args:
        name: `jax`, `torch` or `tt`.

    Returns:
        For each feature the answer by path: `YES`, `NO_ARGUMENT` if calls have no such argument, or
            the rule that it breaks; and by kernel: `kernel`, or `plain` if the fast path falls back
            on the definition.
    """
    with FRAMEWORKS[name]() as framework:
        return {feature.key: answers(framework, feature) for feature in (*FEATURES, *ARGUMENTS)}


def recorded(name: str) -> dict[str, dict[str, str]]:
    """Return the recorded answers of a framework."""
    return json.loads((HERE / f"support-{name}.json").read_text("utf-8"))


def record(name: str) -> None:
    """Record the answers of a framework, a feature per line."""
    lines = []
    for key, feature_answers in support(name).items():
        lines.append(f"{json.dumps(key)}: {json.dumps(feature_answers)}")
    text = ",\n".join(lines)
    (HERE / f"support-{name}.json").write_text(f"{{\n{text}\n}}\n", "utf-8")


def answers(framework: "Framework", feature: Feature) -> dict[str, str]:
    """The answers about one feature."""
    feature_answers = {path: framework.ask(path, feature) for path in PATHS}
    for name, (path, platform) in framework.kernels.items():
        with platform(), framework.plain_calls() as calls:
            if framework.ask(path, feature) == YES:
                feature_answers[name] = "plain" if calls else "kernel"
    return feature_answers


# ---- Frameworks ----------------------------------------------------------------------------------


class Framework:
    """A framework, and calls of its layers.

    Attributes:
        package: its layers.
        plain: name of the function that the fast path falls back on, where the fast path calls it.
        kernels: the path, and the context to call it in, for each choice of a kernel.
    """

    package: Any
    plain: str
    kernels: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]]

    def ask(self, path: str, feature: Feature) -> str:
        """Call a layer with a feature, and return the answer."""
        spec = SPEC.replace(**feature.fields)
        try:
            self.run(feature, lambda: getattr(self, path)(spec, feature))
        except (InputError, InputTypeError) as error:
            if error.rule == UNKNOWN_ARGUMENT:
                return NO_ARGUMENT
            return f"{error.argument} must {error.rule}"
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            return NO_ARGUMENT
        return YES

    def __enter__(self) -> "Framework":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, feature: Feature, function: Callable[[], Any]) -> None:
        """Call a function of layers and arrays."""
        function()

    def layer(self, kind: str, spec: AttentionSpec, feature: Feature) -> Any:
        """A new module."""
        raise NotImplementedError

    def array(self, x: np.ndarray, feature: Feature) -> Any:
        """An array of the framework; floating-point ones have the dtype of the layer."""
        raise NotImplementedError

    def divided(self, layer: Any, **axes: Any) -> Any:
        """The layer with its heads or tokens divided over two devices."""
        raise NotImplementedError

    # The paths:

    def weights(self, spec: AttentionSpec, feature: Feature) -> None:
        """Ask for attention weights."""
        self.attend(
            self.layer("MultiHeadAttention", spec, feature), spec, feature, need_weights=True
        )

    def output(self, spec: AttentionSpec, feature: Feature) -> None:
        """Ask for the output alone."""
        self.attend(self.layer("MultiHeadAttention", spec, feature), spec, feature)

    def cache(self, spec: AttentionSpec, feature: Feature) -> None:
        """Append a prompt to a cache."""
        self.append(spec, feature, T)

    def step(self, spec: AttentionSpec, feature: Feature) -> None:
        """Append one token of each sequence to a cache."""
        self.append(spec, feature, 1)

    def heads(self, spec: AttentionSpec, feature: Feature) -> None:
        """Divide the heads."""
        layer = self.divided(self.layer("MultiHeadAttention", spec, feature), heads=self.axis)
        self.attend(layer, spec, feature)

    def tokens(self, spec: AttentionSpec, feature: Feature) -> None:
        """Divide the tokens."""
        layer = self.divided(self.layer("MultiHeadAttention", spec, feature), tokens=self.axis)
        self.attend(layer, spec, feature, self.local_tokens)

    axis: Any = "x"
    local_tokens = T

    def attend(
        self, layer: Any, spec: AttentionSpec, feature: Feature, seq_len: int = T, **options: Any
    ) -> None:
        """Call a layer without a cache."""
        x = self.array(np.ones((B, seq_len, spec.d_in)), feature)
        layer(x, **self.arguments(feature, seq_len, seq_len), **options)

    def append(self, spec: AttentionSpec, feature: Feature, seq_len: int) -> None:
        """Call a layer with a cache; the cache of another layer holds the tokens already."""
        x = self.array(np.ones((B, seq_len, spec.d_in)), feature)
        kind = "MultiHeadAttentionWithCache"
        if spec.latent:
            kind = "MultiHeadLatentAttention"
        layer = self.layer(kind, spec, feature)
        cache = layer.init_cache(B, 2 * T)
        if spec.shared_kv:
            source = self.layer(kind, spec.replace(shared_kv=False), feature)
            _, cache = source(x, cache)
            layer(x, cache)
        else:
            layer(x, cache, **self.arguments(feature, seq_len, 2 * T))

    def arguments(self, feature: Feature, seq_len_q: int, seq_len_k: int) -> dict[str, Any]:
        """The arguments of a call, without its first tokens."""
        arguments = feature.call(seq_len_q, seq_len_k)
        for name, x in arguments.items():
            if isinstance(x, np.ndarray):
                arguments[name] = self.array(x, feature)
        return arguments

    @contextmanager
    def plain_calls(self) -> Iterator[list[str]]:
        """Note calls of the plain path."""
        calls: list[str] = []
        function = pkgutil.resolve_name(self.plain)

        def note(*arguments: Any, **options: Any) -> Any:
            calls.append(self.plain)
            return function(*arguments, **options)

        with patch(self.plain, note):
            yield calls


class Jax(Framework):
    """JAX, traced: no values are computed, and a mesh needs no devices."""

    plain = "mha_jax.kernels.fused.attend_without_weights"

    def __init__(self) -> None:
        from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

        import mha_jax

        self.package = mha_jax
        self.mesh: Any = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
        self.on_mesh = use_abstract_mesh
        self.kernels = {
            "JAX, CPU": ("output", nullcontext),
            "JAX, GPU": ("output", partial(self.on, "gpu")),
            "JAX, TPU": ("output", partial(self.on, "tpu")),
            "JAX, CPU, step": ("step", nullcontext),
        }

    @contextmanager
    def on(self, platform: str) -> Iterator[None]:
        """Choose kernels as on a different platform, without calling them."""
        with ExitStack() as stack:
            stack.enter_context(
                patch("mha_jax.kernels.fused.platform_of", lambda *arrays: platform)
            )
            for kernel in ("library", "splash"):
                stack.enter_context(patch(f"mha_jax.kernels.{kernel}.attend", context_like))
            yield

    def run(self, feature: Feature, function: Callable[[], Any]) -> None:
        import jax
        from flax import nnx

        with jax.enable_x64(feature.dtype == "float64"):
            nnx.eval_shape(function)

    def layer(self, kind: str, spec: AttentionSpec, feature: Feature) -> Any:
        from flax import nnx

        from mha_jax.kernels.fused import FusedAttention

        layer = getattr(self.package, kind)(spec, rngs=nnx.Rngs(0), param_dtype=feature.dtype)
        layer.kernel = FusedAttention(queries=32, keys=32, few_scores=0)  # as for a large call
        if feature.is_training:
            layer.train()
        else:
            layer.eval()
        return layer

    def array(self, x: np.ndarray, feature: Feature) -> Any:
        import jax.numpy as jnp

        dtype = feature.dtype if x.dtype == float else None
        return jnp.asarray(x, dtype)

    def divided(self, layer: Any, **axes: Any) -> Any:
        from mha_jax import parallel

        return parallel.shard(layer, self.mesh, **axes)

    def heads(self, spec: AttentionSpec, feature: Feature) -> None:
        with self.on_mesh(self.mesh):
            super().heads(spec, feature)

    def tokens(self, spec: AttentionSpec, feature: Feature) -> None:
        with self.on_mesh(self.mesh):
            super().tokens(spec, feature)


class Torch(Framework):
    """PyTorch on a CPU, as one of two processes; the other one is not there, and messages to it are
    lost.
    """

    plain = "mha_torch.kernels.fused.stages.attend"
    local_tokens = T // 2

    def __init__(self) -> None:
        import mha_torch

        self.package = mha_torch
        self.kernels = {
            "PyTorch": ("output", nullcontext),
            "PyTorch, large, CUDA": ("output", self.on_cuda),
            "PyTorch, step": ("step", nullcontext),
        }

    def __enter__(self) -> Framework:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        return self

    def __exit__(self, *_: object) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()

    @contextmanager
    def on_cuda(self) -> Iterator[None]:
        """Choose kernels as for a large call on CUDA, without calling FlexAttention."""
        names = {
            "is_on_device": lambda x: True,
            "_runs_here": lambda query, value: True,
            "MANY_SCORES": 0,
            "attend": context_like,
        }
        with ExitStack() as stack:
            for name, value in names.items():
                stack.enter_context(patch(f"mha_torch.kernels.flex.{name}", value))
            yield

    def run(self, feature: Feature, function: Callable[[], Any]) -> None:
        import torch

        # Processes compare the lengths of their parts.
        with torch.no_grad(), patch("mha_torch.parallel.ring.check_parts", lambda *arguments: None):
            function()

    def layer(self, kind: str, spec: AttentionSpec, feature: Feature) -> Any:
        import torch

        layer = getattr(self.package, kind)(spec, dtype=getattr(torch, feature.dtype))
        return layer.train(feature.is_training)

    def array(self, x: np.ndarray, feature: Feature) -> Any:
        import torch

        dtype = getattr(torch, feature.dtype) if x.dtype == float else None
        return torch.as_tensor(x, dtype=dtype)

    def divided(self, layer: Any, **axes: Any) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        from mha_torch import parallel

        return parallel.shard(layer, init_device_mesh("cpu", (2,), mesh_dim_names=("x",)), **axes)


class Tt(Framework):
    """TTNN on a mock board of two chips."""

    plain = "mha_tt.kernels.fused.stages.attend"
    axis = 1

    def __init__(self) -> None:
        import mha_tt
        import ttnn_mock

        self.package = mha_tt
        self.board = ttnn_mock.board("n300", values=False)
        self.kernels = {"TTNN": ("output", nullcontext), "TTNN, step": ("step", nullcontext)}

    def __enter__(self) -> Framework:
        self.device = self.board.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.board.__exit__(*error)

    def dtype(self, feature: Feature) -> Any:
        """The dtype of a layer; by default the one that has a kernel."""
        import ttnn  # pyright: ignore[reportMissingImports]

        name = "bfloat16"
        if feature.name == "dtype":
            name = feature.dtype
        # The layer rejects the name of a dtype that TTNN does not have.
        return getattr(ttnn, name, name)

    def layer(self, kind: str, spec: AttentionSpec, feature: Feature) -> Any:
        layer = getattr(self.package, kind)(spec, device=self.device, dtype=self.dtype(feature))
        return layer.train(feature.is_training)

    def array(self, x: np.ndarray, feature: Feature) -> Any:
        if x.dtype != float:
            return x
        return self.package.upload(x, device=self.device, dtype=self.dtype(feature))

    def divided(self, layer: Any, **axes: Any) -> Any:
        from mha_tt import parallel

        return parallel.shard(layer, self.device, **axes)


def context_like(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    """An array of the shape of a context, without attention."""
    return query[..., :1] * value[:, :1, :1]


FRAMEWORKS = {"jax": Jax, "torch": Torch, "tt": Tt}


if __name__ == "__main__":
    record(*sys.argv[1:])
