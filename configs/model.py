"""Which base model: where it lies, how it is read, in what type it computes."""

from enum import StrEnum

from pydantic import Field, PositiveInt

from configs.base import Config


class DType(StrEnum):
    """The type of weights and activations; AUTO takes the checkpoint's own."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class LoadFormat(StrEnum):
    """SAFETENSORS reads the checkpoint; DUMMY makes seeded random weights of its shape."""

    SAFETENSORS = "safetensors"
    DUMMY = "dummy"


class Quantize(StrEnum):
    """Weights in 8 or 4 bits as they are loaded, by bitsandbytes; the values are LoRAX's words.

    In 8 bits an answer depends on its batch: all rows together decide which columns of their
    inputs are not rounded.
    """

    NONE = "none"
    BITSANDBYTES = "bitsandbytes"
    BITSANDBYTES_NF4 = "bitsandbytes-nf4"


class ToolParser(StrEnum):
    """How the model writes calls of tools; AUTO finds out by its chat template."""

    AUTO = "auto"
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    MISTRAL = "mistral"


class ModelConfig(Config):
    """The base model.

    id: a folder, or a hub id. `configs/...` paths are looked up beside the installed package
    too, so the demo is found from any working directory. allow_pickle: read the tensors of
    pytorch_model.bin where there are no safetensors; nothing else in it is unpickled.
    trust_remote_code: run the Python files of the model's own repository, for architectures that
    only those know. quantize: such models run in transformers' code, on one rank.
    dynamic_rope_length: a model with dynamic rope computes every sequence as transformers would one
    of so many tokens; None: as one of the model's own length, and takes no longer ones.
    tool_parser: how calls are found in answers to chats with tools.
    """

    id: str
    revision: str | None = None
    name: str | None = Field(
        default=None, description="what clients call it; default: the id's last part"
    )
    dtype: DType = DType.AUTO
    load_format: LoadFormat = LoadFormat.SAFETENSORS
    allow_pickle: bool = False
    trust_remote_code: bool = False
    quantize: Quantize = Quantize.NONE
    dynamic_rope_length: PositiveInt | None = None
    tool_parser: ToolParser = ToolParser.AUTO

    @property
    def served_name(self) -> str:
        """What clients call the base model."""
        return self.name or self.id.rstrip("/").rsplit("/", 1)[-1]
