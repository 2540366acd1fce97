from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from modeling.transfer import LINE_BYTES, HostCopy, TransferBuffer, pack_to_device, to_device

CPU = torch.device("cpu")


def test_packed_arrays_are_separated_again() -> None:
    arrays: list[npt.NDArray[Any]] = [np.arange(n, dtype=np.int64) + n for n in (3, 0, 17, 16, 1)]
    arrays += [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((2, 0), dtype=np.int32)]
    parts = pack_to_device(arrays, CPU)
    assert [part.tolist() for part in parts] == [array.tolist() for array in arrays]
    assert [part.dtype for part in parts] == [torch.int64] * 5 + [torch.int32] * 2
    assert all(part.storage_offset() * part.itemsize % LINE_BYTES == 0 for part in parts)


def test_packing_follows_indices_and_not_memory() -> None:
    transposed = np.arange(6, dtype=np.int32).reshape(2, 3).T
    (part,) = pack_to_device([transposed], CPU)
    assert part.tolist() == transposed.tolist()


def test_host_buffers_alternate() -> None:
    staging = TransferBuffer(8, CPU)
    numbers = []
    for step in range(4):
        number, host = staging.begin()
        host[:] = step
        staging.send(4)
        staging.sent()
        numbers.append(number)
        assert staging.device_bytes.tolist() == [step] * 4 + [0] * 4
    assert numbers == [1, 0, 1, 0]


def test_an_array_keeps_its_type_and_order() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert torch.equal(to_device(array.T, CPU), torch.tensor([[0, 3], [1, 4], [2, 5]]).int())


def test_tensors_are_copied_back() -> None:
    tensors = [torch.arange(3), torch.ones(2, 2)]
    assert all(map(torch.equal, HostCopy(tensors).wait(), tensors))


@pytest.mark.gpu
def test_a_copy_is_not_overwritten_by_a_later_step() -> None:
    device = torch.device("cuda")
    copies = [HostCopy([to_device(np.full(1000, n), device) * 2]) for n in range(50)]
    assert all(set(copy.wait()[0].tolist()) == {2 * n} for n, copy in enumerate(copies))


@pytest.mark.gpu
def test_a_buffer_is_not_rewritten_before_it_was_read() -> None:
    staging = TransferBuffer(1 << 20, torch.device("cuda"))
    seen = []
    for step in range(60):
        _, host = staging.begin()
        host[:] = step
        staging.send(len(host))
        staging.sent()
        seen.append(staging.device_bytes.float().mean())
    assert [int(value) for value in seen] == list(range(60))
