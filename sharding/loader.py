"""Weights: a layer's constructor reads its rank's slices here, and all tensors must be used."""

import logging
import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from sharding.checkpoint import CheckpointError, TensorSource
from sharding.group import TensorParallel
from sharding.linear_weight import LinearPart, LinearWeight
from sharding.progress import Progress
from sharding.slicing import Segments, whole

logger = logging.getLogger("loray.sharding.loader")

GIGA = 1e9

UNUSED = "if it shall be computed without them, as transformers does, remove them from the files"
"""What to do about tensors that no module of a model reads."""


@dataclass(frozen=True)
class RowsOf:
    """Rows of a tensor that holds several: those from `start` on, of `total`."""

    name: str
    start: int
    total: int


class Weights:
    """A checkpoint as one rank reads it.

    group: its rank and size say how layers cut themselves. dtype, device: of returned tensors.
    linear_format: reads linear maps; None where they are stored as they are kept.
    """

    def __init__(
        self,
        source: TensorSource,
        group: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        linear_format: "LinearFormat | None" = None,
    ) -> None:
        self.group = group
        self.linear_format = linear_format
        self.dtype = dtype
        self.device = device
        self._source = source
        self._names = source.names()
        self._used: set[str] = set()
        self._stand_ins: dict[str, str] = {}
        self._inside: dict[str, RowsOf] = {}
        self._bytes = 0
        self._progress = Progress("weights", None if self._names is None else len(self._names))

    def stand_in(self, name: str, other: str) -> None:
        """Read tensor `other` where the checkpoint has no tensor `name`; the first one counts."""
        self._stand_ins.setdefault(name, other)

    def inside(self, name: str, rows: RowsOf) -> None:
        """Read rows of another tensor as tensor `name`, which the checkpoint does not have."""
        self._inside[name] = rows
        self._stand_ins[name] = rows.name

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Segments | None = None,
        columns: Segments | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Read `rows` of dim 0 and `columns` of dim 1 (None: all) of a tensor; shape: the whole.

        Returned in `dtype` (None: that of all) on `device`. CheckpointError if it is missing. The
        checkpoint's name may lack the first part, as in checkpoints of a model without its head;
        transformers loads those too (base_model_prefix).
        """
        found = self._located(name, shape, _cut(shape, rows, columns))
        piece = self._source.read(*found, self.device)
        return self._count(piece).to(self.device, dtype or self.dtype)

    def read_stored(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Segments | None = None,
        columns: Segments | None = None,
    ) -> Tensor:
        """`read` in the type that the checkpoint has, which may be no float type."""
        found = self._located(name, shape, _cut(shape, rows, columns))
        piece = self._source.read_stored(*found, self.device)
        return self._count(piece).to(self.device)

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape in the files; CheckpointError when there is no such tensor."""
        return self._source.shape(self._find(name) or name)

    def leave(self, *names: str) -> None:
        """Count tensors as read that say nothing more."""
        self._used.update(found for name in names if (found := self._find(name)) is not None)

    def names(self) -> frozenset[str]:
        """Return the names of the checkpoint's tensors; none for a source that makes them."""
        return self._names or frozenset()

    def has(self, name: str) -> bool:
        """Return whether tensor `name` can be read; a source that makes tensors has them all."""
        return self._names is None or self._find(name) is not None

    def lists(self, name: str) -> bool:
        """Return whether files hold tensor `name`; a source that makes tensors lists none."""
        return self._names is not None and self._find(name) is not None

    def parameter(self, name: str, shape: tuple[int, ...]) -> nn.Parameter:
        """Read a whole tensor as a parameter without gradient, the same on every rank."""
        return nn.Parameter(self.read(name, shape), requires_grad=False)

    def empty(self, *shape: int) -> Tensor:
        """Allocate memory for a layer's slice, which the layer writes part by part."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def finish(self, unread: tuple[str, ...] = ()) -> None:
        """Check that every tensor was read; CheckpointError lists those that were not.

        unread: regular expressions of whole names that need not be read. Biases of layers that
        were read without one need not either: transformers warns of them and computes the same.
        """
        if self._names is None:
            return
        # An unused tensor may mean that the model computes something else.
        allowed = re.compile("|".join(f"(?:{pattern})" for pattern in unread) or r"(?!)")
        left = sorted(n for n in self._names - self._used if not allowed.fullmatch(n))
        biases = idle_biases(left, self._used)
        left = [name for name in left if name not in biases]
        if left:
            shown = ", ".join(left[:8]) + (", ..." if len(left) > 8 else "")
            raise CheckpointError(
                f"the model does not use {len(left)} tensors of the checkpoint: {shown}; {UNUSED}"
            )

    def _located(
        self, name: str, shape: tuple[int, ...], cut: tuple[Segments, ...]
    ) -> tuple[str, tuple[int, ...], tuple[Segments, ...]]:
        """Return the checkpoint's name of a tensor, and shape and cut there; it counts as read."""
        within = self._inside.get(name)
        if within is None:
            return self._use(name), shape, cut
        rows = tuple((within.start + first, within.start + last) for first, last in cut[0])
        return self._use(name), (within.total, *shape[1:]), (rows, *cut[1:])

    def _use(self, name: str) -> str:
        """Return the checkpoint's name of a tensor, which now counts as read."""
        found = self._find(name) or name
        self._used.add(found)
        return found

    def _count(self, piece: Tensor) -> Tensor:
        self._bytes += piece.nbytes
        self._progress.add(f"{self._bytes / GIGA:.1f} GB")
        return piece

    def _find(self, name: str) -> str | None:
        """Return the checkpoint's name of a tensor; None if it has none, or makes all tensors."""
        names = self._names or frozenset()
        for wanted in (name, self._stand_ins.get(name, name)):
            # The second without its first part, as checkpoints of headless models have it.
            for each in (wanted, wanted.partition(".")[2]):
                if each in names:
                    return each
        return None


class LinearFormat(Protocol):
    """How linear maps are stored, and in which form they are kept."""

    def read(self, weights: Weights, parts: Sequence[LinearPart]) -> LinearWeight:
        """Read maps that share their input: one weight, with a part's rows below another's."""
        ...


def _cut(
    shape: tuple[int, ...], rows: Segments | None, columns: Segments | None
) -> tuple[Segments, ...]:
    """Return the segments of each dimension; None: all of it."""
    assert columns is None or len(shape) == 2, shape
    wanted = (rows, columns, *(None for _ in shape))[: len(shape)]
    return tuple(
        whole(size) if segments is None else segments
        for size, segments in zip(shape, wanted, strict=True)
    )


def idle_biases(left: Iterable[str], used: Set[str]) -> set[str]:
    """Return and log the biases among unread tensors of modules of which others were used.

    A quantised module may have no tensor `weight` (GPTQ's files have biases of zeros everywhere).
    """
    modules = {name.rpartition(".")[0] for name in used}
    found = {n for n in left if n.endswith(".bias") and n.removesuffix(".bias") in modules}
    if found:
        logger.warning(
            "%d biases of the checkpoint are ignored, as the model has none there: %s",
            len(found),
            ", ".join(sorted(found)[:8]),
        )
    return found
