"""Models that say that their weights are quantised, for benchmarks with random weights."""

import json
from pathlib import Path
from typing import Any

_NVFP4 = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}


def _nvfp4(**inputs: Any) -> dict[str, Any]:
    """Say that linear layers are in nvfp4; inputs: how their inputs are rounded."""
    group = {"targets": ["Linear"], "weights": _NVFP4, **inputs}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


STORED: dict[str, dict[str, Any]] = {
    "fp8-blocks": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    },
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
    "w8a8": {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"type": "int", "num_bits": 8, "strategy": "channel"},
                "input_activations": {
                    "type": "int",
                    "num_bits": 8,
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
    },
    "nvfp4": _nvfp4(input_activations={**_NVFP4, "dynamic": "local"}),
    "nvfp4-weights": _nvfp4(),
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "modules_in_block_to_quantize": [
            f"{block}.{name}_proj"
            for block, names in (("self_attn", "q k v o"), ("mlp", "gate up down"))
            for name in names.split()
        ],
    },
}
"""What config.json says of quantised weights; fp8 is made at load. For modules that are not named a
peer may look into the weights' files, and random weights have none."""


def mark_stored(folder: Path, form: str) -> None:
    """Let a model's config.json say that its weights are stored so."""
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | {"quantization_config": STORED[form]}
    path.write_text(json.dumps(fields))
