"""Captures a computation on fixed addresses as one CUDA graph."""

from collections.abc import Callable

import torch

WARM_UPS = 2
"""Runs before a capture: the first one loads kernels and makes the libraries' workspaces."""


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
