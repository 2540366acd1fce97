"""Which base model: where it lies, how it is read, in what type it computes."""

from enum import StrEnum

from pydantic import Field

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


class ModelConfig(Config):
    """The base model.

    id: a folder, or a hub id. `configs/...` paths are looked up beside the installed package
    too, so the demo is found from any working directory.
    """

    id: str
    revision: str | None = None
    name: str | None = Field(
        default=None, description="what clients call it; default: the id's last part"
    )
    dtype: DType = DType.AUTO
    load_format: LoadFormat = LoadFormat.SAFETENSORS

    @property
    def served_name(self) -> str:
        """What clients call the base model."""
        return self.name or self.id.rstrip("/").rsplit("/", 1)[-1]
