"""Write small models as transformers saves them: the attention of Llama 3.2 1B and of OLMo-3 7B,
with random weights.

    python benchmarks/field/models.py FOLDER

The width of heads, RoPE and its scaling are as in the released configurations; everything else
is small, including OLMo's window, which 128 tokens exceed. Weights are larger than at the start of
training (0.1 instead of 0.02), so that attention is not uniform.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

SMALL = {"hidden_size": 256, "intermediate_size": 128, "vocab_size": 64, "initializer_range": 0.1}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def main() -> None:
    """Write the models, and the same Llama with old configuration keys, or a different RoPE."""
    folder = Path(sys.argv[1])
    llama = {
        **SMALL,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    save(
        transformers.LlamaConfig(**llama, rope_parameters={"rope_theta": 500000.0, **LLAMA3}),
        folder / "llama",
    )
    save(
        transformers.LlamaConfig(**llama, rope_parameters={"rope_theta": 500000.0}),
        folder / "llama-unscaled",
    )
    save(
        transformers.LlamaConfig(**llama, rope_parameters={"rope_theta": 1000000.0}),
        folder / "llama-unscaled-1e6",
    )
    copy_with_old_keys(folder / "llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3})
    olmo3 = transformers.Olmo3Config(
        **SMALL,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=65536,
        rms_norm_eps=1e-6,
        sliding_window=48,
        eos_token_id=1,
        rope_theta=500000.0,
        rope_scaling=YARN,
    )
    save(olmo3, folder / "olmo3")
    copy_with_old_keys(folder / "olmo3", {"rope_theta": 500000.0, "rope_scaling": YARN})


def save(config: transformers.PreTrainedConfig, folder: Path) -> None:
    """Save a model with random weights."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def copy_with_old_keys(folder: Path, rope: dict[str, Any]) -> None:
    """Copy a model, with its RoPE in the keys of transformers before version 5."""
    other = folder.with_name(f"{folder.name}-old-keys")
    shutil.copytree(folder, other, dirs_exist_ok=True)
    config_values = json.loads((folder / "config.json").read_text("utf-8"))
    del config_values["rope_parameters"]
    (other / "config.json").write_text(json.dumps(config_values | rope), "utf-8")


if __name__ == "__main__":
    main()
