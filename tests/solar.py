"""Solar, of which transformers has no class: Mistral's with the skips of the model's own code."""

from functools import partial
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, MistralConfig, MistralForCausalLM


class SolarConfig(MistralConfig):  # type: ignore[no-untyped-call]
    """bskcn_1, bskcn_2: layers before which the stream is kept; bskcn_3, bskcn_4: into which it
    is blended; bskcn_tv: its weight in training and otherwise."""

    model_type = "solar"

    bskcn_1: list[int] | None = None
    bskcn_2: list[int] | None = None
    bskcn_3: list[int] | None = None
    bskcn_4: list[int] | None = None
    bskcn_tv: list[float] | None = None


class SolarForCausalLM(MistralForCausalLM):  # type: ignore[no-untyped-call]
    """The order is that of the model's own code: both are kept, then both are blended."""

    config_class: Any = SolarConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._kept: dict[str, Tensor] = {}
        for index, layer in enumerate(self.model.layers):
            layer.register_forward_pre_hook(partial(self._enter, index))

    def _enter(self, index: int, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        config: Any = self.config
        hidden, weight = inputs[0], config.bskcn_tv[1]
        for name in ("bskcn_1", "bskcn_2"):
            if index in getattr(config, name):
                self._kept[name] = hidden
        for name, into in (("bskcn_1", "bskcn_3"), ("bskcn_2", "bskcn_4")):
            if index in getattr(config, into):
                hidden = self._kept[name] * weight + hidden * (1 - weight)
        return (hidden, *inputs[1:])


def find(name: str) -> Any:
    """A class of transformers by its name, or one of these."""
    return globals().get(name) or getattr(transformers, name)


AutoConfig.register("solar", SolarConfig)
AutoModelForCausalLM.register(SolarConfig, SolarForCausalLM)
