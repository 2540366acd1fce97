"""transformers' modules are built without memory for their experts."""

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from configs.architectures.generic import PAGED_TYPES, known_names, parse
from modeling.models.generic.building import build
from tests.modeling.models.tiny_causal import kinds, tiny_config


@pytest.mark.parametrize("kind", sorted(PAGED_TYPES.intersection(kinds())))
def test_no_expert_takes_memory(kind: str) -> None:
    """Llama 4's constructor makes its experts by other means than `torch.empty`."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    config = {**tiny_config(kind).to_dict(), "architectures": [name], "model_type": kind}
    architecture = parse(name, known_names(config))
    model = build(architecture, torch.float32)  # type: ignore[arg-type]
    large = {name: weight for name, weight in model.named_parameters() if weight.dim() > 2}
    assert [name for name, weight in large.items() if not weight.is_meta] == []
