"""The JSON files that describe a model, read within bounds: they may come from anywhere."""

import json
from pathlib import Path
from typing import Any

from configs.architectures.base import ArchitectureError
from configs.reading import read_text

_MAX_BYTES = 32 << 20
"""Of one file; a tokenizer's config with thousands of added tokens has some megabytes."""


def read_json(path: Path, within: Path | None = None) -> Any:
    """Read a file; ArchitectureError says what is wrong with it. within: as in RegularFile."""
    try:
        return json.loads(read_text(path, _MAX_BYTES, within), object_hook=_without_marks)
    except (OSError, ValueError, RecursionError) as error:
        raise ArchitectureError(f"{path} cannot be read: {error}") from error


def read_config(path: Path, within: Path | None = None) -> dict[str, Any]:
    """Read a file that holds an object; the rest as `read_json`."""
    found = read_json(path, within)
    if not isinstance(found, dict):
        raise ArchitectureError(f"{path} must hold an object, found {type(found).__name__}")
    return found


def _without_marks(fields: dict[str, Any]) -> Any:
    """Return the number that transformers 5 writes as {"__float__": "Infinity"}; else `fields`."""
    return float(fields["__float__"]) if fields.keys() == {"__float__"} else fields
