"""Captures computations on fixed addresses as CUDA graphs: whole ones, or piece by piece."""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

WARM_UPS = 2
"""Runs before a capture: the first one loads kernels and makes the libraries' workspaces."""


Replay = Callable[[], None]


class GraphRecorder:
    """Makes graphs that share one pool of memory, because they never run together."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats the launches of `compute`, on the caller's stream."""
        # A capture may not run on the default stream, so both streams wait for each other.
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                compute()
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: a capture's rules bind only this one.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            compute()
        return graph.replay


class Recorder(Protocol):
    """Makes replays of what is computed between `begin` and `end`, on fixed addresses."""

    def recording(self) -> AbstractContextManager[None]:
        """A context in which pieces are recorded one after the other."""
        ...

    def begin(self) -> None:
        """Start a piece."""
        ...

    def end(self) -> Replay:
        """End the piece, and return a function that replays it."""
        ...

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a view of the same memory that lets later pieces reuse it for something else."""
        ...


class PieceRecorder:
    """Records pieces as CUDA graphs that share one pool of memory, for they run in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Switch to the captures' stream, and put garbage collection off.

        A collection may free device memory or graphs, which a capture does not allow.
        """
        here = torch.cuda.current_stream(self._device)
        torch.cuda.synchronize(self._device)
        collected = gc.isenabled()
        gc.disable()
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            if collected:
                gc.enable()
        here.wait_stream(self._stream)

    def begin(self) -> None:
        """Start a capture; other threads may call CUDA meanwhile."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Replay:
        """End the capture, and return its replay."""
        graph, self._graph = self._graph, None
        assert graph is not None, "a piece begins before it ends"
        graph.capture_end()
        return graph.replay

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor over the same memory that does not own it."""
        return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)


class _Memory:
    """A tensor's address, by the protocol with which libraries exchange device arrays.

    The protocol knows no bfloat16, so elements are described as integers of the same size.
    """

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{size}",
            "strides": tuple(stride * size for stride in tensor.stride()),
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }
