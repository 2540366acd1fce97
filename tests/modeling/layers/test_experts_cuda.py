"""The experts' kernels against the equation, on a GPU."""

import pytest
import torch
from torch.nn import functional as F

from tests.modeling.layers.test_triton_experts_interpreted import computed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 3, 64, 129, 250])
def test_experts(dtype: torch.dtype, tokens: int) -> None:
    """Launched and captured: the graph's second replay finds what the first one left."""
    kernels = pytest.importorskip("modeling.layers.triton_experts")
    count, active, hidden, width = 24, 3, 1024, 256
    x = torch.randn(tokens, hidden, device=CUDA).to(dtype)
    up = torch.randn(count, 2 * width, hidden, device=CUDA).mul(0.05).to(dtype)
    down = torch.randn(count, hidden, width, device=CUDA).mul(0.05).to(dtype)
    best, ids = torch.randn(tokens, count, device=CUDA).softmax(-1).topk(active)
    shares, counts = best.to(dtype), torch.zeros(count, dtype=torch.int32, device=CUDA)
    assert kernels.fits(up, down)
    wanted = computed(x, up, down, ids, shares)
    found = [kernels.experts(x, up, down, ids, shares, counts) for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.experts(x, up, down, ids, shares, counts)
    for _ in range(2):
        graph.replay()
        found.append(captured.clone())
    for y in found:
        assert (y.float() - wanted).norm() < 1e-2 * wanted.norm()
    assert not counts.any()


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 2048), (16, 7168), (17, 2048)])
def test_routing(tokens: int, hidden: int, summed: bool) -> None:
    kernels = pytest.importorskip("modeling.layers.triton_routing")
    x = torch.randn(tokens, hidden, device=CUDA).bfloat16()
    weight = torch.randn(100, hidden, device=CUDA).mul(0.05).bfloat16()
    zeros = torch.zeros(kernels.MOST_ROUTED, dtype=torch.int32, device=CUDA)
    for _ in range(3):
        logits, shares, ids = kernels.route(x, weight, 6, summed, zeros)
        torch.testing.assert_close(logits, F.linear(x, weight), rtol=2e-2, atol=2e-2)
        own = logits.float().softmax(-1)
        best = own.topk(6).values
        # Ids of equal logits may come in any order.
        torch.testing.assert_close(own.gather(1, ids), best)
        assert all(len(row.unique()) == 6 for row in ids)
        best = best / best.sum(-1, keepdim=True) if summed else best
        torch.testing.assert_close(shares, best.bfloat16())
        assert not zeros.any()
