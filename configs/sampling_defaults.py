"""How a model's makers recommend to sample it: what its generation_config.json says."""

from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from configs.architectures.base import ArchitectureError
from configs.architectures.files import read_config
from configs.base import faults


class SamplingDefaults(StrEnum):
    """What requests by OpenAI's and Anthropic's rules sample by where they leave it out.

    OPENAI: temperature 1 and nothing else. MODEL: what the model's generation_config.json says.
    """

    OPENAI = "openai"
    MODEL = "model"


class _Recommended(BaseModel):
    """The fields that shape sampling, under the requests' names; others are not read."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)


def recommended_sampling(folder: Path) -> dict[str, float]:
    """Return fields of requests by what a model's folder recommends; {} where it says nothing.

    ArchitectureError names a value that no request could have.
    """
    path = folder / "generation_config.json"
    try:
        found = _Recommended.model_validate(read_config(path) if path.is_file() else {})
    except ValidationError as error:
        raise ArchitectureError(
            f"generation_config.json: {'; '.join(faults(error))}: correct it, or set "
            f"model.sampling_defaults to {SamplingDefaults.OPENAI}"
        ) from error
    return found.model_dump(exclude_none=True)
