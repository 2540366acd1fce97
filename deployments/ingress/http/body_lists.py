"""Lists and objects of bodies, whose validation ends soon.

pydantic collects the faults of all items, 10 us and 1 kB each. A body of 8 MiB may have millions,
which would block the event loop for half a minute.
"""

from typing import Annotated, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from deployments.ingress.http.body_values import Typed

T = TypeVar("T")
# More than any closed object has.
_MOST_FIELDS = 64

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list; its first wrong item ends its validation."""


def at_most(most: int) -> BeforeValidator:
    """Refuses an object of more than `most` entries before it looks at any of them."""

    def check(given: object) -> object:
        if isinstance(given, dict) and len(given) > most:
            raise ValueError(f"must have at most {most} entries, got {len(given)}")
        return given

    return BeforeValidator(check)


class Closed(Typed):
    """An object without other fields than its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _few(cls, given: object) -> object:
        if isinstance(given, dict) and len(given) > _MOST_FIELDS:
            raise ValueError(f"there are no {len(given)} such fields")
        return given
