"""Staging as a driver and its ranks do it, without links."""

import torch
from msgspec.structs import replace

from configs.wire.adapters import AdapterNeedsSums, AdapterShape, FetchedAdapter
from modeling.runner.paged import ModelRunner
from sharding.group import TensorParallel


def stage(
    runner: ModelRunner, adapter: FetchedAdapter, group: TensorParallel | None = None
) -> AdapterShape:
    """Stage an adapter; all ranks of a group call it together, and add what it asks for."""
    try:
        return runner.stage(adapter)
    except AdapterNeedsSums as needs:
        assert group is not None, "several ranks have parts of weights"
        assert group.size > 1, "one rank has whole weights"
        part = torch.frombuffer(bytearray(needs.part), dtype=torch.float32)
        return runner.stage(replace(adapter, row_sums=group.all_reduce(part).numpy().tobytes()))
