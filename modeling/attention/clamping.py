"""Warns when an fp8 cache met values that its scales cannot hold."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from modeling.attention.kv_cache import LayerCache
from modeling.transfer import HostCopy

logger = logging.getLogger("loray.modeling")

STEPS_A_LOOK = 256


class ClampWatch:
    """Looks at the layers' marks now and then, and waits for nothing: a look reads the last one's.

    Each layer is reported once for its keys and once for its values. A cache in another type is
    never looked at.
    """

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        """Watch from now on."""
        self._marks = [cache.clamped for cache in caches if cache.quantised]
        self._reported: set[tuple[int, int]] = set()
        self._steps = 0
        self._copy: HostCopy | None = None

    def stepped(self) -> None:
        """Count a step that was launched on the current stream."""
        self._steps += 1
        if not self._marks or self._steps % STEPS_A_LOOK:
            return
        if self._copy is not None:
            self._warn(self._copy.wait()[0])
        self._copy = HostCopy([torch.stack(self._marks)])

    def _warn(self, marks: Tensor) -> None:
        """marks: int32 [layers, 2]."""
        new = {(layer, part) for layer, part in marks.nonzero().tolist()} - self._reported
        if not new:
            return
        self._reported |= new
        keys, values = (sorted(layer for layer, of in new if of == part) for part in (0, 1))
        logger.warning(
            "the fp8 cache held keys of layers %s and values of layers %s at the largest number "
            "that their scales reach, for they were beyond it: answers may be worse; if this is "
            "the checkpoint's scales, they are too small, else set engine.cache.dtype to auto",
            keys or "(none)",
            values or "(none)",
        )
