"""A catalogue: the adapters that an operator offers, read again and again while the server runs."""

from collections.abc import Mapping
from functools import lru_cache

from pydantic import Field

from configs.base import Config
from configs.runtime import AdapterShare, RuntimeConfig
from configs.strict_yaml import load_yaml

FILE_NAME = "catalogue.yaml"
"""The file in a folder or under a prefix that has the pins and shares of its adapters."""


class CatalogueEntry(Config):
    """One adapter of a catalogue.

    adapter: its reference, "[source:]id[@revision]"; None: the folder of the entry's name.
    pinned: keep it on the device.
    share: its weight and limits; None: those of `adapter_default`.
    """

    adapter: str | None = None
    pinned: bool = False
    share: AdapterShare | None = None


class CatalogueFile(Config):
    """The content of a catalogue's file: its adapters by the names that clients use."""

    adapters: dict[str, CatalogueEntry] = Field(default_factory=dict)


@lru_cache(maxsize=2)
def parse_catalogue(text: str) -> Mapping[str, CatalogueEntry]:
    """The entries of a file; ValueError if it is not YAML or has other keys.

    A watched file is read again and again, and a long one takes a second: what was read last is
    kept.
    """
    try:
        content = load_yaml(text)
    except ValueError as error:
        raise ValueError(f"it is not YAML: {error}") from error
    return CatalogueFile.model_validate({} if content is None else content).adapters


def as_settings(entries: dict[str, CatalogueEntry]) -> RuntimeConfig:
    """The entries as settings of a `user_config`; every entry has its reference."""
    targets = {name: entry.adapter or name for name, entry in entries.items()}
    return RuntimeConfig(
        names={name: target for name, target in targets.items() if name != target},
        pinned_adapters=tuple(targets[name] for name, entry in entries.items() if entry.pinned),
        adapters={
            targets[name]: entry.share for name, entry in entries.items() if entry.share is not None
        },
    )


def merged(operator: RuntimeConfig, catalogue: RuntimeConfig) -> RuntimeConfig:
    """Both settings; the operator's `user_config` comes before the catalogue."""
    pins = dict.fromkeys((*operator.pinned_adapters, *catalogue.pinned_adapters))
    changes = {
        "names": {**catalogue.names, **operator.names},
        "pinned_adapters": tuple(pins),
        "adapters": operator.adapters
        | {key: share for key, share in catalogue.adapters.items() if key not in operator.adapters},
    }
    return operator.model_copy(update=changes)
