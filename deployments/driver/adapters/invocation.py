"""What the driver must know of an activated adapter (aLoRA): the tokens that invoke it."""

from pathlib import Path

from configs.reading import read_object
from configs.wire.adapters import MAX_INVOCATION, AdapterRefusal, are_tokens
from sources.base import CONFIG_NAME, MAX_CONFIG_BYTES, refuse

FIELD = "alora_invocation_tokens"


def invocation_of(folder: Path) -> tuple[int, ...]:
    """The tokens of an adapter's folder; () for all others.

    A field that is wrong gives () too: the ranks check the whole file and refuse it. Raises
    AdapterError where the file cannot be read: () would activate the adapter everywhere.
    """
    try:
        tokens = read_object(folder / CONFIG_NAME, MAX_CONFIG_BYTES).get(FIELD) or []
    except OSError as error:
        refuse(
            AdapterRefusal.UNAVAILABLE,
            f"{CONFIG_NAME} cannot be read: {error.strerror or error}; try again",
            error,
        )
    except ValueError:
        return ()
    return tuple(tokens) if are_tokens(tokens) and len(tokens) <= MAX_INVOCATION else ()
