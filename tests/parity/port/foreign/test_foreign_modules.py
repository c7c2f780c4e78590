"""Converted weights, in the modules that their layouts are named after, match the float64
reference.

The modules are the libraries' own, tiny and random, and nothing is downloaded. Their parameters are
read and filled strictly by their own names, which also proves the names in the tables.
"""

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from helpers.input_errors import rejects
from helpers.layouts import undetermined_fields
from helpers.samples import sample

import mha_torch
from mha_spec import Rope
from parity import AttentionSpec, Case, random_weights
from parity.measure.core.compare import Label, compare
from parity.measure.core.problem import make_problem
from parity.measure.core.trace import Reference
from parity.measure.core.weights import load_tensors, save_tensors
from parity.port.conversion.layouts.canonical import from_canonical, to_canonical
from parity.port.conversion.layouts.tables import LAYOUTS
from parity.port.foreign import load_adapter

with pytest.MonkeyPatch.context() as _environment, tempfile.TemporaryDirectory() as _home:
    _environment.setenv(
        "KERAS_BACKEND", "torch"
    )  # JAX would fail under conftest's strict promotion
    _environment.setenv("KERAS_HOME", _home)  # where it writes its settings
    _environment.setenv("HF_HUB_OFFLINE", "1")
    import keras  # noqa: F401  (on which the adapter then runs)
    import transformers
    from transformers.models.bert.modeling_bert import BertAttention
    from transformers.models.falcon.modeling_falcon import FalconAttention, FalconRotaryEmbedding
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
    from transformers.models.gpt_neox.modeling_gpt_neox import (
        GPTNeoXAttention,
        GPTNeoXRotaryEmbedding,
    )
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
    from transformers.models.llama4.modeling_llama4 import (
        Llama4TextAttention,
        Llama4TextRotaryEmbedding,
    )
    from transformers.models.mistral.modeling_mistral import (
        MistralAttention,
        MistralRotaryEmbedding,
    )
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2RotaryEmbedding
    from transformers.models.vit.modeling_vit import ViTAttention

transformers.utils.logging.disable_progress_bar()  # for written files, on stderr

Tensors = dict[str, np.ndarray]
THETA = 500.0  # not a default of any library


# ---- Libraries: reading and filling the parameters of a module
# -------------------------------------------------------


@dataclass(frozen=True)
class Library:
    """Access to the parameters of a library's modules by name; `write` returns the filled
    module.
    """

    read: Callable[[Any], Tensors]
    write: Callable[[Any, Tensors], Any]


def read_torch(module):
    return {name: parameter.numpy().copy() for name, parameter in module.state_dict().items()}


def write_torch(module, tensors):
    module.load_state_dict({name: torch.from_numpy(x) for name, x in tensors.items()}, strict=True)
    return module


def check_names(tensors: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    wanted = {name: tuple(x.shape) for name, x in own.items()}
    if shapes != wanted:
        raise ValueError(f"tensors of {shapes}, expected {wanted}")


def renamed(names: Mapping[str, str]) -> Library:
    """Return torch's parameters with the layers that hold them renamed."""
    back = {ours: theirs for theirs, ours in names.items()}

    def rename(tensors, names):
        split = {name: name.split(".") for name in tensors}
        return {f"{names[layer]}.{leaf}": tensors[name] for name, (layer, leaf) in split.items()}

    return Library(
        lambda module: rename(read_torch(module), names),
        lambda module, tensors: write_torch(module, rename(tensors, back)),
    )


TORCH = Library(read_torch, write_torch)


# ---- Modules: construction and calls -------------------------------------------------------------


@dataclass(frozen=True)
class Foreign:
    """A module of a library.

    Attributes:
        layout: name of the layout that must hold its weights.
        spec: the layer.
        library: access to its parameters.
        make: builds it from the spec.
        run: calls it with queries and keys, which equal the queries unless `is_cross`.
        heads: returns the weights of each projection from its parameters, head first, split as in
            its source code.
        is_causal, is_cross: kind of attention.
        others: pattern of parameter names outside the attention.
    """

    layout: str
    spec: AttentionSpec
    library: Library
    make: Callable[[AttentionSpec], Any]
    run: Callable[[Any, np.ndarray, np.ndarray], Any]
    heads: Callable[[Tensors, AttentionSpec], Tensors]
    is_causal: bool = False
    is_cross: bool = False
    others: str = "nothing"

    @property
    def case(self) -> Case:
        """Return the case it runs."""
        keys = 9 if self.is_cross else None
        return Case(
            self.layout, self.spec, "converted", seq_len=7, seq_len_k=keys, is_causal=self.is_causal
        )

    def others_of(self, module: Any) -> Tensors:
        """Return its parameters outside the attention."""
        return {
            name: x for name, x in self.library.read(module).items() if re.match(self.others, name)
        }


def of_adapter(name, spec, heads):
    """Return a layer of a library with an adapter, with keys that differ from the queries."""
    adapter = load_adapter(name)
    convert = torch.from_numpy if name.startswith(("torch", "keras")) else jnp.asarray

    def write(module, tensors):
        check_names(tensors, adapter.read(module))
        return adapter.write(module, tensors)

    def run(module, query, key):
        query, key = convert(query), convert(key)
        return adapter.call(module, query, key, key)[0]

    library = Library(adapter.read, write)
    return Foreign(adapter.layout, spec, library, adapter.make, run, heads, is_cross=True)


def make_sibling(spec):
    return mha_torch.MultiHeadAttention(spec)


def run_sibling(module, query, key):
    return module(torch.from_numpy(query), torch.from_numpy(key))[0]


# ---- Modules of transformers ---------------------------------------------------------------------


def maker(attention, config, *, widths=("hidden_size", "num_attention_heads"), **options):
    """Return a function that builds this attention with the spec's sizes; options may be functions
    of the spec.
    """

    def make(spec):
        chosen = {
            name: value(spec) if callable(value) else value for name, value in options.items()
        }
        sizes = dict(zip(widths, (spec.d_model, spec.num_heads), strict=True))
        made = config(**sizes, **chosen, attn_implementation="eager")
        return attention(
            made, **({} if attention in (BertAttention, ViTAttention) else {"layer_idx": 0})
        ).eval()

    return make


def runner(rotary=None, **options):
    """Return a function that calls an attention with the causal mask, and with RoPE angles if it
    needs them.
    """

    def run(module, query, _):
        seq_len = query.shape[1]
        lowest = torch.finfo(torch.float32).min
        keywords = {
            "attention_mask": torch.full((1, 1, seq_len, seq_len), lowest).triu(1),
            **options,
        }
        if rotary is not None:
            x, positions = torch.from_numpy(query), torch.arange(seq_len)[None]
            keywords["position_embeddings"] = rotary(module.config)(x, positions)
        return module(torch.from_numpy(query), **keywords)[0]

    return run


def run_vit(module, query, _):
    return module(torch.from_numpy(query))[0]


def run_bert(module, query, _):
    context = module.self(torch.from_numpy(query))[0]
    return module.output.dense(context)  # without the residual and the normalization that follow


def rope(spec, **others):
    return {"rope_type": "default", "rope_theta": spec.rope.theta, **others}


def groups(spec):
    return spec.num_kv_heads


def head_dim(spec):
    return spec.head_dim


def biases(spec):
    return spec.out_bias


def llama(attention, config, **options):
    """Return a maker of layers with LLaMA's keywords."""
    return maker(
        attention,
        config,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rope_parameters=rope,
        **options,
    )


def falcon(**options):
    """Return a maker of a Falcon layer in one of its forms."""
    return maker(
        FalconAttention,
        transformers.FalconConfig,
        alibi=False,
        bias=biases,
        rope_parameters=rope,
        **options,
    )


MAKE_LLAMA = llama(LlamaAttention, transformers.LlamaConfig, attention_bias=biases)
MAKE_NEOX = maker(
    GPTNeoXAttention,
    transformers.GPTNeoXConfig,
    attention_bias=biases,
    rope_parameters=lambda spec: rope(spec, partial_rotary_factor=1.0),
)
MAKE_FALCON = {
    "groups": falcon(new_decoder_architecture=True, num_kv_heads=groups),
    "one": falcon(new_decoder_architecture=False, multi_query=True),
    "none": falcon(new_decoder_architecture=False, multi_query=False),
}
RUN_FALCON = runner(FalconRotaryEmbedding, alibi=None)


# ---- Heads: their positions according to the module's source code
# ----------------------------------------------------


def of_linears(q, k, v, out):
    """Return heads of four Linear layers: rows of the first three, columns of the last."""

    def heads(tensors, spec):
        our_weights = {
            p: tensors[name].reshape(-1, spec.head_dim, spec.d_in) for p, name in {"q": q}.items()
        }
        our_weights |= {
            p: tensors[name].reshape(-1, spec.head_dim, spec.d_kv)
            for p, name in {"k": k, "v": v}.items()
        }
        return our_weights | {"out": columns(tensors[out], spec)}

    return heads


def of_kernels(out):
    """Return heads of Flax and Keras, a separate axis: the second of the first three kernels, the
    first of the last.
    """

    def heads(tensors, spec):
        our_weights = {
            name[0]: tensors[f"{name}.kernel"].swapaxes(0, 1) for name in ("query", "key", "value")
        }
        return our_weights | {"out": tensors[f"{out}.kernel"]}

    return heads


def of_in_proj(tensors, spec):  # F._in_projection_packed: thirds, each with its heads in order
    qkv = tensors["in_proj_weight"].reshape(3, spec.num_heads, spec.head_dim, spec.d_in)
    return {**dict(zip("qkv", qkv, strict=True)), "out": columns(tensors["out_proj.weight"], spec)}


def of_qkv_proj(tensors, spec):
    qkv = tensors["qkv_proj.weight"].reshape(-1, spec.head_dim, spec.d_in)
    ends = [spec.num_heads, spec.num_heads + spec.num_kv_heads]
    return {
        **dict(zip("qkv", np.split(qkv, ends), strict=True)),
        "out": columns(tensors["out_proj.weight"], spec),
    }


def of_conv1d(tensors, spec):  # split(split_size, dim=2) of x @ weight
    qkv = (
        tensors["c_attn.weight"]
        .reshape(spec.d_in, 3, spec.num_heads, spec.head_dim)
        .transpose(1, 2, 0, 3)
    )
    out = tensors["c_proj.weight"].reshape(spec.num_heads, spec.head_dim, spec.d_model)
    return {**dict(zip("qkv", qkv, strict=True)), "out": out}


def of_groups(
    tensors, spec
):  # FalconAttention._split_heads, its three forms in one; GPT-NeoX is the last of them
    group = spec.num_heads // spec.num_kv_heads
    fused = tensors["query_key_value.weight"].reshape(
        spec.num_kv_heads, group + 2, spec.head_dim, spec.d_in
    )
    queries = fused[:, :-2].reshape(spec.num_heads, spec.head_dim, spec.d_in)
    return {
        "q": queries,
        "k": fused[:, -2],
        "v": fused[:, -1],
        "out": columns(tensors["dense.weight"], spec),
    }


def columns(weight, spec):
    return weight.reshape(spec.d_model, spec.num_heads, spec.head_dim).swapaxes(0, 1)


OF_LLAMA = of_linears("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
OF_SPLIT = of_linears("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")
OF_BERT = of_linears(
    "self.query.weight", "self.key.weight", "self.value.weight", "output.dense.weight"
)
OF_EQUINOX = of_linears(
    "query_proj.weight", "key_proj.weight", "value_proj.weight", "output_proj.weight"
)  # MultiheadAttention._project: reshape(seq_length, num_heads, -1)


# ---- The modules ---------------------------------------------------------------------------------

NO_BIASES = {"qkv_bias": False, "out_bias": False}
SQUARE = AttentionSpec(24, 4)  # heads of 6
CROSS = AttentionSpec(10, 4, head_dim=3, d_in=18, d_kv=15)  # all sizes differ
GROUPED = AttentionSpec(
    10, 6, num_kv_heads=2, head_dim=4, d_in=18, d_kv=15
)  # 6, 2, and 3 heads per group
LLAMA = AttentionSpec(30, 6, num_kv_heads=2, head_dim=4, rope=Rope(THETA))
ROPE = AttentionSpec(24, 6, rope=Rope(THETA))  # heads of 4
ROPE_GROUPED = replace(ROPE, num_kv_heads=2)


def variants(name: str, foreign: Foreign) -> dict[str, Foreign]:
    """Return a module with biases and one without."""
    return {
        name: foreign,
        f"{name}-no-biases": replace(foreign, spec=replace(foreign.spec, **NO_BIASES)),
    }


MODULES = {
    **variants("torch", of_adapter("torch.nn.MultiheadAttention", SQUARE, of_in_proj)),
    **variants(
        "torch-split", of_adapter("torch.nn.MultiheadAttention", replace(SQUARE, d_kv=15), OF_SPLIT)
    ),
    **variants("nnx", of_adapter("flax.nnx.MultiHeadAttention", GROUPED, of_kernels("out"))),
    **variants(
        "linen", of_adapter("flax.linen.MultiHeadDotProductAttention", CROSS, of_kernels("out"))
    ),
    **variants(
        "keras",
        of_adapter("keras.layers.MultiHeadAttention", CROSS, of_kernels("attention_output")),
    ),
    **variants(
        "keras-gqa",
        of_adapter(
            "keras.layers.GroupQueryAttention",
            replace(GROUPED, d_model=18),
            of_kernels("attention_output"),
        ),
    ),
    **variants("equinox", of_adapter("equinox.nn.MultiheadAttention", CROSS, OF_EQUINOX)),
    "equinox-out-bias": of_adapter(
        "equinox.nn.MultiheadAttention", replace(CROSS, qkv_bias=False), OF_EQUINOX
    ),
    "qkv_proj": Foreign(
        "qkv_proj",
        AttentionSpec(10, 6, num_kv_heads=2, head_dim=4, d_in=18, fused_qkv=True),
        TORCH,
        make_sibling,
        run_sibling,
        of_qkv_proj,
        is_cross=True,
    ),
    "bert": Foreign(
        "transformers.BERT",
        SQUARE,
        TORCH,
        maker(BertAttention, transformers.BertConfig),
        run_bert,
        OF_BERT,
        others=r"output\.LayerNorm\.",
    ),
    **{
        name: Foreign(
            "transformers.ViT-5",
            spec,
            TORCH,
            maker(ViTAttention, transformers.ViTConfig, qkv_bias=lambda spec: spec.qkv_bias),
            run_vit,
            OF_LLAMA,
        )
        for name, spec in (("vit", SQUARE), ("vit-out-bias", replace(SQUARE, qkv_bias=False)))
    },
    "gpt2": Foreign(
        "transformers.GPT2",
        SQUARE,
        TORCH,
        maker(GPT2Attention, transformers.GPT2Config, widths=("n_embd", "n_head")),
        runner(),
        of_conv1d,
        is_causal=True,
    ),
    **variants(
        "neox",
        Foreign(
            "transformers.GPT-NeoX",
            ROPE,
            TORCH,
            MAKE_NEOX,
            runner(GPTNeoXRotaryEmbedding),
            of_groups,
            is_causal=True,
        ),
    ),
    **variants(
        "falcon-groups",
        Foreign(
            "transformers.Falcon",
            ROPE_GROUPED,
            TORCH,
            MAKE_FALCON["groups"],
            RUN_FALCON,
            of_groups,
            is_causal=True,
        ),
    ),
    **variants(
        "falcon-one",
        Foreign(
            "transformers.Falcon",
            replace(ROPE, num_kv_heads=1),
            TORCH,
            MAKE_FALCON["one"],
            RUN_FALCON,
            of_groups,
            is_causal=True,
        ),
    ),
    **variants(
        "falcon-none",
        Foreign(
            "transformers.Falcon",
            ROPE,
            TORCH,
            MAKE_FALCON["none"],
            RUN_FALCON,
            of_groups,
            is_causal=True,
        ),
    ),
    **variants(
        "llama",
        Foreign(
            "transformers.LLaMA",
            LLAMA,
            TORCH,
            MAKE_LLAMA,
            runner(LlamaRotaryEmbedding),
            OF_LLAMA,
            is_causal=True,
        ),
    ),
    "mistral": Foreign(
        "transformers.LLaMA",
        replace(LLAMA, **NO_BIASES),
        TORCH,
        llama(MistralAttention, transformers.MistralConfig, sliding_window=None),
        runner(MistralRotaryEmbedding),
        OF_LLAMA,
        is_causal=True,
    ),
    "qwen2": Foreign(
        "transformers.LLaMA",
        replace(ROPE_GROUPED, out_bias=False),
        TORCH,
        maker(
            Qwen2Attention,
            transformers.Qwen2Config,
            num_key_value_heads=groups,
            rope_parameters=rope,
        ),
        runner(Qwen2RotaryEmbedding),
        OF_LLAMA,
        is_causal=True,
    ),
}

# Meta's own module is not in any package. LLaMA 4 in transformers has the same rotation, of pairs
# (2 i, 2 i + 1) as complex numbers, but different layer names.
MODULES |= {
    name: Foreign(
        layout,
        replace(LLAMA, **NO_BIASES),
        renamed(dict(zip(("q_proj", "k_proj", "v_proj", "o_proj"), layers, strict=True))),
        llama(
            Llama4TextAttention,
            transformers.Llama4TextConfig,
            attention_bias=False,
            use_qk_norm=False,
            attn_temperature_tuning=False,
            no_rope_layers=[1],
            num_hidden_layers=1,
        ),
        runner(Llama4TextRotaryEmbedding),
        of_linears(*(f"{layer}.weight" for layer in layers)),
        is_causal=True,
    )
    for name, layout, layers in (
        ("meta", "meta.LLaMA", ("wq", "wk", "wv", "wo")),
        ("gguf", "gguf.LLaMA", ("attn_q", "attn_k", "attn_v", "attn_output")),
    )
}

every_module = pytest.mark.parametrize("foreign", MODULES.values(), ids=list(MODULES))


# ---- Canonical -> module, module -> canonical ----------------------------------------------------


def output_of(foreign, module, inputs):
    """Return the module's output for the inputs of its case."""
    query = inputs["query"]
    with torch.no_grad():
        output = foreign.run(module, query, inputs.get("key", query))
    return output.numpy() if isinstance(output, torch.Tensor) else np.asarray(output)


def verdict(foreign, weights, run):
    """Compare the module's output with the reference for these canonical weights."""
    problem = make_problem(foreign.case, "float32", weights)
    reference = Reference(problem)
    return compare(
        run(problem.inputs),
        reference.accumulated["output"],
        reference.same_precision(local=False)["output"],
        Label(foreign.layout, "module", "float32", "output"),
    )


def filled(foreign, weights, layout=None):
    """Return the module with canonical weights."""
    module = foreign.make(foreign.spec)
    tensors = from_canonical(weights, foreign.spec, layout or LAYOUTS[foreign.layout])
    return foreign.library.write(module, foreign.others_of(module) | tensors)


@pytest.fixture
def own(foreign, rng):
    """Return the module with random parameters, biases included, under its own names and shapes."""
    module = foreign.make(foreign.spec)
    drawn = {
        name: rng.standard_normal(x.shape).astype(np.float32)
        * np.float32(0.3 if x.ndim > 1 else 1.0)
        for name, x in foreign.library.read(module).items()
    }
    return foreign.library.write(module, drawn)


@sample(8)
@every_module
def test_filled_module_matches_reference(foreign):
    """A module filled with converted canonical weights has the output of the reference."""
    weights = random_weights(foreign.spec, seed=1)
    module = filled(foreign, weights)
    result = verdict(foreign, weights, lambda inputs: output_of(foreign, module, inputs))
    assert result.passed, str(result)


@sample(8)
@every_module
def test_module_weights_match_in_reference(foreign, own):
    """The reference with weights read from a random module has the module's output."""
    weights, _ = to_canonical(
        foreign.library.read(own), LAYOUTS[foreign.layout], **undetermined_fields(foreign.spec)
    )
    result = verdict(foreign, weights, lambda inputs: output_of(foreign, own, inputs))
    assert result.passed, str(result)


@sample(8)
@every_module
def test_spec_is_read_from_module(foreign, own):
    """The specification read from a module's parameters is
    the original one, except for fused storage.
    """
    _, spec = to_canonical(
        foreign.library.read(own), LAYOUTS[foreign.layout], **undetermined_fields(foreign.spec)
    )
    assert spec == replace(foreign.spec, fused_qkv=False)


@sample(8)
@every_module
def test_module_weights_round_trip(foreign, own):
    """A module's parameters survive conversion to canonical weights and back, bit for bit."""
    tensors = foreign.library.read(own)
    weights, spec = to_canonical(
        tensors, LAYOUTS[foreign.layout], **undetermined_fields(foreign.spec)
    )
    back = foreign.others_of(own) | from_canonical(weights, spec, LAYOUTS[foreign.layout])
    assert {name: (x.dtype, x.shape, x.tobytes()) for name, x in back.items()} == {
        name: (x.dtype, x.shape, x.tobytes()) for name, x in tensors.items()
    }


@sample(8)
@pytest.mark.parametrize("projection", ["q", "k", "v", "out"])
@every_module
def test_heads_land_where_module_expects(foreign, projection):
    """Weights tagged by head are found where the module's
    source code reads that head, and nowhere else.
    """
    weights, tags = tagged(foreign.spec, projection)
    heads = foreign.heads(foreign.library.read(filled(foreign, weights)), foreign.spec)
    assert (heads.pop(projection) == tags).all()
    assert not any(others.any() for others in heads.values())


def tagged(spec, projection):
    """Return weights that are n + 1 in head n of the projection and 0 elsewhere, and these tags,
    heads first.
    """
    weights = {name: np.zeros_like(x) for name, x in random_weights(spec).items()}
    count = spec.num_kv_heads if projection in ("k", "v") else spec.num_heads
    tags = np.arange(1, count + 1, dtype=np.float32)
    features = np.repeat(tags, spec.head_dim)  # of all heads, concatenated
    weights[f"{projection}_proj.weight"] += features if projection == "out" else features[:, None]
    return weights, tags[:, None, None]


# ---- Control: wrong tables with which the shapes still fit
# -----------------------------------------------------------

TRANSPOSED = tuple(
    replace(tensor, axes="e (n h)") if tensor.name == "c_proj.weight" else tensor
    for tensor in LAYOUTS["transformers.GPT2"].forms[0]
)
WRONG = {
    "neox-thirds": ("neox", {"grouped": False}),
    "falcon-thirds": ("falcon-groups", {"grouped": False}),
    "torch-grouped": ("torch", {"grouped": True}),
    "llama-interleaved": ("llama", {"rope": "interleaved"}),
    "meta-half": ("meta", {"rope": "half"}),
    "gpt2-transposed": ("gpt2", {"forms": (TRANSPOSED,)}),
}


@pytest.mark.parametrize(("name", "change"), WRONG.values(), ids=list(WRONG))
def test_wrong_table_is_detected(name, change):
    """A wrong table of a layout with fitting shapes exceeds the tolerance by a factor of 1000."""
    foreign = MODULES[name]
    weights = random_weights(foreign.spec, seed=1)
    module = filled(foreign, weights, replace(LAYOUTS[foreign.layout], **change))
    result = verdict(foreign, weights, lambda inputs: output_of(foreign, module, inputs))
    assert result.ratio > 1000.0, str(result)


# ---- Modules with unsupported parameters ---------------------------------------------------------


def test_torch_key_and_value_biases_raise():
    """Weights of torch's `add_bias_kv` raise an error that names them."""
    module = torch.nn.MultiheadAttention(24, 4, add_bias_kv=True)
    with rejects("tensors", "unknown names ['bias_k', 'bias_v']"):
        to_canonical(read_torch(module), LAYOUTS["torch.nn.MultiheadAttention"], num_heads=4)


def test_torch_unequal_kv_widths_raise():
    """Keys and values of different input widths in torch raise an error about shapes."""
    module = torch.nn.MultiheadAttention(24, 4, kdim=15, vdim=9)
    with rejects("shapes"):
        to_canonical(read_torch(module), LAYOUTS["torch.nn.MultiheadAttention"], num_heads=4)


@pytest.mark.parametrize(
    ("name", "options", "input_error"),
    [
        (
            "flax.nnx.MultiHeadAttention",
            {"normalize_qk": True},
            rejects("tensors", "unknown names ['key_ln.scale', 'query_ln.scale']"),
        ),
        (
            "keras.layers.GroupQueryAttention",
            {"use_gate": True},
            rejects("tensors", "unknown names ['gate.bias', 'gate.kernel']"),
        ),
        (
            "keras.layers.MultiHeadAttention",
            {"value_dim": 5},
            rejects("shapes"),
        ),
        (
            "equinox.nn.MultiheadAttention",
            {"use_key_bias": False},
            rejects("q_proj, k_proj and v_proj", "['q_proj.bias', 'v_proj.bias']"),
        ),
    ],
)
def test_unsupported_library_features_raise(name, options, input_error):
    """Parameters of unsupported features in nnx, Keras and Equinox raise an error."""
    adapter = load_adapter(name)
    tensors = adapter.read(adapter.make(SQUARE, **options))
    with input_error:
        to_canonical(tensors, LAYOUTS[adapter.layout], num_heads=4)


# ---- Whole checkpoints ---------------------------------------------------------------------------

TINY = {
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "intermediate_size": 8,
    "vocab_size": 32,
}
BERT = transformers.BertConfig(**TINY)
GPT2 = transformers.GPT2Config(
    n_embd=24, n_head=6, n_layer=2, vocab_size=32, bos_token_id=0, eos_token_id=0
)
NEOX = transformers.GPTNeoXConfig(**TINY)
FALCON = transformers.FalconConfig(**TINY, new_decoder_architecture=True, num_kv_heads=2)
GROUPED_LLAMA = transformers.LlamaConfig(**TINY, num_key_value_heads=2)
VIT = transformers.ViTConfig(
    **{name: size for name, size in TINY.items() if name != "vocab_size"}, image_size=32
)

FILES = {
    "bert": (transformers.BertModel, BERT, "transformers.BERT"),
    "bert-lm": (transformers.BertForMaskedLM, BERT, "transformers.BERT"),
    "vit": (transformers.ViTModel, VIT, "transformers.ViT"),
    "vit-classes": (transformers.ViTForImageClassification, VIT, "transformers.ViT"),
    "gpt2": (transformers.GPT2Model, GPT2, "transformers.GPT2"),
    "gpt2-lm": (transformers.GPT2LMHeadModel, GPT2, "transformers.GPT2"),
    "neox": (transformers.GPTNeoXModel, NEOX, "transformers.GPT-NeoX"),
    "neox-lm": (transformers.GPTNeoXForCausalLM, NEOX, "transformers.GPT-NeoX"),
    "falcon": (transformers.FalconModel, FALCON, "transformers.Falcon"),
    "falcon-lm": (transformers.FalconForCausalLM, FALCON, "transformers.Falcon"),
    "llama": (transformers.LlamaModel, GROUPED_LLAMA, "transformers.LLaMA"),
    "llama-lm": (transformers.LlamaForCausalLM, GROUPED_LLAMA, "transformers.LLaMA"),
}


ENCODER, DECODER = (
    torch.nn.TransformerEncoderLayer(24, 6, batch_first=True),
    torch.nn.TransformerDecoderLayer(24, 6),
)


def layers_in(names, layout):
    """Return the prefixes of a layout, formatted for the second layer, that occur in the names."""
    prefixes = [prefix.format(i=1) + "." for prefix in layout.prefixes]
    return [prefix for prefix in prefixes if any(name.startswith(prefix) for name in names)]


def under(tensors, prefix):
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize(("model", "config", "name"), FILES.values(), ids=list(FILES))
def test_checkpoint_layer_has_one_prefix(tmp_path, model, config, name):
    """Exactly one prefix of a layout matches the second layer of
    a checkpoint, whose sizes are then read.
    """
    model(config).save_pretrained(tmp_path)
    tensors, _ = load_tensors(tmp_path / "model.safetensors")
    layout = LAYOUTS[name]
    (prefix,) = layers_in(tensors, layout)
    _, spec = to_canonical(under(tensors, prefix), layout, num_heads=6, head_dim=4)
    grouped = name in ("transformers.Falcon", "transformers.LLaMA")
    assert (spec.d_model, spec.num_heads, spec.num_kv_heads) == (24, 6, 2 if grouped else 6)


@pytest.mark.parametrize(
    ("model", "kind", "name"),
    [
        (transformers.ViTModel(VIT), ViTAttention, "transformers.ViT-5"),
        (transformers.ViTForImageClassification(VIT), ViTAttention, "transformers.ViT-5"),
        (
            torch.nn.TransformerEncoder(ENCODER, 2),
            torch.nn.MultiheadAttention,
            "torch.nn.MultiheadAttention",
        ),
        (
            torch.nn.TransformerDecoder(DECODER, 2),
            torch.nn.MultiheadAttention,
            "torch.nn.MultiheadAttention",
        ),
        (
            torch.nn.Transformer(24, 6, 2, 2, batch_first=True),
            torch.nn.MultiheadAttention,
            "torch.nn.MultiheadAttention",
        ),
    ],
    ids=["vit", "vit-classes", "encoder", "decoder", "both"],
)
def test_prefixes_cover_all_attention(model, kind, name):
    """Each attention module of a model is at a prefix of its layout."""
    paths = {path for path, part in model.named_modules() if isinstance(part, kind)}
    assert paths
    assert paths <= {prefix.format(i=i) for prefix in LAYOUTS[name].prefixes for i in range(2)}


def test_transformers_loads_converted_vit(tmp_path):
    """Transformers loads a ViT with converted weights without a
    report, and its layer has them bit for bit.
    """
    transformers.ViTModel(VIT).save_pretrained(tmp_path)
    tensors, metadata = load_tensors(tmp_path / "model.safetensors")
    spec = AttentionSpec(24, 6)
    weights = random_weights(spec, seed=1)
    converted = from_canonical(weights, spec, LAYOUTS["transformers.ViT"])
    (prefix,) = layers_in(tensors, LAYOUTS["transformers.ViT"])
    tensors |= {prefix + name: x for name, x in converted.items()}
    save_tensors(tmp_path / "model.safetensors", tensors, metadata)

    loaded, report = transformers.ViTModel.from_pretrained(tmp_path, output_loading_info=True)

    back, _ = to_canonical(
        read_torch(loaded.layers[1].attention), LAYOUTS["transformers.ViT-5"], num_heads=6
    )
    assert not any(report.values())
    assert {name: x.tobytes() for name, x in back.items()} == {
        name: x.tobytes() for name, x in weights.items()
    }
