"""Which class serves which architecture; only this file knows."""

from importlib import import_module
from typing import Any, cast

from configs.architectures.base import ArchitectureError, ModelArchitecture
from configs.architectures.generic import GenericArchitecture
from modeling.attention.scales import STORED_SCALE
from modeling.models.base import PagedModel
from sharding.loader import Weights

MODELS: dict[str, tuple[str, str]] = {
    "GPT2LMHeadModel": ("modeling.models.gpt2", "FlashGPT2ForCausalLM"),
    "GPTNeoXForCausalLM": ("modeling.models.gpt_neox", "GPTNeoXForCausalLM"),
    "LlamaForCausalLM": ("modeling.models.llama", "FlashLlamaForCausalLM"),
    "MistralForCausalLM": ("modeling.models.llama", "FlashLlamaForCausalLM"),
    "Qwen2ForCausalLM": ("modeling.models.llama", "FlashLlamaForCausalLM"),
    "Qwen3ForCausalLM": ("modeling.models.llama", "FlashLlamaForCausalLM"),
    "GraniteForCausalLM": ("modeling.models.llama", "FlashLlamaForCausalLM"),
    "Phi3ForCausalLM": ("modeling.models.llama", "FlashLlamaForCausalLM"),
    "SolarForCausalLM": ("modeling.models.llama", "FlashLlamaForCausalLM"),
    "OPTForCausalLM": ("modeling.models.opt", "OPTForCausalLM"),
}
"""Architecture in config.json to (module, class); a module is imported when a model of it is built.

The class is built as `class.build(config, weights)`, and its `unread` names the checkpoint's
tensors that it has no use for (buffers of old versions). Scales of an fp8
cache are not the model's: they are read where the cache is made.
"""


def build_model(config: ModelArchitecture, weights: Weights) -> PagedModel:
    """Build this rank's share of the model and prove that the checkpoint fits it exactly.

    ArchitectureError for an unknown architecture, CheckpointError for missing, misshapen or
    left-over tensors, ValueError for sizes that the ranks cannot share.
    """
    if isinstance(config, GenericArchitecture):
        # Here, not above: the other families start without transformers.
        from modeling.models.generic.model import GenericForCausalLM

        generic = GenericForCausalLM(config, weights)
        weights.finish((*generic.unread, STORED_SCALE))
        return generic
    if config.architecture not in MODELS:
        raise ArchitectureError(
            f"architecture {config.architecture} is not supported; "
            f"known: {', '.join(sorted(MODELS))}"
        )
    module, name = MODELS[config.architecture]
    model_class: Any = getattr(import_module(module), name)
    model = cast(PagedModel, model_class.build(config, weights))
    weights.finish((*model.unread, STORED_SCALE))
    return model
