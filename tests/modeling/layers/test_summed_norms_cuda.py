"""Norms that sum over two GPUs: to the bit what a sum and a norm give, captured and launched."""

import pytest
import torch
from torch import Tensor

from configs.env import RANK_ENVIRONMENT
from modeling.layers.fused import FusedOps, fused_ops
from modeling.layers.summed_norms import serve_summed_norms
from sharding.group import Summand, TensorParallel
from sharding.symmetric import MOST_ROWS, SUMMAND_BYTES, SymmetricRanks
from tests.sharding.cuda_ranks import run_cuda_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

HIDDEN = 4096
LINKS = 16
REPLAYS = 500
EPS = 1e-5


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in RANK_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def kernels(device: torch.device) -> FusedOps:
    found = fused_ops(device)
    assert found is not None
    return found


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def taken(group: TensorParallel, shape: tuple[int, ...], dtype: torch.dtype) -> Summand:
    assert isinstance(group, SymmetricRanks), group.method
    assert group.peer_buffers is not None
    return group.peer_buffers.take(shape, dtype, group)


def added(group: TensorParallel, x: Tensor) -> Tensor:
    """The sum in the order of ranks, rounded after each addition."""
    parts = group.all_gather(x.view(1, -1)).view(group.size, *x.shape)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@torch.inference_mode()
def launched(group: TensorParallel, device: torch.device) -> None:
    add_rms_norm = kernels(device).add_rms_norm
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows in (1, 3, 64, MOST_ROWS):
            for hidden in (HIDDEN, 5120, 48):
                if rows * hidden * dtype.itemsize > SUMMAND_BYTES:
                    continue
                x = random((rows, hidden), dtype, 100 * rows + group.rank, device)
                residual = random((rows, hidden), dtype, rows, device)
                weight = random((hidden,), dtype, 7, device)
                summand = taken(group, (rows, hidden), dtype)
                summand.partial.copy_(x)
                found = add_rms_norm(summand.partial, residual, weight, EPS, summand=summand)
                expected = add_rms_norm(added(group, x), residual, weight, EPS)
                assert torch.equal(found[0], expected[0]), (dtype, rows, hidden)
                assert torch.equal(found[1], expected[1]), (dtype, rows, hidden)


def chain(group: TensorParallel, x: Tensor, stream: Tensor, joined: bool) -> Tensor:
    """Norms of sums, each of the norm before; all of them [LINKS, rows, hidden]."""
    add_rms_norm = kernels(x.device).add_rms_norm
    weight = torch.ones(x.shape[1], dtype=x.dtype, device=x.device)
    found = []
    for link in range(LINKS):
        factor = 0.5 + 0.25 * group.rank + 0.01 * link
        if joined:
            summand = taken(group, tuple(x.shape), x.dtype)
            torch.mul(x, factor, out=summand.partial)
            if (5 * link + 3 * group.rank) % 4 == 0:
                # Ranks must not be in step by chance.
                torch.cuda._sleep(2000 * (1 + (7 * link + group.rank) % 9))  # type: ignore[no-untyped-call]
            x, stream = add_rms_norm(summand.partial, stream, weight, EPS, summand=summand)
        else:
            x, stream = add_rms_norm(group.all_reduce(x * factor), stream, weight, EPS)
        found.append(x)
    return torch.stack(found)


@torch.inference_mode()
def replayed(group: TensorParallel, device: torch.device) -> None:
    """Graphs of both ways, replayed by turns on one stream, as captured steps are."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for rows in (1, 64, MOST_ROWS):
        x, residual = torch.zeros(2, rows, HIDDEN, dtype=torch.bfloat16, device=device)
        stream.wait_stream(torch.cuda.current_stream(device))
        graphs, outs = [], []
        with torch.cuda.stream(stream):
            for joined in (True, False):
                chain(group, x, residual, joined)
                graphs.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(graphs[-1], stream=stream, capture_error_mode="thread_local"):
                    outs.append(chain(group, x, residual, joined))
            wrong = torch.zeros((), dtype=torch.int64, device=device)
            for replay in range(REPLAYS):
                x.copy_(random((rows, HIDDEN), x.dtype, replay, device))
                residual.copy_(random((rows, HIDDEN), x.dtype, replay + 1, device))
                cycles = 1000 * ((replay * 7 + group.rank * 13) % 29)
                torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
                outs[0].fill_(float("nan"))
                # The other graph's sums are apart: they are between two replays of this one.
                for graph in graphs:
                    graph.replay()
                wrong += (outs[0] != outs[1]).sum()
        stream.synchronize()
        assert int(wrong) == 0, (rows, int(wrong))


def served(group: TensorParallel, device: torch.device) -> None:
    """What is selected at start is used, and says so."""
    serve_summed_norms(group, HIDDEN, torch.bfloat16, device)
    assert "norms sum up to" in group.method, group.method
    assert group.summand((1, HIDDEN), torch.bfloat16) is not None


def test_launched() -> None:
    run_cuda_ranks(2, launched)


def test_replayed() -> None:
    run_cuda_ranks(2, replayed)


def test_served() -> None:
    run_cuda_ranks(2, served)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
def test_four_ranks() -> None:
    run_cuda_ranks(4, launched)
