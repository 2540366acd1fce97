"""The base class of all configs."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

_SIMILAR, _ALMOST_EQUAL = 0.75, 0.9

KeyPath = tuple[str, ...]

URL = r"^https?://[^/]"
"""How the address of a service begins."""


class Config(BaseModel):
    """A frozen config that refuses unknown keys and non-finite numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


def faults(error: ValueError, kind: type[Config] | None = None) -> list[str]:
    """Each fault of the settings as a line: "a.dotted.key: why".

    kind: the class that refused them, which knows what an unknown key may stand for.
    """
    if not isinstance(error, ValidationError):
        return [str(error)]
    known = list(_keys(kind)) if kind is not None else []
    found = []
    for fault in error.errors(include_url=False):
        path = tuple(map(str, fault["loc"]))
        reason = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            reason = f"there is no such key{_meant(path, known)}"
        elif fault["type"] == "missing":
            reason = "it is missing"
        elif fault["type"] == "string_pattern_mismatch" and fault["ctx"]["pattern"] == URL:
            reason = f"{fault['input']} is no URL: begin it with http:// or https://"
        found.append(f"{'.'.join(path)}: {reason}" if path else reason)
    return found


def similar(name: str, known: Iterable[str]) -> str:
    """A question that names the known key which is most like an unknown one; "" if none is."""
    near = get_close_matches(name, known, 1, _SIMILAR)
    return f"; did you mean {near[0]}?" if near else ""


def _keys(kind: type[Config], above: KeyPath = ()) -> Iterator[KeyPath]:
    """The paths of all keys of a config, without indices and names of the user's choice."""
    for name, field in kind.model_fields.items():
        path = (*above, name)
        yield path
        for inner in _configs(field.annotation):
            yield from _keys(inner, path)


def _configs(annotation: Any) -> Iterator[type[Config]]:
    """The configs in a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        yield annotation
    for part in get_args(annotation):
        yield from _configs(part)


def _meant(path: KeyPath, known: list[KeyPath]) -> str:
    """A question that names the key which an unknown one may stand for; "" if none is like it."""
    names = {name for key in known for name in key}
    above = tuple(part for part in path[:-1] if part in names)
    beside = {key[-1] for key in known if key[:-1] == above}
    if found := similar(path[-1], beside):
        return found
    for name in get_close_matches(path[-1], {key[-1] for key in known}, 1, _ALMOST_EQUAL):
        homes = [key for key in known if key[-1] == name]
        nearest = max(homes, key=lambda key: len(set(key) & set(above)))
        return f"; did you mean {'.'.join(nearest)}?"
    return ""
