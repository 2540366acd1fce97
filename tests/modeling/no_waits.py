"""A region of a GPU test in which nothing may wait for the device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Torch refuses synchronising calls meanwhile."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this switch is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
