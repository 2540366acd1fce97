"""What the offline benchmark runs on: random models and adapters that need no download."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from configs.engine import (
    AdaptersConfig,
    AttentionBackend,
    CacheConfig,
    Device,
    EngineConfig,
    LimitsConfig,
)
from configs.model import DType, LoadFormat, ModelConfig

SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "rope_theta": 10000.0,
    },
}
RANK = 16


def engine_config(options: argparse.Namespace, model: Path) -> EngineConfig:
    """The engine that the command line asks for."""
    count = max(options.adapters)
    pages = -(-RANK // 8) * max(count, 1)
    return EngineConfig(
        model=ModelConfig(id=str(model), load_format=LoadFormat.DUMMY, dtype=DType(options.dtype)),
        device=Device(options.device),
        attention=AttentionBackend(options.attention),
        cpu_threads=2,
        cache=CacheConfig(
            block_size=options.block_size,
            num_blocks=options.num_blocks,
            device_memory_fraction=0.85,
        ),
        limits=LimitsConfig(
            max_step_tokens=options.max_step_tokens,
            max_running=max(options.batches),
            max_total_tokens=options.max_total_tokens,
        ),
        adapters=AdaptersConfig(
            enabled=count > 0,
            device_pages=pages,
            max_device_adapters=max(count, 1),
            max_rank=RANK,
        ),
    )


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    """A Llama's config.json; weights are made when it is loaded."""
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **shape,
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_adapter(folder: Path, shape: dict[str, Any]) -> None:
    """A PEFT adapter of all seven projections with random factors."""
    folder.mkdir(parents=True)
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    tensors = {}
    for layer in range(shape["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a = torch.randn(RANK, inputs) * 0.02
            b = torch.randn(outputs, RANK) * 0.02
            tensors[f"{prefix}.lora_A.weight"] = a.to(torch.bfloat16)
            tensors[f"{prefix}.lora_B.weight"] = b.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": sorted(name.rsplit(".", 1)[1] for name in sizes),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
