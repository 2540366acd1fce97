"""Objects of bodies, whose values have the types of their fields.

pydantic would read `true` as 1, "5" as 5 and "yes" as true. OpenAI and LoRAX refuse them.
"""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _without_point(given: object) -> object:
    return int(given) if isinstance(given, float) and given.is_integer() else given


Integer = Annotated[int, BeforeValidator(_without_point)]
"""A whole number. JSON has one type of numbers, so it may be written as 1.0."""
Natural = Annotated[Integer, Field(ge=0)]
Positive = Annotated[Integer, Field(gt=0)]


class Typed(BaseModel):
    """An object that refuses values of other types than its fields'; 1 is a valid float."""

    model_config = ConfigDict(strict=True)
