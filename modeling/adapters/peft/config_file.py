"""Read an adapter's adapter_config.json, whatever its fields say."""

import json
from pathlib import Path

from configs.reading import read_text
from configs.wire.adapters import AdapterRefusal
from modeling.adapters.faults import refuse
from modeling.adapters.peft.kinds import files_advice
from sources.base import CONFIG_NAME, MAX_CONFIG_BYTES


def read_config(folder: Path, within: Path | None = None) -> tuple[str, dict[str, object]]:
    """Return the text and the fields of a folder's file; refuses a file that is no object.

    within: the folder that links must not lead out of.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        refuse(f"no {CONFIG_NAME} among the adapter's files: {files_advice(folder)}")
    try:
        text = read_text(path, MAX_CONFIG_BYTES, within)
        fields = json.loads(text)
    except OSError as error:
        refuse(f"{CONFIG_NAME} cannot be read: {error}; try again", AdapterRefusal.UNAVAILABLE)
    except (ValueError, RecursionError) as error:
        refuse(f"{CONFIG_NAME} is not valid JSON: {error}")
    if not isinstance(fields, dict):
        refuse(f"{CONFIG_NAME} must hold an object, found {type(fields).__name__}")
    return text, fields
