"""The one place that knows which class serves which architecture."""

from importlib import import_module
from typing import Any, cast

from configs.architecture import Architecture, ArchitectureError
from modeling.models.base import PagedModel
from sharding.loader import Weights

MODELS: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("modeling.models.llama", "FlashLlamaForCausalLM"),
    "MistralForCausalLM": ("modeling.models.llama", "FlashLlamaForCausalLM"),
}
"""Architecture in config.json to (module, class); a module is imported when it is asked for."""


def build_model(config: Architecture, weights: Weights) -> PagedModel:
    """Build this rank's share of the model and prove that the checkpoint fits it exactly.

    ArchitectureError for an unknown architecture, CheckpointError for missing, misshapen or
    left-over tensors, ValueError for sizes that the ranks cannot share.
    """
    if config.architecture not in MODELS:
        raise ArchitectureError(
            f"architecture {config.architecture} is not supported; "
            f"known: {', '.join(sorted(MODELS))}"
        )
    module, name = MODELS[config.architecture]
    model_class: Any = getattr(import_module(module), name)
    model = cast(PagedModel, model_class("", config, weights))
    weights.finish(frozenset({"lm_head.weight"}) if config.tie_word_embeddings else frozenset())
    return model
