"""What every architecture says, whatever its family, and how a config.json is read."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import NonNegativeInt, PositiveInt

from configs.base import Config
from configs.quantisation import Quantisation
from configs.rope_sets import RopeSets


class ArchitectureError(ValueError):
    """A config.json that cannot be served exactly; the message names the key and the reason."""


class Activation(StrEnum):
    """The feed-forward's activation; values are transformers' names.

    Those with weights of their own (prelu, xielu) are not among them.
    """

    SILU = "silu"
    SWISH = "swish"
    GELU = "gelu"
    GELU_NEW = "gelu_new"
    GELU_TANH = "gelu_pytorch_tanh"
    GELU_FAST = "gelu_fast"
    GELU_PYTHON = "gelu_python"
    GELU_PYTHON_TANH = "gelu_python_tanh"
    GELU_ACCURATE = "gelu_accurate"
    GELU_10 = "gelu_10"
    QUICK_GELU = "quick_gelu"
    RELU = "relu"
    RELU2 = "relu2"
    RELU6 = "relu6"
    LEAKY_RELU = "leaky_relu"
    HARDSWISH = "hardswish"
    LAPLACE = "laplace"
    LINEAR = "linear"
    MISH = "mish"
    SIGMOID = "sigmoid"
    SQRT_SOFTPLUS = "sqrtsoftplus"
    TANH = "tanh"


class ModelArchitecture(Config):
    """What the engine needs of any family's spec.

    architecture: the class name in config.json. max_position_embeddings: in tokens.
    checkpoint_dtype: the type the weights were saved in (None: not said).
    larger_type: the `model_type` of a larger model, of which the decoder alone is served; None: the
    checkpoint is no larger model's.
    num_labels: of its classification head, which stands in place of the vocabulary's; 0: it has
    none.
    quantisation: of the checkpoint's linear maps; None: they are not quantised.
    """

    architecture: str
    vocab_size: PositiveInt
    num_layers: PositiveInt
    max_position_embeddings: PositiveInt
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    checkpoint_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    larger_type: str | None = None
    num_labels: NonNegativeInt = 0
    quantisation: Quantisation | None = None

    @property
    def is_text_stack(self) -> bool:
        """Whether the checkpoint is of a larger model."""
        return self.larger_type is not None

    @property
    def stretches(self) -> bool:
        """Whether sequences above max_position_embeddings are what it was made for."""
        return False

    @property
    def max_total_tokens(self) -> int:
        """The longest sequence, in tokens, unless it `stretches`."""
        return self.max_position_embeddings

    @property
    def idle_layers(self) -> tuple[int, ...]:
        """Numbers of the larger model's layers that no text goes through."""
        return ()

    @property
    def idle_modules(self) -> tuple[str, ...]:
        """Linear maps of which transformers reads the base weight alone, by their paths' ends."""
        return ()

    @property
    def outer_parts(self) -> tuple[str, ...]:
        """The parts of a larger model that are read beside its decoder."""
        return ()

    @property
    def longer_advice(self) -> str:
        """What to do where sequences shall be longer; a part of the error text."""
        return "lower it"

    @property
    def rope_sets(self) -> RopeSets | None:
        """When a sequence takes which rotary frequencies; None where all take the same."""
        return None

    def with_rope_length(self, length: int | None) -> Self:
        """The same model with dynamic rope fixed to that length; ValueError without one."""
        if length is not None:
            raise ValueError(
                f"model.dynamic_rope_length ({length}) is for models with rope_type dynamic of "
                f"Llama's family and GPT-NeoX, not for this {self.architecture}: remove it"
            )
        return self

    def with_expert_parallel(self, wanted: bool) -> Self:
        """The same model with whole experts on each rank; ArchitectureError for one without."""
        if wanted:
            raise ArchitectureError(
                f"expert_parallel: {self.architecture} has no routed experts that are served "
                "paged: remove it"
            )
        return self


LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Keys that say how many layers a decoder has."""

_MAX_LAYERS = 10_000


def refuse_many_layers(config: Mapping[str, Any]) -> None:
    """Refuse more layers than any model has: what is made for each would take all memory."""
    for key in LAYER_COUNTS:
        count = config.get(key)
        if isinstance(count, int | float) and count > _MAX_LAYERS:
            raise ArchitectureError(f"{key} ({count}) is above {_MAX_LAYERS}")


def required(config: Mapping[str, Any], key: str) -> int:
    """A whole number that has no honest default; ArchitectureError when it is not given."""
    if config.get(key) is None:
        raise ArchitectureError(f"config.json does not give {key}")
    return int(config[key])


def activation(name: str, key: str = "hidden_act") -> Activation:
    """The activation of that name; ArchitectureError lists those that are known."""
    if name not in list(Activation):
        raise ArchitectureError(f"{key} {name!r} is not supported; known: {', '.join(Activation)}")
    return Activation(name)


def checkpoint_dtype(config: Mapping[str, Any]) -> Any:
    """`dtype` (transformers 5) or `torch_dtype`, where it is one that is computed in."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return name if name in ("float32", "float16", "bfloat16") else None


def refuse_quantised(config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of quantised weights by its method's name."""
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ArchitectureError(
            f"quantization_config ({method}) is not supported in transformers' own code, only for "
            "paged models: take the unquantised checkpoint"
        )


_ANYWHERE: dict[str, tuple[Any, ...]] = {
    "per_layer_config": (None, {}),
    "is_causal": (None, True),
    "is_encoder_decoder": (None, False),
    "attention_chunk_size": (None,),
    "kv_sharing_modes": (None,),
    "transformers_weights": (None,),
}
"""Keys that transformers reads in any model's config, and the values that change nothing."""


def refuse_window_of_one(windows: Iterable[int | None]) -> None:
    """Refuse layers of which transformers' cache and masks say different things."""
    if 1 in windows:
        raise ArchitectureError(
            "sliding_window (1) is not supported: in transformers a prompt's tokens see themselves "
            "alone, and generated ones all before them; remove it from config.json"
        )


def refuse_unserved(name: str, config: Mapping[str, Any], length: int | None) -> None:
    """Refuse what transformers heeds in any model, but nothing here does.

    length: the longest sequence, where all layers see all of it; None where windows are computed.
    """
    for key, neutral in _ANYWHERE.items():
        if config.get(key) not in neutral:
            raise ArchitectureError(f"{key} ({config[key]}) is not supported for {name}")
    if length is None:
        return
    # Where transformers' class computes full attention, its cache still forgets by these keys.
    window, kinds = config.get("sliding_window"), set(config.get("layer_types") or ())
    if window is not None and window < length:
        raise ArchitectureError(
            f"sliding_window ({window}) shorter than max_position_embeddings ({length}) "
            f"is not supported for {name}"
        )
    if kinds - {"full_attention"}:
        raise ArchitectureError(f"layer_types ({', '.join(sorted(kinds))}) is not for {name}")
