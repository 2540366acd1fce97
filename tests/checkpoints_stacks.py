"""Tiny random models that read images too, whose decoders are served for text."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from tests.checkpoints import AdapterRecipe
from tests.checkpoints_generic import COLUMNS, MIXED, ROWS, SHAPE, WINDOW, randomise

IMAGE = 90
"""The token that an image takes the place of."""

_TEXT = {**SHAPE, "num_hidden_layers": 2}
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_QWEN_VISION = {
    "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32,
    "intermediate_size": 16,
}  # fmt: skip


def _rope(sections: list[int]) -> dict[str, Any]:
    """Rotary settings with pairs for time, height and width, of which text knows the first."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    return {"rope_parameters": rope}


STACKS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**_TEXT, "layer_types": MIXED[:2], "sliding_window": WINDOW},
        "vision_config": _VISION,
    },
    "gemma4": {
        "text_config": {
            **_TEXT,
            "layer_types": MIXED[:2],
            "sliding_window": WINDOW,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "final_logit_softcapping": 5.0,
        },
        "vision_config": _VISION,
        "audio_config": None,
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 0],
            "moe_layers": [1],
            "num_local_experts": 4,
            "intermediate_size_mlp": 64,
            "floor_scale": 4,
        },
        "vision_config": _VISION,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_VISION, "model_type": "pixtral"},
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
    },
    "qwen2_5_vl": {
        "text_config": {**_TEXT, **_rope([1, 1, 2]), "head_dim": 8},
        "vision_config": _QWEN_VISION,
    },
    "qwen2_5_vl_flat": {
        "model_type": "qwen2_5_vl",
        "text_config": {**_TEXT, **_rope([1, 1, 2]), "head_dim": 8},
        "vision_config": _QWEN_VISION,
    },
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen2", "head_dim": 8},
        "vision_config": {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]},
    },
    "vipllava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
    },
    "llava_next": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
    },
    "llava_onevision": {
        "text_config": {**_TEXT, "model_type": "qwen2", "head_dim": 8},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
    },
    "qwen2_vl": {
        "text_config": {**_TEXT, **_rope([1, 1, 2]), "head_dim": 8},
        "vision_config": _QWEN_VISION,
    },
    "qwen3_vl": {"text_config": {**_TEXT, **_rope([2, 3, 3])}, "vision_config": _QWEN_VISION},
    "ministral3": {
        "model_type": "mistral3",
        "text_config": {**_TEXT, "model_type": "ministral3"},
        "vision_config": {**_VISION, "model_type": "pixtral"},
    },
    "idefics3": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "idefics3_vision"},
    },
    "smolvlm": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "smolvlm_vision"},
    },
    "gemma4_unified": {
        "text_config": {
            **_TEXT,
            "layer_types": MIXED[:2],
            "sliding_window": WINDOW,
            "global_head_dim": 32,
            "final_logit_softcapping": 5.0,
        },
    },
}
"""Fields of each kind's config."""


def write_stack(folder: Path, kind: str) -> Path:
    """Write a tiny random model of a kind into `folder` and return it."""
    fields, is_flat = dict(STACKS[kind]), kind.endswith("_flat")
    kind = fields.pop("model_type", kind)
    config = CONFIG_MAPPING[kind](**{**fields, "image_token_id": IMAGE, "image_token_index": IMAGE})
    auto: Any = AutoModelForImageTextToText
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            randomise(name, parameter)
        model.tie_weights()
    model.save_pretrained(folder)
    if is_flat:
        _flatten(folder / "config.json")
    return folder


def _flatten(path: Path) -> None:
    """Put the decoder's fields beside the others, and rope's as transformers 4 had them."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    text = fields.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    path.write_text(json.dumps({**text, **fields}), encoding="utf-8")


LANGUAGE = rf".*(?:language|text)_model.*\.({'|'.join((*COLUMNS, *ROWS))})"

STACK_ADAPTERS = {
    "r8": AdapterRecipe(r=8, alpha=16.0, target_modules=LANGUAGE, seed=12, std=0.05),
    "everywhere": AdapterRecipe(
        r=8,
        alpha=16.0,
        target_modules=LANGUAGE.replace("(?:language|text)_model", ""),
        seed=12,
        std=0.05,
    ),
    "tower": AdapterRecipe(target_modules=r".*vision_tower.*\.(q_proj|fc1)"),
}
