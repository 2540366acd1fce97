import numpy as np
import pytest
import torch

from modeling.transfer import ALIGNMENT, HostCopy, pack_to_device, to_device

CPU = torch.device("cpu")


def test_packed_arrays_come_apart_again() -> None:
    arrays = [np.arange(n, dtype=np.int64) + n for n in (3, 0, 17, 16, 1)]
    parts = pack_to_device(arrays, CPU)
    assert [part.tolist() for part in parts] == [array.tolist() for array in arrays]
    assert all(part.storage_offset() % ALIGNMENT == 0 for part in parts)


def test_an_array_keeps_its_type_and_order() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert torch.equal(to_device(array.T, CPU), torch.tensor([[0, 3], [1, 4], [2, 5]]).int())


def test_tensors_come_back() -> None:
    tensors = [torch.arange(3), torch.ones(2, 2)]
    assert all(map(torch.equal, HostCopy(tensors).wait(), tensors))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_is_not_overwritten_by_a_later_step() -> None:
    device = torch.device("cuda")
    copies = [HostCopy([to_device(np.full(1000, n), device) * 2]) for n in range(50)]
    assert all(set(copy.wait()[0].tolist()) == {2 * n} for n, copy in enumerate(copies))
