"""Medusa heads, as their folder's config.json describes them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.architectures.base import ArchitectureError
from configs.architectures.files import read_config
from configs.base import Config

CONFIG_NAME = "config.json"
MOST_HEADS = 64


class MedusaArchitecture(Config):
    """num_heads: tokens that are guessed. num_layers: residual blocks of a head."""

    num_heads: int
    num_layers: int


def load_medusa(folder: Path, within: Path | None = None) -> MedusaArchitecture:
    """Read `folder`/config.json; ArchitectureError says what is missing or not supported.

    within: as in RegularFile.
    """
    path = folder / CONFIG_NAME
    return parse_medusa(read_config(path, within), str(path))


def parse_medusa(config: Mapping[str, Any], where: str) -> MedusaArchitecture:
    """Check a config of Medusa heads; where: its file, for messages."""
    if "medusa_num_heads" not in config:
        raise ArchitectureError(f"{where} has no medusa_num_heads: it describes no Medusa heads")
    counts = []
    for key, most in (("medusa_num_heads", MOST_HEADS), ("medusa_num_layers", MOST_HEADS)):
        value = config.get(key, 1)
        if type(value) is not int or not 1 <= value <= most:
            raise ArchitectureError(f"{where}: {key} is {value!r}, it must be from 1 to {most}")
        counts.append(value)
    return MedusaArchitecture(num_heads=counts[0], num_layers=counts[1])
