"""Adapters that differ in their numbers alone, as those of one training recipe do: checked once.

Checks of config, names, types and shapes take milliseconds of the interpreter, which the thread
that launches steps needs too.
"""

import hashlib
import threading
from collections import OrderedDict
from dataclasses import replace

from modeling.adapters.peft.adapter import PeftAdapter
from modeling.adapters.peft.config import LoraPlan
from sharding.tensor_file import TensorFile

MOST_RECIPES = 16
MOST_HEADER_BYTES = 2**19
"""Bounds of what is kept of files that are not trusted; 450 tensors have 2^16 bytes of header."""


class Recipes:
    """The last adapters that passed all checks for one model and rank; any thread may call.

    The same config and the same header pass again: checks depend on nothing else, unless they read
    numbers. Those adapters are not kept.
    """

    def __init__(self) -> None:
        self._checked: OrderedDict[bytes, PeftAdapter] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, plan: LoraPlan, file: TensorFile) -> PeftAdapter | None:
        """Return the adapter in a file that was opened; None where it must be checked."""
        digest = _digest(plan, file)
        with self._lock:
            known = self._checked.get(digest)
            if known is None:
                return None
            self._checked.move_to_end(digest)
        return replace(known, file=known.file.with_numbers_of(file))

    def keep(self, adapter: PeftAdapter) -> None:
        """Keep what was found of an adapter of factors alone that passed."""
        reads_numbers = adapter.plan.ensure_weight_tying or adapter.has_idle
        if adapter.other_names or reads_numbers or len(adapter.file.header) > MOST_HEADER_BYTES:
            return
        with self._lock:
            without = replace(adapter, file=adapter.file.without_numbers())
            self._checked[_digest(adapter.plan, adapter.file)] = without
            while len(self._checked) > MOST_RECIPES:
                self._checked.popitem(last=False)


def _digest(plan: LoraPlan, file: TensorFile) -> bytes:
    digest = hashlib.sha256(f"{len(file.header)}:".encode())
    digest.update(file.header)
    digest.update(plan.config.encode())
    return digest.digest()
