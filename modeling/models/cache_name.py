"""What a model in transformers' code calls its cache of keys and values."""

import inspect
from collections.abc import Callable


def cache_name(method: Callable[..., object]) -> str:
    """Return the argument of a model's method: `cache`, `past_key_values` before transformers 5.24.

    The model's output has its cache under the same name.
    """
    names = ("cache", "past_key_values")
    return names[0] if names[0] in inspect.signature(method).parameters else names[1]
