"""What a GPU does not tell: accesses of Triton's interpreter outside of a launch's arguments, and
reads of memory that was never written."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

NEVER_WRITTEN = {torch.float32: 4096.0, torch.bfloat16: 4096.0, torch.float16: 4096.0}
NEVER_WRITTEN |= {torch.int32: 2**22, torch.int64: 2**22}
"""Nothing that is right has such numbers. The interpreter warns of NaN in lanes that are masked."""


def watch_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an interpreted kernel's access fail that is in none of its launch's tensors."""
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    launch, ranges = executor.__call__, list[tuple[int, int]]()

    def launched(self: Any, *given: Any, **named: Any) -> None:
        tensors = (each for each in (*given, *named.values()) if isinstance(each, Tensor))
        storages = [each.untyped_storage() for each in tensors]
        ranges[:] = [(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages]
        launch(self, *given, **named)

    def check(pointers: Any, mask: Any) -> None:
        every = np.asarray(pointers.data).astype(np.int64)
        used = every[np.broadcast_to(np.asarray(mask.data), every.shape).astype(bool)]
        inside = np.zeros(used.shape, dtype=bool)
        for first, end in ranges:
            inside |= (used >= first) & (used < end)
        assert inside.all(), f"{(~inside).sum()} of {inside.size} addresses are out of bounds"

    def checked(access: Any, has_value: bool) -> Any:
        def run(self: Any, pointers: Any, *given: Any) -> Any:
            check(pointers, given[1 if has_value else 0])
            return access(self, pointers, *given)

        return run

    monkeypatch.setattr(executor, "__call__", launched)
    for name, has_value in (("create_masked_load", False), ("create_masked_store", True)):
        monkeypatch.setattr(builder, name, checked(getattr(builder, name), has_value))


def spoil_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory that is allocated, and not set, hold numbers that nobody wrote."""

    def spoiled(allocate: Any) -> Any:
        def run(*given: Any, **named: Any) -> Tensor:
            found: Tensor = allocate(*given, **named)
            if found.device.type == "cpu" and found.dtype in NEVER_WRITTEN:
                with torch.no_grad():
                    found.fill_(NEVER_WRITTEN[found.dtype])
            return found

        return run

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, spoiled(getattr(owner, name)))
