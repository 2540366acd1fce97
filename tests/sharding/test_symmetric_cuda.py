"""Symmetric memory on two GPUs: NCCL's sums, at every size, captured and launched."""

import pytest
import torch
from torch import Tensor

from configs.engine import AllReduce
from configs.env import RANK_ENVIRONMENT
from sharding.all_reduce import SIZES
from sharding.group import ProcessGroupRanks, TensorParallel
from sharding.symmetric import Method, SymmetricRanks, world
from tests.sharding.cuda_ranks import run_cuda_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

HIDDEN = 4096
REPLAYS = 100


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANK_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def nccl(device: torch.device) -> ProcessGroupRanks:
    return ProcessGroupRanks(world()._get_backend(device), "nccl")  # type: ignore[arg-type]


def summand(group: TensorParallel, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    device = torch.device("cuda", group.rank)
    generator = torch.Generator(device).manual_seed(sum(shape) + group.rank)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def assert_summed(group: TensorParallel, found: Tensor, x: Tensor) -> None:
    """As NCCL adds, up to one rounding for each addition, and the same bytes everywhere."""
    expected = nccl(x.device).all_reduce(x.clone())
    eps = torch.finfo(x.dtype).eps
    torch.testing.assert_close(found, expected, rtol=group.size * eps, atol=4 * group.size * eps)
    of_all_ranks = group.all_gather(found.reshape(1, -1)).view(group.size, -1)
    assert (of_all_ranks == found.reshape(1, -1)).all()


def eager(group: TensorParallel, device: torch.device) -> None:
    assert isinstance(group, SymmetricRanks), group.method
    for rows in (1, 2, 3, 8, 64, 100, 256, 1000, 2048):
        x = summand(group, (rows, HIDDEN), torch.bfloat16)
        room = group.output_buffer(x.shape, x.dtype)
        assert room is not None
        assert_summed(group, group.all_reduce(room.copy_(x)), x)
        assert_summed(group, group.all_reduce(x.clone()), x)


def every_size_and_type(group: TensorParallel, device: torch.device) -> None:
    shapes = [(1, 1), (1, 3), (3, 5), (7, 33), (1, 8), (5, 4100), (17, 12288), (9000, HIDDEN)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in shapes:
            x = summand(group, shape, dtype)
            assert_summed(group, group.all_reduce(x.clone()), x)


def captured(group: TensorParallel, device: torch.device) -> None:
    """A graph of sums that feed each other, replayed between eager ones of other sizes."""
    assert isinstance(group, SymmetricRanks), group.method
    xs = [torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=device) for rows in (1, 48, 256)]
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    outs: list[Tensor] = []
    with torch.inference_mode(), torch.cuda.stream(stream):
        for x in xs:
            group.all_reduce(x.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for x in xs:
                first = group.output_buffer(x.shape, x.dtype)
                second = group.output_buffer(x.shape, x.dtype)
                assert first is not None
                assert second is not None
                torch.add(x, 1, out=first)
                torch.mul(x, 0.5, out=second)
                once = group.all_reduce(first + second)
                third = group.output_buffer(x.shape, x.dtype)
                outs.append(group.all_reduce(torch.mul(once, 0.25, out=third)) + once)
        for replay in range(REPLAYS):
            # Ranks must not be in step by chance.
            cycles = 1000 * ((replay * 7 + group.rank * 13) % 29)
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            for x in xs:
                x.fill_(float(replay % 8 + group.rank))
            graph.replay()
            total = sum(1.5 * (replay % 8 + rank) + 1 for rank in range(group.size))
            expected = total + group.size * total / 4
            for out in outs:
                assert (out == expected).all(), (replay, out.flatten()[:8], expected)
            between = summand(group, (3, HIDDEN), torch.bfloat16)
            assert_summed(group, group.all_reduce(between.clone()), between)


def forced(group: TensorParallel, device: torch.device) -> None:
    assert isinstance(group, SymmetricRanks), group.method
    for size in SIZES:
        method = group._table.method(size)
        assert method is not Method.NCCL
        for each in (Method.ONE_SHOT, Method.TWO_SHOT):
            x = summand(group, (size // 2,), torch.bfloat16)
            taken = group._buffers.take(x.shape, x.dtype).copy_(x)
            assert_summed(group, group._sums[each](taken), x)


def plain(group: TensorParallel, device: torch.device) -> None:
    assert isinstance(group, ProcessGroupRanks)
    x = summand(group, (3, HIDDEN), torch.bfloat16)
    assert_summed(group, group.all_reduce(x.clone()), x)


def test_rows_of_a_model() -> None:
    run_cuda_ranks(2, eager)


def test_sizes_that_the_kernels_do_not_take_go_through_nccl() -> None:
    run_cuda_ranks(2, every_size_and_type)


def test_a_captured_step_replayed() -> None:
    run_cuda_ranks(2, captured)


def test_every_method_at_every_measured_size() -> None:
    run_cuda_ranks(2, forced, AllReduce.SYMMETRIC)


def test_nccl_when_configured() -> None:
    run_cuda_ranks(2, plain, AllReduce.NCCL)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
def test_four_ranks() -> None:
    run_cuda_ranks(4, eager)
    run_cuda_ranks(4, captured)
