"""How far transformers has come in reading or making a model, in the log."""

import re
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.utils.logging import set_tqdm_hook

from sharding.progress import Progress, counted

_FILLS = re.compile(r"[a-z]\w*_")
"""Names of functions that change their argument; "__get__" and the like do not."""


class RandomNumbers(TorchFunctionMode):
    """Logs how often parameters were filled while a model is made, by torch and by the model."""

    def __init__(self) -> None:
        super().__init__()
        self._progress = Progress("tensors filled with random numbers", None)
        self._bytes = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `func`, counting those that fill a parameter."""
        options = kwargs or {}
        found = func(*args, **options)
        filled = args[0] if args else options.get("tensor")
        if isinstance(filled, nn.Parameter) and _FILLS.fullmatch(func.__name__):
            self._bytes += filled.nbytes
            self._progress.add(f"{self._bytes / 1e9:.1f} GB")
        return found


@contextmanager
def logged_bars() -> Iterator[None]:
    """Make lines of transformers' progress bars: in a log, a bar is one line at its end."""
    before = set_tqdm_hook(_lines)
    try:
        yield
    finally:
        set_tqdm_hook(before)


def _lines(bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    items = args[0] if args else None
    if not isinstance(items, Sized):
        return bar(*args, **options)
    # The items of a dictionary are no sequence.
    found: Any = items
    return counted("tensors", list(found))
