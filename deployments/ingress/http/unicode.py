"""Strings that can be encoded. JSON can contain half of a surrogate pair, which UTF-8 cannot."""

from typing import Annotated

from pydantic import AfterValidator

from configs.reading import is_encodable


def _encodable(text: str) -> str:
    if not is_encodable(text):
        raise ValueError("must be valid Unicode")
    return text


Unicode = Annotated[str, AfterValidator(_encodable)]
