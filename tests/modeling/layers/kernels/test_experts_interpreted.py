"""The experts' kernels against the equation, on a CPU, by Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4.
"""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.layers.scored_routing import ScoredRouting
from tests.modeling.attention.triton.test_interpreted import Interpreted
from tests.modeling.watched_memory import spoil_new_memory, watch_bounds

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


def computed(x: Tensor, up: Tensor, down: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """The equation in float32."""
    gate, upper = torch.einsum("th,teih->tei", x.float(), up[ids].float()).chunk(2, -1)
    out = torch.einsum("tei,tehi->teh", F.silu(gate) * upper, down[ids].float())
    return (out * shares.float()[..., None]).sum(1)


def interpreted(monkeypatch: pytest.MonkeyPatch, is_tiled: bool) -> Any:
    """The kernels; is_tiled: as steps of prompts take them, however few tokens there are."""
    kernels = pytest.importorskip("modeling.layers.kernels.experts")
    from modeling.layers.kernels import expert_deltas

    for module, names in (
        (kernels, ("_TILES", "_UP", "_DOWN", "_UP_OF_PAIR", "_DOWN_OF_TOKEN")),
        (expert_deltas, ("_ENTER", "_ENTER_DELTAS", "_SUM", "_SUM_DELTAS", "_SHRINK_TILE")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Interpreted(getattr(module, name)._kernel))
    if is_tiled:
        cut = replace(kernels.PROMPT_CUT, pairs=64)
        monkeypatch.setattr(kernels, "_cut", lambda *sizes: fitted(cut, *sizes[-2:]))
    return kernels


def fitted(cut: Any, hidden: int, width: int) -> Any:
    return replace(cut, up=cut.up.fitted(width, hidden), down=cut.down.fitted(hidden, width))


STEPS = [(1, 2, False), (2, 3, False), (5, 3, False), (37, 2, False), (2, 1, True), (37, 4, True)]
STEPS += [(92, 4, True)]
"""Tokens, experts of each, and whether programs are of tiles; the last has tiles of all widths."""


@pytest.mark.parametrize(("tokens", "active", "is_tiled"), STEPS)
def test_experts(monkeypatch: pytest.MonkeyPatch, tokens: int, active: int, is_tiled: bool) -> None:
    kernels = interpreted(monkeypatch, is_tiled)
    count, hidden, width = 6, 128, 96
    x = torch.randn(tokens, hidden, dtype=torch.float16)
    up = torch.randn(count, 2 * width, hidden).mul(0.1).half()
    down = torch.randn(count, hidden, width).mul(0.1).half()
    assert kernels.fits(up, down)
    shares, ids = torch.randn(tokens, count).softmax(-1).topk(active)
    counts = torch.zeros(count, dtype=torch.int32)
    for _ in range(2):
        y = kernels.experts(x, up, down, ids, shares, counts)
        wanted = computed(x, up, down, ids, shares)
        torch.testing.assert_close(y.float(), wanted, rtol=2e-2, atol=2e-2)
        assert not counts.any()


RANKS = (0, 3, 20, 8)
"""Of the slots' adapters; rank 0: none of experts."""

EXPERTS = (range(0), range(6), (0, 1, 4), (2, 3, 5))
"""Those that the adapters have; the third adapter's last one has rank 8, and of up it has none."""

MAPS = (-1, 0, 1, -1, 2)
"""Each projection's index in the table."""


def pools(count: int, hidden: int, width: int) -> Any:
    """Pages of gate, up and down in pools of two layers, and the adapters' table."""
    torch.manual_seed(1)
    shapes = ((hidden, width), (hidden, width), (width, hidden))
    table = torch.full((len(RANKS), 3, count + 1, 3), -1, dtype=torch.int32)
    made = []
    for number, (inputs, outputs) in enumerate(shapes):
        free = torch.randperm(20).tolist()
        a = torch.randn(2, 20, 8, inputs).mul(0.1).half()
        bt = torch.randn(2, 20, 8, outputs).mul(0.1).half()
        for slot, experts in enumerate(EXPERTS):
            for expert in experts:
                rank = RANKS[slot] if (slot, expert) != (2, 4) else 8 * (number != 1)
                for at in range(-(-rank // 8)):
                    page = table[slot, number, expert, at] = free.pop()
                    bt[:, page, max(0, rank - 8 * at) :] = 0
        made.append((a, bt))
    empty = (a[:0], bt[:0])
    return table, (empty, made[0], made[1], empty, made[2])


def delta(x: Tensor, table: Tensor, pool: tuple[Tensor, Tensor], slot: int, expert: int) -> Any:
    """What an adapter adds for one pair in the second layer, in float32; table: of a map."""
    added = torch.zeros(pool[1].shape[3])
    for page in table[slot, expert].tolist():
        if page >= 0:
            a, bt = (part[1, page].float() for part in pool)
            added += x @ a.t() @ bt
    return added


@pytest.mark.parametrize("tiles_from", [5000, 3])
@pytest.mark.parametrize(("tokens", "active", "is_tiled"), STEPS)
def test_experts_adapted(
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    active: int,
    is_tiled: bool,
    tiles_from: int,
) -> None:
    """Within bounds; tiles_from: tokens whose deltas are computed by tiles."""
    kernels = interpreted(monkeypatch, is_tiled)
    from modeling.kernels import pairs

    watch_bounds(monkeypatch)
    spoil_new_memory(monkeypatch)
    monkeypatch.setattr(kernels, "DELTA_TILES_FROM", tiles_from)
    for name in ("_SHRINK", "_EXPAND"):
        monkeypatch.setattr(pairs, name, Interpreted(getattr(pairs, name)._kernel))
    count, hidden, width, at = 6, 128, 96, 1
    x = torch.randn(tokens, hidden, dtype=torch.float16)
    up = torch.randn(count, 2 * width, hidden).mul(0.1).half()
    down = torch.randn(count, hidden, width).mul(0.1).half()
    shares, ids = torch.randn(tokens, count).softmax(-1).topk(active)
    table, own = pools(count, hidden, width)
    slots = torch.tensor([2, 1, -1, 3, 0] * 19)[:tokens].int()
    deltas = pairs.PairDeltas(slots, table, own, MAPS)
    layer = kernels.LayerDeltas(deltas, (1, 2), 4, at)
    counts = torch.zeros(count, dtype=torch.int32)
    y = kernels.experts(x, up, down, ids, shares, counts, layer)
    wanted = torch.zeros(tokens, hidden)
    tried = torch.zeros(tokens * active, width)
    for pair, (token, expert) in enumerate((t, e) for t in range(tokens) for e in ids[t].tolist()):
        slot = int(slots[token])
        gate, upper = (up[expert].float() @ x[token].float()).chunk(2)
        if slot >= 0 and RANKS[slot]:
            of_gate = delta(x[token].float(), table[:, 0], own[1], slot, expert)
            gate, tried[pair] = gate + of_gate, of_gate
            upper = upper + delta(x[token].float(), table[:, 1], own[2], slot, expert)
        inner = F.silu(gate) * upper
        out = down[expert].float() @ inner
        if slot >= 0 and RANKS[slot]:
            out = out + delta(inner, table[:, 2], own[4], slot, expert)
        wanted[token] += out * shares[token, pair % active]
    torch.testing.assert_close(y.float(), wanted, rtol=2e-2, atol=2e-2)
    # Alone, into columns of a wider product, with another rank's expert among them.
    of_pairs, token_of = ids.flatten(), torch.arange(tokens * active) // active
    of_pairs[-1], tried[-1] = count, 0
    z = torch.ones(tokens * active, 2 * width)
    deltas.add(z, x[token_of].float(), of_pairs, token_of, 1, at, count, width)
    assert (z[:, :width] == 1).all()
    torch.testing.assert_close(z[:, width:], 1 + tried, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [3, 17])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("summed", [True, False])
def test_routing_by_scores(
    monkeypatch: pytest.MonkeyPatch, tokens: int, summed: bool, groups: tuple[int, int]
) -> None:
    kernels = pytest.importorskip("modeling.layers.kernels.scored_routing")
    for name in ("_ROUTE", "_BEST"):
        monkeypatch.setattr(kernels, name, Interpreted(getattr(kernels, name)._kernel))
    x, weight, correction = torch.randn(tokens, 24), torch.randn(12, 24), torch.rand(12)
    zeros = torch.zeros(kernels.MOST_ROUTED, dtype=torch.int32)
    form = ScoredRouting(3, summed, *groups, 1.5)
    logits, shares, ids = kernels.route(x, weight, correction, form, zeros)
    torch.testing.assert_close(logits, F.linear(x, weight))
    best, chosen = form.weights(logits, correction)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(shares, best)
    assert not zeros.any()


@pytest.mark.parametrize("tokens", [3, 17])
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_routing(
    monkeypatch: pytest.MonkeyPatch, tokens: int, summed: bool, has_bias: bool
) -> None:
    kernels = pytest.importorskip("modeling.layers.kernels.routing")
    for name in ("_ROUTE", "_BEST"):
        monkeypatch.setattr(kernels, name, Interpreted(getattr(kernels, name)._kernel))
    x, weight = torch.randn(tokens, 24), torch.randn(11, 24)
    zeros = torch.zeros(kernels.MOST_ROUTED, dtype=torch.int32)
    bias = torch.randn(11) if has_bias else None
    logits, shares, ids = kernels.route(x, weight, bias, 3, summed, zeros)
    torch.testing.assert_close(logits, F.linear(x, weight, bias))
    best, chosen = logits.softmax(-1).topk(3)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(shares, best / best.sum(-1, keepdim=True) if summed else best)
    assert not zeros.any()
