"""Weights: what a layer's constructor asks for its own slices, and the proof that all were used."""

import torch
from torch import Tensor, nn

from sharding.checkpoint import CheckpointError, TensorSource
from sharding.group import TensorParallel
from sharding.slicing import Segments, whole


class Weights:
    """A checkpoint as one rank sees it: a source, the rank's group, and where tensors go.

    group, dtype, device are public: layers cut themselves by `group.rank` and allocate there.
    """

    def __init__(
        self,
        source: TensorSource,
        group: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Nothing is read before a layer asks."""
        self.group = group
        self.dtype = dtype
        self.device = device
        self._source = source
        self._used: set[str] = set()

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Segments | None = None,
        columns: Segments | None = None,
    ) -> Tensor:
        """The slice of tensor `name` (whole shape given): `rows` of dim 0, `columns` of dim 1.

        None means all. Returned in `dtype` on `device`. CheckpointError if it is missing.
        """
        assert columns is None or len(shape) == 2, (name, shape)
        wanted = (rows, columns)[: len(shape)]
        cut = tuple(
            whole(size) if segments is None else segments
            for size, segments in zip(shape, wanted, strict=True)
        )
        self._used.add(name)
        return self._source.read(name, shape, cut).to(self.device, self.dtype)

    def parameter(self, name: str, shape: tuple[int, ...]) -> nn.Parameter:
        """A whole tensor as a parameter that needs no gradient, the same on every rank."""
        return nn.Parameter(self.read(name, shape), requires_grad=False)

    def empty(self, *shape: int) -> Tensor:
        """Memory for a layer's own slice, to be filled piece by piece."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def finish(self, ignored: frozenset[str] = frozenset()) -> None:
        """Prove that nothing is left over; CheckpointError lists tensors that no layer read.

        Rotary frequencies, which old checkpoints hold and layers compute, and the names in
        `ignored` (a tied head's own copy) may be left.
        """
        names = self._source.names()
        if names is None:
            return
        left = sorted(
            name
            for name in names - self._used - ignored
            if not name.endswith(".rotary_emb.inv_freq")
        )
        if left:
            shown = ", ".join(left[:8]) + (", ..." if len(left) > 8 else "")
            raise CheckpointError(
                f"the model has no place for {len(left)} tensors of the checkpoint: {shown}"
            )
