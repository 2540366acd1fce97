"""Odd configs that PEFT itself saves: served as PEFT computes them, or refused by the field's name.

Every field of LoraConfig is in some case, or is named with the reason why not.
"""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import config as lora

from configs.adapters import AdaptersConfig
from configs.wire.adapters import AdapterError
from configs.wire.sampling import Sampling
from modeling.adapters.peft.folder import open_adapter
from modeling.runner.adapter_check import adaptable
from modeling.runner.load_paged import load_paged
from sharding.group import SingleRank
from tests.checkpoints import load_oracle, write_llama
from tests.checkpoints_others import write_gpt2
from tests.modeling.parity.comparison import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    engine_config,
    full_logprobs,
    place_all,
    poison,
)
from tests.modeling.stepping import Asked, generate
from tests.oracle import NUM_TOKENS, TOLERANCE, prompt_truth

TARGETS = ["q_proj", "down_proj"]

SERVED: dict[str, dict[str, Any]] = {
    "a regex": {"target_modules": r".*\.(q_proj|mlp\.(up|down)_proj)"},
    "all linear": {"target_modules": "all-linear", "lora_alpha": 3.7},
    "paths": {"target_modules": ["layers.1.self_attn.q_proj", "mlp.up_proj"]},
    "all but some": {
        "target_modules": "all-linear",
        "exclude_modules": ["k_proj", "layers.0.mlp.up_proj"],
    },
    "all but a regex": {"exclude_modules": r".*layers\.0\..*"},
    "one layer": {"layers_to_transform": 1},
    "layers of a list": {"layers_to_transform": [0], "layers_pattern": ["layers", "h"]},
    "layers of a name": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "patterns that overlap": {
        "rank_pattern": {r"model.layers.0.*q_proj": 3, "down_proj": 9, "q_proj": 5},
        "alpha_pattern": {r"^model.layers.1.mlp.down_proj": 7, r".*\.0\..*": 1.5},
    },
    "rank-stabilised": {"use_rslora": True, "rank_pattern": {"q_proj": 7}},
    "inits": {"init_lora_weights": "gaussian", "lora_dropout": 0.4},
    "orthogonal": {"init_lora_weights": "orthogonal", "task_type": None},
    "eva": {"init_lora_weights": "eva", "eva_config": lora.EvaConfig()},
    "mica": {"init_lora_weights": "mica", "inference_mode": True},
    "weights lie otherwise": {"fan_in_fan_out": True, "base_model_name_or_path": "somewhere"},
    "configs of other inits": {
        "corda_config": lora.CordaConfig(),
        "loftq_config": {"loftq_bits": 4},
        "lora_ga_config": lora.LoraGAConfig(),
    },
    "how it ran": {"runtime_config": lora.LoraRuntimeConfig(ephemeral_gpu_offload=True)},
    "a group size alone": {"qalora_group_size": 4, "megatron_core": "x", "revision": "main"},
    "dora": {"use_dora": True, "rank_pattern": {"q_proj": 8}},
    "dora of one layer": {"use_dora": True, "layers_to_transform": 1},
    "no biases to train": {"bias": "all"},
    "a bias of B": {"lora_bias": True},
    "no ends to tie": {"ensure_weight_tying": True, "modules_to_save": []},
    "bare parameters": {
        "target_parameters": ["mlp.up_proj.weight", "1.self_attn.k_proj.weight"],
        # PEFT compares a parameter's whole path with patterns, and nothing else with its name.
        "rank_pattern": {"up_proj": 7, "k_proj.weight": 3},
        "layers_to_transform": 0,
        "exclude_modules": ["k_proj"],
    },
    "whole norms": {"modules_to_save": ["norm", "router"]},
    "all at once": {
        "use_dora": True,
        "use_rslora": True,
        "rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.down_proj": 2},
        "alpha_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 21},
        "layers_to_transform": [1],
        "modules_to_save": ["norm"],
        "trainable_token_indices": {"embed_tokens": [5, 9, 33]},
    },
    "bare parameters beside norms": {
        "target_parameters": ["mlp.up_proj.weight"],
        "target_modules": ["q_proj"],
        "modules_to_save": ["input_layernorm"],
        "use_rslora": True,
    },
    "another backward pass": {"velora_config": lora.VeloraConfig(num_groups=4, init_type="random")},
}
"""Changes of a plain config whose results are PEFT's."""

REFUSED: dict[str, dict[str, Any]] = {
    "use_qalora": {"use_qalora": True, "qalora_group_size": 4},
    "layer_replication": {"layer_replication": [[0, 2], [1, 2]]},
    "init_lora_weights='pissa'": {"init_lora_weights": "pissa"},
    "init_lora_weights='pissa_niter_4'": {"init_lora_weights": "pissa_niter_4"},
    "init_lora_weights='olora'": {"init_lora_weights": "olora"},
    "modules_to_save names .*up_proj": {
        "modules_to_save": ["up_proj"],
        "target_modules": ["q_proj"],
    },
    "modules_to_save=.*lm_head": {"modules_to_save": ["lm_head"]},
    "kasa_config": {"kasa_config": lora.KasaConfig()},
    "monteclora_config": {"monteclora_config": lora.MontecloraConfig()},
    "use_bdlora": {
        "use_bdlora": lora.BdLoraConfig(
            target_modules_bd_a=["down_proj"], target_modules_bd_b=["q_proj"], nblocks=2
        )
    },
    "adapts the vocabulary": {"target_modules": ["embed_tokens"]},
}
"""By what the refusal says."""

UNTRIED = {
    "peft_type": "others are tried below",
    "auto_mapping": "PEFT sets it",
    "peft_version": "PEFT sets it",
    "r": "every adapter has one",
    "megatron_config": "needs Megatron",
    "alora_invocation_tokens": "tests/modeling/parity/test_activated.py",
    "arrow_config": "PEFT refuses it without adapters to route to",
}

OTHERS: dict[str, Any] = {
    "LOHA": peft.LoHaConfig(r=4, target_modules=TARGETS),
    "LOKR": peft.LoKrConfig(r=4, target_modules=TARGETS),
    "ADALORA": peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=TARGETS),
    "IA3": peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"]),
    "VERA": peft.VeraConfig(r=4, target_modules=["q_proj", "o_proj"]),
    "OFT": peft.OFTConfig(r=4, oft_block_size=0, target_modules=TARGETS),
    "PROMPT_TUNING": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


def save(folder: Path, model: Path, config: Any) -> Path:
    """Let PEFT save an adapter of random factors; what it warns of is its own concern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(load_oracle(model), config)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
                elif "lora_" in name:
                    std = 0.2 if "lora_B" in name else 0.3
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
                elif "modules_to_save" in name or "trainable_tokens_delta" in name:
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        adapted.save_pretrained(str(folder))
    return folder


def plain(**changes: Any) -> LoraConfig:
    fields = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LoraConfig(**{**fields, **changes})


def check_served(model: Path, folders: list[Path], trained_on: Path | None = None) -> None:
    """All in one batch: tokens and logprobs are PEFT's.

    trained_on: another checkpoint of the same weights, over which PEFT computes.
    """
    oracle = trained_on or model
    told = [prompt_truth(oracle, folder, 5 + i % 7) for i, folder in enumerate(folders)]
    config = engine_config(model)
    slots = {"max_device_adapters": len(folders), "device_pages": 4 * len(folders)}
    adapters = config.adapters.model_copy(update=slots)
    limits = config.limits.model_copy(update={"max_running": len(folders)})
    cache = config.cache.model_copy(update={"num_blocks": 4 * NUM_BLOCKS})
    config = config.model_copy(update={"adapters": adapters, "limits": limits, "cache": cache})
    runner = load_paged(config, SingleRank(), torch.device("cpu")).allocate()
    poison(runner)
    place_all(runner, folders)
    everything = Sampling(logprobs=told[0][1].logits.shape[1])
    asked = [
        Asked(prompt, NUM_TOKENS, slot=slot, sampling=everything, chunk=4, joins_at=slot)
        for slot, (prompt, _) in enumerate(told)
    ]
    answers = generate(runner, asked, 4 * NUM_BLOCKS, BLOCK_SIZE)
    for folder, answer, (_, truth) in zip(folders, answers, told, strict=True):
        assert answer.tokens == truth.tokens, folder.name
        error = float((full_logprobs(answer) - truth.logprobs).abs().max())
        assert error <= TOLERANCE, (folder.name, error)


def test_every_field_is_tried() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    tried = {name for case in (*SERVED.values(), *REFUSED.values()) for name in case}
    assert fields == tried | set(UNTRIED)
    assert not tried & set(UNTRIED)


@pytest.mark.filterwarnings("ignore::UserWarning")
# PEFT looks for patterns of parameters among modules, and warns that it found none.
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning")
def test_what_is_served(tmp_path: Path, llama: Path) -> None:
    check_served(llama, [save(tmp_path / n, llama, plain(**case)) for n, case in SERVED.items()])


def test_names_that_end_alike(tmp_path: Path) -> None:
    """GPT-2's attention and feed-forward both have a c_proj."""
    model = write_gpt2(tmp_path / "model")
    cases: dict[str, dict[str, Any]] = {
        "both": {"target_modules": ["c_proj"], "rank_pattern": {"attn.c_proj": 3, "c_proj": 7}},
        # PEFT writes keys in alphabetical order, and goes by that when it reads.
        "other order": {
            "target_modules": ["c_proj"],
            "alpha_pattern": {"c_proj": 9, "attn.c_proj": 1, "h.0.mlp.c_proj": 2},
        },
        "all linear": {"target_modules": "all-linear"},
        "a regex": {"target_modules": r"transformer\.h\.\d+\.attn\.c_(attn|proj)"},
    }
    made = {name: plain(fan_in_fan_out=True, **case) for name, case in cases.items()}
    check_served(model, [save(tmp_path / name, model, config) for name, config in made.items()])


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(tmp_path: Path, llama: Path, message: str) -> None:
    folder = save(tmp_path, llama, plain(**REFUSED[message]))
    config = engine_config(llama, adapters=AdaptersConfig(vocabulary=False))
    with pytest.raises(AdapterError, match=message):
        open_adapter(folder, adaptable(config), 64)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_methods_are_refused(tmp_path: Path, llama: Path, kind: str) -> None:
    folder = save(tmp_path, llama, OTHERS[kind])
    with pytest.raises(AdapterError, match=f"peft_type '{kind}' is not served"):
        open_adapter(folder, adaptable(engine_config(llama)), 64)
