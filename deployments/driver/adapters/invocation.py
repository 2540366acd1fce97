"""What the driver must know of an activated adapter (aLoRA): the tokens that invoke it."""

import json
from pathlib import Path
from typing import Any

from configs.reading import read_text
from sources.base import CONFIG_NAME, MAX_CONFIG_BYTES

FIELD = "alora_invocation_tokens"
MAX_TOKENS = 256


def invocation_of(folder: Path) -> tuple[int, ...]:
    """The tokens of an adapter's folder; () for all others.

    A field that is wrong gives () too: the ranks check the whole file and refuse it.
    """
    try:
        config: Any = json.loads(read_text(folder / CONFIG_NAME, MAX_CONFIG_BYTES))
        tokens = config.get(FIELD) or []
    except (OSError, ValueError, AttributeError, RecursionError):
        return ()
    is_right = isinstance(tokens, list) and all(type(each) is int for each in tokens)
    return tuple(tokens) if is_right and len(tokens) <= MAX_TOKENS else ()
