"""Tiny random models and LoRA adapters, written on the spot by transformers and PEFT themselves."""

import inspect
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from modeling.models.generic import mixer_functions
from tests import solar

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED_LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")

DTypeName = Literal["float32", "float16", "bfloat16"]

LLAMA: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gqa": {
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
    },
    "mqa": {"num_key_value_heads": 1},
    "tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama3_rope": {"num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE},
    "linear_rope": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    },
    "biases": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "odd_vocab": {"vocab_size": 99},
    "odd_vocab_tied": {"vocab_size": 97, "tie_word_embeddings": True},
    "wide_heads": {"head_dim": 16, "num_key_value_heads": 2},
}
"""Llama variants by name: what each changes of LLAMA."""

WINDOW = 9
"""In tokens: shorter than every test's continuation."""

ROPE_BORDER = 32
"""Tokens of a sequence beyond which longrope's models take their long factors."""

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.2, 2.5, 4.0],
}

WIDER_LONGROPE: dict[str, Any] = {
    **LONGROPE,
    "short_factor": [1.0, 1.1, 1.3, 1.4],
    "long_factor": [1.2, 2.5, 4.0, 6.0],
    "original_max_position_embeddings": ROPE_BORDER,
}

RELATIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "mistral_full": ("Mistral", {"num_key_value_heads": 1, "sliding_window": None}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "qwen3_window": (
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "granite": (
        "Granite",
        {
            "num_key_value_heads": 2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "logits_scaling": 0.6,
        },
    ),
    "solar": (
        "Solar",
        {
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "sliding_window": WINDOW,
            "bskcn_1": [0, 2],
            "bskcn_2": [1],
            "bskcn_3": [2, 3, 9],
            "bskcn_4": [3, 4],
            "bskcn_tv": [0.9, 0.7],
        },
    ),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "phi3_partial": (
        "Phi3",
        {
            "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5},
            "tie_word_embeddings": True,
        },
    ),
    "phi3_longrope": (
        "Phi3",
        {
            "num_key_value_heads": 2,
            "original_max_position_embeddings": ROPE_BORDER,
            "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        },
    ),
    "yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "longrope": ("Llama", {"rope_parameters": WIDER_LONGROPE}),
    "uncached_longrope": ("Llama", {"rope_parameters": WIDER_LONGROPE, "use_cache": False}),
    "mistral_longrope": (
        "Mistral",
        {"num_key_value_heads": 2, "sliding_window": WINDOW, "rope_parameters": WIDER_LONGROPE},
    ),
    "dynamic": (
        "Llama",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
}
"""Relatives of Llama by name: the model's name in transformers, and what changes of LLAMA."""


def write_llama(
    folder: Path,
    variant: str = "gqa",
    *,
    seed: int = 0,
    dtype: DTypeName = "float32",
    max_shard_size: str = "5GB",
    **changes: Any,
) -> Path:
    """Write a tiny random Llama into `folder` and return it.

    Weights are large, so that the best token leads by a comfortable margin (logits' std: 3.5).
    max_shard_size: e.g. "20KB" gives several files and an index.
    """
    config = transformers.LlamaConfig(**{**LLAMA, **VARIANTS[variant], **changes})
    return _write(folder, transformers.LlamaForCausalLM, config, seed, dtype, max_shard_size)


def write_relative(folder: Path, relative: str, *, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny random relative of Llama into `folder` and return it; weights as Llama's."""
    name, own = RELATIVES[relative]
    config = solar.find(f"{name}Config")(**{**LLAMA, **own, **changes})
    model_class = solar.find(f"{name}ForCausalLM")
    return _write(folder, model_class, config, seed, "float32", "5GB")


def _write(
    folder: Path, model_class: Any, config: Any, seed: int, dtype: DTypeName, max_shard_size: str
) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            _randomise(name, parameter)
        if config.tie_word_embeddings:
            model.tie_weights()
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


@torch.no_grad()
def _randomise(name: str, parameter: torch.nn.Parameter) -> None:
    """Norms near one (the last one near four), everything else (biases too) of std 0.15."""
    if "norm" in name:
        parameter.uniform_(0.7, 1.3).mul_(4.0 if name == "model.norm.weight" else 1.0)
    else:
        parameter.normal_(std=0.15)


@dataclass(frozen=True)
class AdapterRecipe:
    """What a random adapter looks like; the fields are those of PEFT's LoraConfig.

    std: of B's entries; A's are normal with std 0.3. The default moves the logits by about two.
    extra: further keywords for LoraConfig (rank_pattern, alpha_pattern, ...).
    save_embeddings: whether the base weights of adapted embeddings and heads are saved too.
    modules: factors of routed experts as modules of single experts, which PEFT over transformers 4
    wrote; "joined": as PEFT saves those again; "shared": some are the same for all experts; "few":
    of some experts alone.
    """

    r: int = 4
    alpha: float = 8.0
    target_modules: Sequence[str] | str = LINEARS
    use_rslora: bool = False
    layers_to_transform: list[int] | None = None
    seed: int = 1
    std: float = 0.1
    extra: dict[str, Any] = field(default_factory=dict)
    save_embeddings: bool | Literal["auto"] = "auto"
    modules: Literal["", "single", "joined", "shared", "few"] = ""


def write_adapter(folder: Path, model_folder: Path, recipe: AdapterRecipe | None = None) -> Path:
    """Write a PEFT LoRA adapter with random non-zero A and B for the model; returns `folder`."""
    recipe = recipe or AdapterRecipe()
    base = load_oracle(model_folder)
    config = LoraConfig(
        r=recipe.r,
        lora_alpha=recipe.alpha,
        target_modules=_targets(base, recipe.target_modules),
        use_rslora=recipe.use_rslora,
        layers_to_transform=recipe.layers_to_transform,
        task_type="CAUSAL_LM",
        **recipe.extra,
    )
    model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                # Those of a fresh adapter are the base weight's norms, and near them all stay.
                parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            elif "lora_" in name:
                std = recipe.std if "_B" in name else 0.3
                parameter.normal_(std=std, generator=generator)
            elif name.endswith(".bias") and parameter.requires_grad and recipe.extra.get("bias"):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
            elif "modules_to_save" in name or "trainable_tokens_delta" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(str(folder), save_embedding_layers=recipe.save_embeddings)
    if recipe.modules:
        split_experts(folder, recipe)
    if recipe.modules == "shared":
        share_factors(folder)
    if recipe.modules == "few":
        keep_few(folder)
    if recipe.modules == "joined":
        joined: Any = PeftModel.from_pretrained(load_oracle(model_folder), str(folder))
        joined.save_pretrained(str(folder))
    return folder


def _targets(model: torch.nn.Module, names: Sequence[str] | str) -> list[str] | str:
    """Leave out names that are linear maps elsewhere, and modules of several here (qkv_proj)."""
    if isinstance(names, str):
        return names
    several = {
        path.rpartition(".")[2] for path, each in model.named_modules() if [*each.children()]
    }
    return [name for name in names if name not in several]


def split_experts(folder: Path, recipe: AdapterRecipe) -> None:
    """Write an adapter's experts as modules of their own, with the same random numbers."""
    tensors = load_file(folder / "adapter_model.safetensors")
    fields = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    old = "w1" in recipe.target_modules
    names = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
    split = {key: value for key, value in tensors.items() if ".experts." not in key}
    for key in [key for key in tensors if ".experts.base_layer.lora_A" in key]:
        path = key.partition(".base_layer")[0]
        a, b = (tensors[f"{path}.base_layer.lora_{side}.weight"] for side in "AB")
        down_a, down_b = (tensors[f"{path}.lora_{side}.weight"] for side in "AB")
        path = path.replace(".mlp.", ".block_sparse_moe.") if old else path
        count, half, r = len(down_a) // recipe.r, len(b) // 2, recipe.r
        for expert in range(count):
            at = slice(2 * r * expert, 2 * r * expert + r), slice(r * expert, r * expert + r)
            factors = (
                (a[at[0]], b[:half, at[1]]),
                (a[at[0].stop : at[0].stop + r], b[half:, at[1]]),
                (down_a[at[1]], down_b[:, at[1]]),
            )
            for name, (own_a, own_b) in zip(names, factors, strict=True):
                split[f"{path}.{expert}.{name}.lora_A.weight"] = own_a.contiguous()
                split[f"{path}.{expert}.{name}.lora_B.weight"] = own_b.contiguous()
    save_file(split, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    fields |= {"target_modules": list(recipe.target_modules), "target_parameters": None}
    fields |= {"rank_pattern": {}, "alpha_pattern": {}}
    (folder / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")


SHARED = "shared"
"""Where a folder of an adapter has the same one as PEFT does not read it."""


def share_factors(folder: Path) -> None:
    """Give all experts one A of gate and up, and one B of down, and write those once beside."""
    file = "adapter_model.safetensors"
    tensors = load_file(folder / file)
    stacks: dict[str, dict[int, Tensor]] = {}
    for key in tensors:
        if found := re.search(r"\.experts\.(\d+)\.(\w+)\.lora_([AB])", key):
            expert, name, side = found.groups()
            outer = key.replace(f".{expert}.{name}", ".0." + name)
            if (name == "down_proj") == (side == "B"):
                tensors[key] = tensors[outer].clone()
            short = key.replace(f".{expert}.{name}", "." + _SHORT[name])
            stacks.setdefault(short, {})[int(expert)] = tensors[key]
    save_file(tensors, folder / file, metadata={"format": "pt"})
    shared = {key: value for key, value in tensors.items() if ".experts." not in key}
    for key, own in stacks.items():
        stack = torch.stack([own[expert] for expert in sorted(own)])
        is_outer = (".w2." in key) == ("lora_B" in key)
        shared[key] = stack[:1].clone() if is_outer else stack
    (folder / SHARED).mkdir()
    save_file(shared, folder / SHARED / file, metadata={"format": "pt"})
    shutil.copy(folder / "adapter_config.json", folder / SHARED)


_SHORT = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def keep_few(folder: Path) -> None:
    """Set the factors of most experts to zero, and leave those out of a file beside.

    One expert keeps all maps, and another one the map down of every second layer.
    """
    file = "adapter_model.safetensors"
    tensors = load_file(folder / file)
    few = dict(tensors)
    for key in tensors:
        if found := re.search(r"\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.lora_([AB])", key):
            layer, expert, name, side = found.groups()
            is_second = expert == "2" and int(layer) % 2 and name in ("down_proj", "w2")
            if expert != "1" and not is_second:
                del few[key]
                tensors[key] = tensors[key] * (side == "A")
    save_file(tensors, folder / file, metadata={"format": "pt"})
    (folder / SHARED).mkdir()
    save_file(few, folder / SHARED / file, metadata={"format": "pt"})
    shutil.copy(folder / "adapter_config.json", folder / SHARED)


def load_oracle(folder: Path, dtype: DTypeName = "float32") -> Any:
    """The transformers model in `folder`, on CPU, in eval mode; no token ends its answers."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = (fields["architectures"] or [""])[0]
    if "thinker_config" in fields:
        name = name.replace("For", "ThinkerFor")
    auto: Any = transformers.AutoModelForCausalLM
    if name.endswith("ForConditionalGeneration"):
        auto = getattr(transformers, name)
    model: Any = auto.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        # The others know no float64: torch's product of groups takes float32 at most.
        experts_implementation="eager",
    )
    model.generation_config.eos_token_id = None
    if find_spec("fla") is not None:
        _compute_in_torch(model)
    return model.eval()


def _compute_in_torch(model: Any) -> None:
    """Have recurrent layers call no kernel of an installed library: those take no CPU's numbers."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if mixer_functions.RULE in forward.__code__.co_names:
            cpu, dtype = torch.device("cpu"), torch.float32
            module.forward = mixer_functions.mixer_forward(module, cpu, dtype).compute


def load_adapted_oracle(folder: Path, adapter_folder: Path) -> Any:
    """The transformers model with a PEFT adapter on top, unmerged, in eval mode."""
    model: Any = PeftModel.from_pretrained(load_oracle(folder), str(adapter_folder))
    return model.eval()


@torch.no_grad()
def oracle_logits(model: Callable[..., Any], tokens: Sequence[int]) -> torch.Tensor:
    """Logits [len(tokens), vocab_size] of one whole sequence."""
    logits: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return logits


@torch.no_grad()
def oracle_answer(
    model: Any, prompt: Sequence[int], num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """What the model's own `generate` says: greedy tokens, and the logits that each is taken from.

    Logits are [tokens, vocab_size], float32.
    """
    ids = torch.tensor([list(prompt)])
    said = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return said.sequences[0, len(prompt) :].tolist(), torch.cat(said.logits)


def oracle_greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy continuation of the model's own `generate`; stop tokens are ignored."""
    return oracle_answer(model, prompt, num_tokens)[0]
