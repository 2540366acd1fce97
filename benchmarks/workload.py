"""The standard workload's model folder: a shape's config, a word tokenizer, random adapters.

The tokenizer maps the word "tK" to token K, so a prompt of n words is n tokens. The folder has
no weights: serve it with `load_format: dummy`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

_LLAMA3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "llama3-70b": {
        **_LLAMA3,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        **_LLAMA3,
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    },
}
"""config.json of each model shape that the benchmarks know."""


def write_model(folder: Path, shape: str) -> None:
    """Write config.json and the tokenizer of `shape`."""
    config = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {f"t{i}": i for i in range(config["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": f"t{config['bos_token_id']}",
        "eos_token": f"t{config['eos_token_id']}",
        "model_max_length": config["max_position_embeddings"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_adapter(folder: Path, shape: str, rank: int, seed: int) -> None:
    """Write a random PEFT adapter over all seven projections, alpha = 2 * rank."""
    config = SHAPES[shape]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    sizes = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)

    def noise(*shape: int, std: float) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, device=device) * std
        return values.to(torch.bfloat16).cpu()

    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = noise(rank, inputs, std=inputs**-0.5)
            tensors[f"{prefix}.lora_B.weight"] = noise(outputs, rank, std=0.02)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [name.split(".")[-1] for name in sizes],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(description))


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a model folder and adapters a0, a1, ... in its subfolder `adapters`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16], help="used by turns")
    parsed = parser.parse_args(arguments)
    write_model(parsed.folder, parsed.shape)
    for i in range(parsed.adapters):
        rank = parsed.ranks[i % len(parsed.ranks)]
        write_adapter(parsed.folder / "adapters" / f"a{i}", parsed.shape, rank, i)


if __name__ == "__main__":
    main()
