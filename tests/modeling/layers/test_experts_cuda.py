"""The experts' kernels against the equation, on a GPU."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.layers.scored_routing import ScoredRouting
from tests.modeling.layers.kernels.test_experts_interpreted import computed

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 3, 64, 129, 250, 300, 700])
def test_experts(dtype: torch.dtype, tokens: int) -> None:
    """Launched and captured: the graph's second replay finds what the first one left."""
    kernels = pytest.importorskip("modeling.layers.kernels.experts")
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
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 2048), (16, 7168), (17, 2880)])
def test_routing(tokens: int, hidden: int, summed: bool, has_bias: bool) -> None:
    kernels = pytest.importorskip("modeling.layers.kernels.routing")
    x = torch.randn(tokens, hidden, device=CUDA).bfloat16()
    weight = torch.randn(100, hidden, device=CUDA).mul(0.05).bfloat16()
    bias = torch.randn(100, device=CUDA).bfloat16() if has_bias else None
    wanted = F.linear(x.float(), weight.float(), bias.float() if bias is not None else None)
    zeros = torch.zeros(kernels.MOST_ROUTED, dtype=torch.int32, device=CUDA)
    for _ in range(3):
        logits, shares, ids = kernels.route(x, weight, bias, 6, summed, zeros)
        # Of numbers of about four; a library rounds the product before it adds the bias.
        torch.testing.assert_close(logits.float(), wanted, rtol=2e-2, atol=4e-2)
        own = logits.float().softmax(-1)
        best = own.topk(6).values
        # Ids of equal logits may come in any order.
        torch.testing.assert_close(own.gather(1, ids), best)
        assert all(len(row.unique()) == 6 for row in ids)
        best = best / best.sum(-1, keepdim=True) if summed else best
        torch.testing.assert_close(shares, best.bfloat16())
        assert not zeros.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("count", "form"),
    [
        (64, ScoredRouting(4, True, 1, 1, 1.8)),
        (256, ScoredRouting(8, True, 8, 4, 2.5)),
        (160, ScoredRouting(6, False, 8, 3, 16.0)),
    ],
)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 2048), (16, 7168), (300, 5120)])
def test_routing_by_scores(
    tokens: int, hidden: int, count: int, form: ScoredRouting, dtype: torch.dtype
) -> None:
    """Weights as they are kept, in either type; sums of float32 in another order."""
    kernels = pytest.importorskip("modeling.layers.kernels.scored_routing")
    x = torch.randn(tokens, hidden, device=CUDA).bfloat16()
    weight = torch.randn(count, hidden, device=CUDA).mul(0.03).to(dtype)
    correction = torch.rand(count, device=CUDA)
    zeros = torch.zeros(kernels.MOST_ROUTED, dtype=torch.int32, device=CUDA)
    for _ in range(3):
        logits, shares, ids = kernels.route(x, weight, correction, form, zeros)
        wanted = F.linear(x.double(), weight.double()).float()
        torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)
        best, chosen = form.weights(logits, correction)
        assert torch.equal(ids.sort().values, chosen.sort().values)
        dense = [
            torch.zeros_like(logits).scatter(1, *own) for own in ((ids, shares), (chosen, best))
        ]
        torch.testing.assert_close(*dense)
        assert not zeros.any()


@pytest.mark.parametrize("tiles_from", [5000, 3])
@pytest.mark.parametrize("tokens", [1, 2, 3, 64, 250, 800, 2048])
def test_experts_adapted(tokens: int, tiles_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of adapters beside tokens without, in the second layer."""
    kernels = pytest.importorskip("modeling.layers.kernels.experts")
    from modeling.kernels.pairs import PairDeltas

    monkeypatch.setattr(kernels, "DELTA_TILES_FROM", tiles_from)

    count, active, hidden, width, slots = 24, 3, 1024, 256, 3
    up = torch.randn(count, 2 * width, hidden, device=CUDA).mul(0.05).bfloat16()
    down = torch.randn(count, hidden, width, device=CUDA).mul(0.05).bfloat16()
    x = torch.randn(tokens, hidden, device=CUDA).bfloat16()
    best, ids = torch.randn(tokens, count, device=CUDA).softmax(-1).topk(active)
    shares, counts = best.bfloat16(), torch.zeros(count, dtype=torch.int32, device=CUDA)

    def factors(side: int) -> Tensor:
        return torch.randn(2, 3 * count, 8, side, device=CUDA).mul(0.05).bfloat16()

    sizes = ((hidden, width), (hidden, width), (width, hidden))
    pools = tuple((factors(inputs), factors(outputs)) for inputs, outputs in sizes)
    # The first slot has no pages, the second one of each expert, the third two of some.
    pages = torch.full((slots, 3, count, 2), -1, dtype=torch.int32)
    for of_map in range(3):
        free = torch.randperm(3 * count).int()
        pages[1, of_map, :, 0] = free[:count]
        pages[2, of_map, of_map::3] = free[count : count + 2 * len(range(of_map, count, 3))].view(
            -1, 2
        )
    table = pages.to(CUDA)
    own = torch.arange(tokens, device=CUDA) % (slots + 1) - 1
    deltas = kernels.LayerDeltas(PairDeltas(own.int(), table, pools, (0, 1, 2)), (0, 1), 2, 1)
    y = kernels.experts(x, up, down, ids, shares, counts, deltas)
    wanted = torch.zeros(tokens, hidden, device=CUDA)
    for slot in range(-1, slots):
        rows = own == slot
        added = [torch.zeros(count, outputs, inputs, device=CUDA) for inputs, outputs in sizes]
        for projection, (a, bt) in enumerate(pools):
            for at in range(2) if slot >= 0 else ():
                page = pages[slot, projection, :, at].to(CUDA)
                both = (part[1, page.long().clamp(min=0)].float() for part in (a, bt))
                delta = torch.einsum("eri,ero->eoi", *both)
                added[projection] += delta * (page >= 0)[:, None, None]
        whole, below = up.float() + torch.cat(added[:2], 1), down.float() + added[2]
        for part in torch.arange(tokens, device=CUDA)[rows].chunk(1 + tokens // 64):
            wanted[part] = computed(x[part], whole, below, ids[part], shares[part])
    assert (y.float() - wanted).norm() < 1e-2 * wanted.norm()
    assert not counts.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [300, 800, 2048])
def test_experts_by_tiles(dtype: torch.dtype, tokens: int) -> None:
    kernels = pytest.importorskip("modeling.layers.kernels.experts")
    count, active, hidden, width = 24, 3, 1024, 256
    x = torch.randn(tokens, hidden, device=CUDA).to(dtype)
    up = torch.randn(count, 2 * width, hidden, device=CUDA).mul(0.05).to(dtype)
    down = torch.randn(count, hidden, width, device=CUDA).mul(0.05).to(dtype)
    best, ids = torch.randn(tokens, count, device=CUDA).softmax(-1).topk(active)
    shares, counts = best.to(dtype), torch.zeros(count, dtype=torch.int32, device=CUDA)
    y = kernels.experts(x, up, down, ids, shares, counts)
    halves = zip(*(part.chunk(tokens // 50) for part in (x, ids, shares)), strict=True)
    wanted = torch.cat([computed(own, up, down, *more) for own, *more in halves])
    assert (y.float() - wanted).norm() < 1e-2 * wanted.norm()
    assert not counts.any()
