"""docs/configuration.md: each setting has its row, each row a setting, and the defaults agree."""

import json
import re
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from configs.runtime import RuntimeConfig
from configs.serve import ServeConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs/configuration.md").read_text("utf-8")
REQUIRED = "required"


def _inner_model(kind: Any) -> tuple[str, type[BaseModel]] | None:
    """The model in a field's type, and what the page writes after the name of the field."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "", kind
    for each in get_args(kind):
        if (found := _inner_model(each)) is not None:
            return {tuple: "[]", dict: ".NAME"}.get(get_origin(kind), ""), found[1]
    return None


def _settings(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """The defaults of all keys in a model and in the models in it, as JSON has them."""
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        inner = _inner_model(field.annotation)
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            required = field.is_required()
            found[prefix + name] = REQUIRED if required else to_jsonable_python(default)
        if inner is not None:
            found |= _settings(inner[1], f"{prefix}{name}{inner[0]}.")
    return found


def _rows() -> list[tuple[str, Any]]:
    """Key and default of each row; None where the default is a text."""
    rows: list[tuple[str, Any]] = []
    for line in PAGE.splitlines():
        if line.startswith("| `"):
            key, default = (cell.strip() for cell in line.strip("|").split(" | ")[:2])
            value = re.match(r"`(.+?)`", default)
            other = REQUIRED if default == "**required**" else None
            rows.append((key.strip("`"), json.loads(value[1]) if value else other))
    return rows


SETTINGS = _settings(ServeConfig) | _settings(RuntimeConfig, "user_config.")


def test_each_setting_has_one_row_and_each_row_a_setting() -> None:
    assert sorted(key for key, _ in _rows()) == sorted(SETTINGS)


@pytest.mark.parametrize(("key", "default"), _rows())
def test_the_pages_default_is_that_of_the_class(key: str, default: Any) -> None:
    assert default == SETTINGS[key]
