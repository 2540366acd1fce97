"""Read the chat templates of a model or an adapter, as text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from configs.reading import is_encodable, read_object, read_text

DEFAULT, TOOL_USE = "default", "tool_use"
OTHERS_FOLDER = "additional_chat_templates"

_FORM = "chat_template in {} must be a text or a list of objects with `name` and `template`"
_MAX_CHARACTERS = 256 << 10
_MAX_BYTES = 16 << 20
_MAX_TEMPLATES = 32


class TemplateSource(msgspec.Struct, frozen=True):
    """Jinja templates and their special tokens.

    text: the default template, "" for none.
    special_tokens: tokens by role, as {"bos_token": "<s>"}.
    others: templates by name, as "tool_use".
    """

    text: str = ""
    special_tokens: dict[str, str] = {}
    others: dict[str, str] = {}

    @property
    def by_name(self) -> dict[str, str]:
        """All templates, the default among them."""
        return ({DEFAULT: self.text} if self.text else {}) | self.others

    def alone(self, text: str) -> "TemplateSource":
        """A source with this template alone, and the same special tokens."""
        return TemplateSource(text, self.special_tokens)


def read_template(folder: Path) -> TemplateSource:
    """A folder's chat templates: from .jinja files, else from tokenizer_config.json.

    As transformers reads them. ValueError when a file is malformed or too large.
    """
    path = folder / "tokenizer_config.json"
    config = read_object(path, _MAX_BYTES) if path.is_file() else {}
    found = _of_files(folder) or _of_config(config.get("chat_template"), path.name)
    if sum(map(len, found.values())) > _MAX_CHARACTERS:
        raise ValueError(f"the chat templates have more than {_MAX_CHARACTERS} characters")
    tokens = _special_tokens(config | _special_tokens_map(folder, config))
    if not all(map(is_encodable, (*found, *found.values(), *tokens, *tokens.values()))):
        raise ValueError("a chat template, a special token or a name of one is not valid Unicode")
    return TemplateSource(found.pop(DEFAULT, ""), tokens, found)


def _of_files(folder: Path) -> dict[str, str]:
    """The templates in files of their own, by name."""
    named = [(DEFAULT, folder / "chat_template.jinja")]
    named += [(path.stem, path) for path in sorted(folder.glob(f"{OTHERS_FOLDER}/*.jinja"))]
    files = {name: path for name, path in named if path.is_file()}
    if len(files) > _MAX_TEMPLATES:
        raise ValueError(f"{len(files)} chat templates are more than {_MAX_TEMPLATES}")
    return {name: read_text(path, 4 * _MAX_CHARACTERS) for name, path in files.items()}


def _of_config(given: Any, file: str) -> dict[str, str]:
    """The templates of a tokenizer's config, by name."""
    if given is None:
        return {}
    if isinstance(given, str):
        return {DEFAULT: given}
    if isinstance(given, list):
        if not all(isinstance(one, dict) and _is_text(one.get("name")) for one in given):
            raise ValueError(_FORM.format(file))
        given = {one["name"]: one.get("template") for one in given}
    if not isinstance(given, dict) or not all(map(_is_text, given.values())):
        raise ValueError(_FORM.format(file))
    return given


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _special_tokens_map(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """special_tokens_map.json, which is used where the config does not list its added tokens."""
    path = folder / "special_tokens_map.json"
    if "added_tokens_decoder" in config or not path.is_file():
        return {}
    return read_object(path, _MAX_BYTES)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; each is a string or an object with `content` in the config.

    Further roles end with _token too, or are keys of `extra_special_tokens`.
    """
    found = {
        name: token
        for name, token in config.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }
    extra = config.get("extra_special_tokens")
    found |= extra if isinstance(extra, dict) else {}
    return {
        name: str(token.get("content", "") if isinstance(token, dict) else token)
        for name, token in found.items()
    }
