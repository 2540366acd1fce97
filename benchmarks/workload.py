"""The standard workload's model folder: a shape's config, a word tokenizer, random adapters.

The tokenizer maps the word "tK" to token K, so a prompt of n words is n tokens. With --json the
last tokens are bytes, numbers and pieces of JSON instead, so that answers can be held to a
schema. The folder has no weights: serve it with `load_format: dummy`. Adapters that are there
already are kept, unless they are of another model or rank.
"""

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from benchmarks.spelled_json import json_tokenizer

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
    "gemma2-9b": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    "smollm3-8b": {
        **_LLAMA3,
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "no_rope_layers": [1] * 32,
        "pad_token_id": 0,
    },
    "qwen3-30b-a3b": {
        **_LLAMA3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "glm-4.7-flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "max_position_embeddings": 202752,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "llama-200m": {
        **_LLAMA3,
        "vocab_size": 2048,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "bos_token_id": 2046,
        "eos_token_id": 2047,
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
        "bos_token_id": 2046,
        "eos_token_id": 2047,
        "torch_dtype": "float32",
    },
}
"""config.json of each model shape that the benchmarks know; smollm3-8b is Llama 3's by another
class, which is paged through transformers' modules."""

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS: dict[str, tuple[str, ...]] = {"gemma2-9b": _ATTENTION, "qwen3-30b-a3b": _ATTENTION}
"""The linear maps that adapters change, by shape; all seven where it is not here."""

SMALL_RANK, SMALL_TARGETS = 4, ("q_proj", "v_proj")
"""The small adapters, of which there are very many."""

MIXED_RANKS = (8, 16, 32, 64)

INVOCATION = (5, 6)
"""The tokens that activate adapters of the kind "activated" (aLoRA)."""

EXPERT_PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERT_WRAPPERS = (".base_layer", "")
"""What PEFT puts between a layer's experts and the factors of each of these."""

KIND_LETTERS = {"dora": "d", "activated": "v", "experts": "e"}
"""What names of adapters of a kind begin with."""

WRITERS = 4
"""Threads that write adapters: each holds one in memory."""


def config_of(shape: str, layers: int | None = None) -> dict[str, Any]:
    """The config.json of a shape, of so many layers; None: its own."""
    config = SHAPES[shape]
    return config if layers is None else {**config, "num_hidden_layers": layers}


def is_model(folder: Path, shape: str, layers: int | None = None) -> bool:
    """Whether a model of this shape was written here, to its end."""
    config, last = folder / "config.json", folder / "tokenizer_config.json"
    is_there = config.is_file() and last.is_file()
    return is_there and bool(json.loads(config.read_text()) == config_of(shape, layers))


def write_model(
    folder: Path, shape: str, spells_json: bool = False, layers: int | None = None
) -> None:
    """Write config.json and the tokenizer of `shape`, of so many layers; None: its own."""
    config = config_of(shape, layers)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    ends = [config["bos_token_id"], config["eos_token_id"]]
    if spells_json:
        tokenizer = json_tokenizer(config["vocab_size"], ends)
    else:
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


def projection_sizes(shape: str) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each linear map of a layer."""
    return sizes_of(SHAPES[shape])


def sizes_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The same from a config.json."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if "kv_lora_rank" in config:
        return _latent_sizes(config)
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    return {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }


def _latent_sizes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Of attention over latents, alone: layers are mixtures of experts."""
    hidden, heads, queries = (
        config[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank")
    )
    latent, keys, rotated, values = (
        config[name]
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    return {
        "self_attn.q_a_proj": (hidden, queries),
        "self_attn.q_b_proj": (queries, heads * (keys + rotated)),
        "self_attn.kv_a_proj_with_mqa": (hidden, latent + rotated),
        "self_attn.kv_b_proj": (latent, heads * (keys + values)),
        "self_attn.o_proj": (heads * values, hidden),
    }


def expert_sizes(shape: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """(inputs, outputs) of gate and up together, and of down, of one routed expert."""
    config = SHAPES[shape]
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    return (hidden, 2 * inner), (inner, hidden)


def adapter_parameters(shape: str, rank: int, ranks: int = 1) -> int:
    """Numbers in A and B over all projections, on each of so many tensor-parallel ranks."""
    row_parallel = ("o_proj", "down_proj")
    per_row = 0
    for name, (inputs, outputs) in projection_sizes(shape).items():
        cuts_inputs = name.endswith(row_parallel)
        per_row += inputs // ranks + outputs if cuts_inputs else inputs + outputs // ranks
    layers: int = SHAPES[shape]["num_hidden_layers"]
    return layers * rank * per_row


def expert_parameters(shape: str, rank: int) -> int:
    """Numbers in A and B of gate, up and down of all routed experts; 0 for shapes without."""
    config = SHAPES[shape]
    if "num_experts" not in config:
        return 0
    widths = config["hidden_size"] + config["moe_intermediate_size"]
    count: int = config["num_hidden_layers"] * config["num_experts"] * rank * 3 * widths
    return count


def write_adapter(
    folder: Path, shape: str, rank: int, seed: int, targets: Sequence[str] = (), kind: str = ""
) -> None:
    """Write a random PEFT adapter, alpha = 2 * rank; targets: "q_proj", ...; () for its TARGETS.

    kind: "dora", "activated", "experts" (all routed experts besides), or plain LoRA.
    """
    targets = targets or TARGETS.get(shape, ())
    sizes = {
        name: size
        for name, size in projection_sizes(shape).items()
        if not targets or name.split(".")[-1] in targets
    }
    config = SHAPES[shape]
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
            if kind == "dora":
                tensors[f"{prefix}.lora_magnitude_vector"] = 1 + noise(outputs, std=0.1)
        if kind == "experts":
            prefix = f"base_model.model.model.layers.{layer}.mlp.experts"
            for path, (inputs, outputs) in zip(EXPERT_WRAPPERS, expert_sizes(shape), strict=True):
                rows = config["num_experts"] * rank
                tensors[f"{prefix}{path}.lora_A.weight"] = noise(rows, inputs, std=inputs**-0.5)
                tensors[f"{prefix}{path}.lora_B.weight"] = noise(outputs, rows, std=0.02)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": shape,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [name.split(".")[-1] for name in sizes],
        "bias": "none",
        "use_dora": kind == "dora",
        "alora_invocation_tokens": list(INVOCATION) if kind == "activated" else None,
        "target_parameters": EXPERT_PARAMETERS if kind == "experts" else None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(description))


@dataclass(frozen=True)
class WorkloadRecipe:
    """One adapter to be written; targets and kind as in write_adapter."""

    name: str
    rank: int
    seed: int
    targets: tuple[str, ...] = ()
    kind: str = ""


def recipes(
    plain: int,
    mixed: int,
    small: int,
    ranks: Sequence[int] = (16,),
    dora: int = 0,
    activated: int = 0,
    experts: int = 0,
) -> list[WorkloadRecipe]:
    """a0, ... of `ranks` in rotation; m0, ... of MIXED_RANKS in rotation; s0, ... small ones.

    d0, ...: DoRA, v0, ...: activated LoRA, e0, ...: of experts too, all of the first of `ranks`.
    """
    found = [WorkloadRecipe(f"a{i}", ranks[i % len(ranks)], i) for i in range(plain)]
    kinds = len(MIXED_RANKS)
    found += [WorkloadRecipe(f"m{i}", MIXED_RANKS[i % kinds], 2_000_000 + i) for i in range(mixed)]
    found += [
        WorkloadRecipe(f"s{i}", SMALL_RANK, 1_000_000 + i, SMALL_TARGETS) for i in range(small)
    ]
    for kind, count in (("dora", dora), ("activated", activated), ("experts", experts)):
        letter = KIND_LETTERS[kind]
        found += [
            WorkloadRecipe(f"{letter}{i}", ranks[0], 3_000_000 + i, (), kind) for i in range(count)
        ]
    return found


def is_written(folder: Path, shape: str, rank: int) -> bool:
    """Whether an adapter for this shape, of this rank, is there; its config is written last."""
    config = folder / "adapter_config.json"
    if not config.is_file():
        return False
    found = json.loads(config.read_text())
    return (found.get("base_model_name_or_path"), found["r"]) == (shape, rank)


def write_adapters(folder: Path, shape: str, wanted: Sequence[WorkloadRecipe]) -> int:
    """Write those that are missing into subfolders of `folder`; returns how many."""
    missing = [each for each in wanted if not is_written(folder / each.name, shape, each.rank)]

    def write(each: WorkloadRecipe) -> None:
        write_adapter(folder / each.name, shape, each.rank, each.seed, each.targets, each.kind)

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, missing))
    return len(missing)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a model folder and adapters in its subfolder `adapters`.

    a0, a1, ... are over all projections, m0, m1, ... too, of ranks 8, 16, 32, 64 in rotation; s0,
    s1, ... of rank 4 over q_proj and v_proj; d0, d1, ... are DoRA, v0, v1, ... activated LoRA, e0,
    e1, ... are over all routed experts too.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16], help="used in rotation")
    parser.add_argument("--mixed-adapters", type=int, default=0)
    parser.add_argument("--small-adapters", type=int, default=0)
    parser.add_argument("--dora-adapters", type=int, default=0)
    parser.add_argument("--activated-adapters", type=int, default=0)
    parser.add_argument("--expert-adapters", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="a tokenizer that can spell JSON")
    parsed = parser.parse_args(arguments)
    write_model(parsed.folder, parsed.shape, parsed.json)
    counts = parsed.adapters, parsed.mixed_adapters, parsed.small_adapters
    kinds = parsed.dora_adapters, parsed.activated_adapters, parsed.expert_adapters
    wanted = recipes(*counts, parsed.ranks, *kinds)
    written = write_adapters(parsed.folder / "adapters", parsed.shape, wanted)
    print(f"{written} adapters written, {len(wanted) - written} were there")


if __name__ == "__main__":
    main()
