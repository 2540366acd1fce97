"""Which experts a token gets by scores of their own (layers/scored_routing.py), in one launch.

As routing.py has it for a softmax.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.kernels.launch import Launcher, aligned, has_dependent_launch, launch_options
from modeling.layers.kernels.routing import MOST_ROUTED, ROUTED_WEIGHTS, store_logits
from modeling.layers.scored_routing import ScoredRouting

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _first(values: "Any", most: "Any", at: "Any") -> "Any":
    """Where in `at` the first of the largest values is."""
    return tl.min(tl.where(values == most, at, 2**30), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _store_best(
    logits: "Any", correction: "Any", ids: "Any", shares: "Any", token: "Any", factor: "Any",
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, SUMMED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr,
) -> None:
    """Store a token's best experts by its logits, float32 [WIDTH]."""
    e = tl.arange(0, WIDTH)
    never = -float("inf")
    scores = tl.sigmoid(logits)
    left = scores + tl.load(correction + e, mask=e < EXPERTS, other=0.0).to(tl.float32)
    left = tl.where(e < EXPERTS, left, never)
    if KEPT < GROUPS:
        group = e // (EXPERTS // GROUPS)
        g = tl.arange(0, triton.next_power_of_2(GROUPS))
        sums = tl.full([triton.next_power_of_2(GROUPS)], never, dtype=tl.float32)
        for each in tl.static_range(GROUPS):
            own = tl.where(group == each, left, never)
            best_one = tl.max(own, axis=0)
            second = tl.max(tl.where(e == _first(own, best_one, e), never, own), axis=0)
            sums = tl.where(g == each, best_one + second, sums)
        kept = e < 0
        for _ in tl.static_range(KEPT):
            found_group = _first(sums, tl.max(sums, axis=0), g)
            kept = kept | (group == found_group)
            sums = tl.where(g == found_group, never, sums)
        left = tl.where(kept, left, never)
    n = tl.arange(0, triton.next_power_of_2(ACTIVE))
    best = tl.zeros([triton.next_power_of_2(ACTIVE)], dtype=tl.float32)
    found = tl.zeros([triton.next_power_of_2(ACTIVE)], dtype=tl.int32)
    for each in tl.static_range(ACTIVE):
        at = _first(left, tl.max(left, axis=0), e)
        best = tl.where(n == each, tl.sum(tl.where(e == at, scores, 0.0), axis=0), best)
        found = tl.where(n == each, at, found)
        left = tl.where(e == at, never, left)
    if SUMMED:
        best = best / (tl.sum(best, axis=0) + 1e-20)
    out = token * ACTIVE + n
    tl.store(ids + out, found.to(tl.int64), mask=n < ACTIVE)
    tl.store(shares + out, best * factor, mask=n < ACTIVE)


@triton.jit  # type: ignore[untyped-decorator]
def _best(
    logits: "Any", correction: "Any", ids: "Any", shares: "Any", factor: "Any",
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, SUMMED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """One token's best experts by its logits."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    e = tl.arange(0, WIDTH)
    own = tl.load(logits + token * EXPERTS + e, mask=e < EXPERTS, other=0.0)
    _store_best(
        own, correction, ids, shares, token, factor,
        EXPERTS, WIDTH, ACTIVE, SUMMED, GROUPS, KEPT,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _route(
    x: "Any", weight: "Any", correction: "Any", logits: "Any", ids: "Any", shares: "Any",
    arrived: "Any", factor: "Any",
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, SUMMED: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """A few logits of one token; the last program to arrive finds the token's experts."""
    token = tl.program_id(1)
    if store_logits(
        x, weight, weight, logits, arrived, INPUTS, COLUMNS, BLOCK_N, False, EXPERTS, PDL
    ):
        e = tl.arange(0, WIDTH)
        own = logits + token * EXPERTS + e
        every = tl.load(own, mask=e < EXPERTS, other=0.0, cache_modifier=".cg")
        _store_best(
            every, correction, ids, shares, token, factor,
            EXPERTS, WIDTH, ACTIVE, SUMMED, GROUPS, KEPT,
        )
        tl.atomic_xchg(arrived + token, 0, sem="relaxed")


# fmt: on

_BEST, _ROUTE = Launcher(_best), Launcher(_route)


def route(
    x: Tensor, weight: Tensor, correction: Tensor, rule: ScoredRouting, zeros: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, float32 weights, int64 ids) of [tokens, hidden] and [experts, hidden].

    correction: b, [experts]. Logits are float32. zeros: int32 [MOST_ROUTED] at least, which it
    leaves as zeros.
    """
    (tokens, hidden), count, active = x.shape, len(weight), rule.active
    shares = torch.empty(tokens, active, dtype=torch.float32, device=x.device)
    ids = torch.empty(tokens, active, dtype=torch.int64, device=x.device)
    pdl = has_dependent_launch(x.device)
    form = {
        "EXPERTS": count,
        "WIDTH": triton.next_power_of_2(count),
        "ACTIVE": active,
        "SUMMED": rule.summed,
        "GROUPS": rule.groups,
        "KEPT": rule.kept,
        "PDL": pdl,
    }
    if tokens > MOST_ROUTED:
        logits = torch.nn.functional.linear(x.float(), weight.float())
        own = [logits, correction, ids, shares]
        key = (x.device, correction.dtype, aligned(*own), *form.values())
        options = {"num_warps": 1, **launch_options(pdl)}
        _BEST(key, (tokens,), [*own, rule.factor], form, options)
        return logits, shares, ids
    logits = torch.empty(tokens, count, dtype=torch.float32, device=x.device)
    columns = triton.next_power_of_2(hidden)
    block = max(1, min(8, ROUTED_WEIGHTS // columns))
    tensors = [x, weight, correction, logits, ids, shares, zeros]
    form = {"INPUTS": hidden, "COLUMNS": columns, "BLOCK_N": block, **form}
    types = (x.dtype, weight.dtype, correction.dtype)
    key = (x.device, *types, aligned(*tensors), *form.values())
    options = {"num_warps": 4, **launch_options(pdl)}
    _ROUTE(key, (-(-count // block), tokens), [*tensors, rule.factor], form, options)
    return logits, shares, ids
