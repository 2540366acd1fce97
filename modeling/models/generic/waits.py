"""Finds out whether the host waits for a GPU, which no captured step may."""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from modeling.adapters.experts import has_aligned_sides
from modeling.models.generic.stored_experts import StoredMatrices

logger = logging.getLogger("loray.modeling")


def can_be_captured(name: str, compute: Callable[[], object]) -> bool:
    """Whether `compute` waits for no GPU; the log says what of transformers' `name` does."""
    compute()  # The first run may load what later ones do not.
    try:
        with no_waits():
            compute()
    except RuntimeError as error:
        logger.info("transformers' %s cannot be captured: %s", name, error)
        return False
    return True


def groups_can_be_captured(causal: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Whether no product of groups reads their sizes on the host; only half precision does not."""
    # Kernels of ours multiply what is stored, and a convolution's weights are no matrices.
    others = (e for e in causal.modules() if not isinstance(e, StoredMatrices | nn.Conv1d))
    numbers = (each for module in others for each in module.parameters(recurse=False))
    stacked = [each for each in numbers if each.is_floating_point() and each.dim() == 3]
    is_half = dtype is not torch.float32
    return not stacked or (is_half and all(map(has_aligned_sides, stacked)))


@contextmanager
def no_waits() -> Iterator[None]:
    """RuntimeError meanwhile where the host waits for a GPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this switch a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
