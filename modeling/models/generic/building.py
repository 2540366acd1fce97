"""Builds a model of transformers from its config.json, without memory for its weights."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

from configs.architectures.base import ArchitectureError
from configs.architectures.generic import GenericArchitecture
from modeling.models.generic.identity_experts import take_over_identities
from modeling.models.generic.own_products import own_product
from modeling.models.generic.step import ATTENTION
from modeling.models.generic.windows import attend_by

NOT_TAKEN = (
    *(ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError),
    StrictDataclassError,
)
"""What transformers' classes raise for values that they do not take."""

_EXPERTS = 3
"""Sizes of a tensor of all of a layer's experts: how many, rows, columns."""


class _LargeOnMeta(TorchFunctionMode):
    """Makes weights take no memory: they are read later.

    They come from `torch.empty`, and experts (of three sizes) from `torch.zeros` too, in Llama 4.
    What a constructor computes (frequencies, scales) is made as always.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, for weights on the meta device."""
        options = dict(kwargs or {})
        if func is torch.empty or (func is torch.zeros and len(args) == _EXPERTS):
            options["device"] = "meta"
        return func(*args, **options)


def build(architecture: GenericArchitecture, dtype: torch.dtype) -> PreTrainedModel:
    """Build transformers' model without weights; ArchitectureError says why it cannot be."""
    config = _config(architecture.settings)
    try:
        with _LargeOnMeta():
            # Types with attention of their own have classes by transformers' names alone.
            known = ATTENTION if own_product(config) is None else "eager"
            model = _from_config(config, dtype=dtype, attn_implementation=known)
    except torch.OutOfMemoryError:
        raise  # It says nothing of the config.
    except NOT_TAKEN as error:
        raise ArchitectureError(
            f"transformers builds no {config.model_type} of this config.json: {error!r}"
        ) from error
    attend_by(model.config, ATTENTION)
    _hold_frequencies(model)
    _number_shared(model)
    take_over_identities(model)
    for layer in architecture.idle_layers:
        cast(Any, model).model.layers[layer] = nn.Module()
    # Names that are no class of transformers' change nothing there either.
    is_other = type(model).__name__ != architecture.architecture
    is_known = hasattr(transformers, architecture.architecture)
    if is_other and is_known and "auto_map" not in architecture.settings:
        raise ArchitectureError(
            f"architectures names {architecture.architecture}, but model_type "
            f"{config.model_type} is a {type(model).__name__}: correct the one that is wrong"
        )
    return model


class HeadedDecoder(PreTrainedModel):  # type: ignore[no-untyped-call]
    """A decoder that transformers has inside of a larger model alone, with a head."""

    base_model_prefix = "model"

    def __init__(self, config: Any) -> None:
        """config: the decoder's own."""
        super().__init__(config)
        self.model = _class_beside(config, "Model")(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._cap: float | None = None
        if config.model_type == "muse_glimmer_text":
            self._factor = float(config.output_multiplier)
            self._cap = float(config.final_logit_softcapping)

    def forward(self, inputs_embeds: Tensor) -> CausalLMOutput:
        """[1, n, hidden] to logits [1, n, vocab_size]."""
        logits = self.lm_head(self.model(inputs_embeds=inputs_embeds).last_hidden_state)
        if self._cap is not None:
            logits = torch.tanh(logits * self._factor / self._cap) * self._cap
        return CausalLMOutput(logits=logits)


def _from_config(config: Any, **options: Any) -> PreTrainedModel:
    """The causal model: by transformers' own list, or one that it has beside the config's class."""
    auto: Any = AutoModelForCausalLM
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        listed: PreTrainedModel = auto.from_config(config, **options)
        return listed
    made: Any = _class_beside(config, "ForCausalLM") or HeadedDecoder
    model: PreTrainedModel = made._from_config(config, **options)
    return model


def _class_beside(config: Any, suffix: str) -> Any:
    """The class of a config's model with that name's end; None where there is none."""
    module = type(config).__module__.replace(".configuration_", ".modeling_")
    name = type(config).__name__.removesuffix("Config") + suffix
    return getattr(import_module(module), name, None)


def _config(settings: Mapping[str, Any]) -> Any:
    """Make transformers' own config; ArchitectureError says why it cannot be made."""
    kind = settings["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ArchitectureError(
            f"transformers {transformers.__version__} does not know model_type {kind}: install a "
            "newer one"
        )
    # Code of the repository is not run: the type is transformers' own. Outputs are read by name.
    own = {key: settings[key] for key in settings if key not in ("auto_map", "return_dict")}
    try:
        return CONFIG_MAPPING[kind].from_dict(own)
    except NOT_TAKEN as error:
        raise ArchitectureError(
            f"transformers does not take this config.json of a {kind}: {error}"
        ) from error


def _number_shared(causal: PreTrainedModel) -> None:
    """Give attention that layers share (Zamba 2) the number of its layer.

    transformers hands the number down with each call instead.
    """
    for path, module in causal.named_modules():
        if path.endswith(".shared_transformer.self_attn"):
            number = next(part for part in path.split(".") if part.isdecimal())
            setattr(module, "layer_idx", int(number))  # noqa: B010 - modules are not ours


def _hold_frequencies(causal: PreTrainedModel) -> None:
    """Keep dynamic frequencies as they are up to the model's own length, which none exceeds.

    transformers looks at a batch's longest row to change them.
    """
    for module in causal.modules():
        kind = getattr(module, "rope_type", None)
        if kind == "dynamic":
            setattr(module, "rope_type", "default")  # noqa: B010 - modules are not ours
        elif isinstance(kind, dict):
            kind.update({each: "default" for each in kind if kind[each] == "dynamic"})
