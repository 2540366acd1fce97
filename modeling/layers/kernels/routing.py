"""Which experts a token gets, in Triton: the router's logits and their best in one launch.

Launches are programmatic dependent ones, as in `modeling.layers.kernels.operations`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.kernels.launch import Launcher, aligned, has_dependent_launch, launch_options

MOST_ROUTED = 16
"""Most tokens of a step that computes logits in the launch that finds experts."""

ROUTED_WEIGHTS = 16384
"""That a program of the routing's launch multiplies."""

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _store_best(
    logits: "Any", ids: "Any", shares: "Any", token: "Any",
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, SUMMED: tl.constexpr,
) -> None:
    """Store a token's best experts by the softmax of its logits [WIDTH]."""
    e = tl.arange(0, WIDTH)
    inside = e < EXPERTS
    own = tl.exp(logits - tl.max(logits, axis=0))
    own = own / tl.sum(own, axis=0)
    n = tl.arange(0, triton.next_power_of_2(ACTIVE))
    best = tl.zeros([triton.next_power_of_2(ACTIVE)], dtype=tl.float32)
    found = tl.zeros([triton.next_power_of_2(ACTIVE)], dtype=tl.int32)
    left = tl.where(inside, own, -1.0)
    for each in tl.static_range(ACTIVE):
        most = tl.max(left, axis=0)
        at = tl.min(tl.where(left == most, e, WIDTH), axis=0)
        best = tl.where(n == each, most, best)
        found = tl.where(n == each, at, found)
        left = tl.where(e == at, -1.0, left)
    if SUMMED:
        best = best / tl.sum(best, axis=0)
    out = token * ACTIVE + n
    tl.store(ids + out, found.to(tl.int64), mask=n < ACTIVE)
    tl.store(shares + out, best.to(shares.dtype.element_ty), mask=n < ACTIVE)


@triton.jit  # type: ignore[untyped-decorator]
def _best(
    logits: "Any", ids: "Any", shares: "Any",
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, SUMMED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One token's best experts by the softmax of its logits; SUMMED: their weights sum to 1."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0)
    e = tl.arange(0, WIDTH)
    own = tl.load(logits + token * EXPERTS + e, mask=e < EXPERTS, other=-float("inf"))
    _store_best(own.to(tl.float32), ids, shares, token, EXPERTS, WIDTH, ACTIVE, SUMMED)


@triton.jit  # type: ignore[untyped-decorator]
def store_logits(
    x: "Any", weight: "Any", bias: "Any", logits: "Any", arrived: "Any",
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr,
    EXPERTS: tl.constexpr, PDL: tl.constexpr,
) -> "Any":
    """Store a few logits of one token; returns whether all others of the token are stored.

    COLUMNS: the power of two that holds INPUTS. arrived: int32 zeros; the program that finds the
    others stored sets the token's to zero again.
    """
    token, k = tl.program_id(1), tl.arange(0, COLUMNS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (n < EXPERTS)[:, None] & (k < INPUTS)[None, :]
    # No kernel writes weights: they are loaded while the kernel before still runs.
    rows = tl.load(weight + n[:, None] * INPUTS + k[None, :], mask=mask, other=0.0)
    if HAS_BIAS:
        added = tl.load(bias + n, mask=n < EXPERTS, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    own = tl.load(x + token * INPUTS + k, mask=k < INPUTS, other=0.0).to(tl.float32)
    found = tl.sum(rows.to(tl.float32) * own[None, :], axis=1)
    if HAS_BIAS:
        found += added
    tl.store(logits + token * EXPERTS + n, found.to(logits.dtype.element_ty), mask=n < EXPERTS)
    # As in `modeling.kernels.tiles.store_tile`: stores, the barrier, one arrival for all.
    tl.debug_barrier()
    return tl.atomic_add(arrived + token, 1, sem="acq_rel") == tl.num_programs(0) - 1


@triton.jit  # type: ignore[untyped-decorator]
def _route(
    x: "Any", weight: "Any", bias: "Any", logits: "Any", ids: "Any", shares: "Any", arrived: "Any",
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, HAS_BIAS: tl.constexpr,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ACTIVE: tl.constexpr, SUMMED: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A few logits of one token; the last program to arrive finds the token's experts."""
    token = tl.program_id(1)
    if store_logits(
        x, weight, bias, logits, arrived, INPUTS, COLUMNS, BLOCK_N, HAS_BIAS, EXPERTS, PDL
    ):
        e = tl.arange(0, WIDTH)
        every = tl.load(
            logits + token * EXPERTS + e, mask=e < EXPERTS, other=-float("inf"),
            cache_modifier=".cg",
        )
        _store_best(every.to(tl.float32), ids, shares, token, EXPERTS, WIDTH, ACTIVE, SUMMED)
        tl.atomic_xchg(arrived + token, 0, sem="relaxed")


# fmt: on

_BEST, _ROUTE = Launcher(_best), Launcher(_route)


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, active: int, summed: bool, zeros: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, weights of x's type, int64 ids) of [tokens, hidden] and [experts, hidden].

    bias: [experts]. A token's experts are the best `active` by softmax; summed: their weights sum
    to 1. zeros: int32 [MOST_ROUTED] at least, which it leaves as zeros.
    """
    (tokens, hidden), count = x.shape, len(weight)
    if tokens > MOST_ROUTED:
        logits = torch.nn.functional.linear(x, weight, bias)
        return logits, *best_experts(logits, active, summed)
    logits = torch.empty(tokens, count, dtype=x.dtype, device=x.device)
    shares, ids = _room(logits, active)
    pdl = has_dependent_launch(x.device)
    columns = triton.next_power_of_2(hidden)
    block = max(1, min(8, ROUTED_WEIGHTS // columns))
    constants = {"INPUTS": hidden, "COLUMNS": columns, "BLOCK_N": block}
    constants["HAS_BIAS"] = bias is not None
    constants |= _best_of(count, active, summed, pdl)
    tensors = [x, weight, weight if bias is None else bias, logits, ids, shares, zeros]
    key = (x.device, x.dtype, aligned(*tensors), *constants.values())
    grid = (-(-count // block), tokens)
    _ROUTE(key, grid, tensors, constants, {"num_warps": 4, **launch_options(pdl)})
    return logits, shares, ids


def best_experts(logits: Tensor, active: int, summed: bool) -> tuple[Tensor, Tensor]:
    """Logits [tokens, experts] to (weights of logits' type, int64 ids), [tokens, active] each."""
    tokens, count = logits.shape
    shares, ids = _room(logits, active)
    pdl = has_dependent_launch(logits.device)
    constants = _best_of(count, active, summed, pdl)
    key = (logits.device, logits.dtype, aligned(logits, ids, shares), *constants.values())
    options = {"num_warps": 1, **launch_options(pdl)}
    _BEST(key, (tokens,), [logits, ids, shares], constants, options)
    return shares, ids


def _room(logits: Tensor, active: int) -> tuple[Tensor, Tensor]:
    """Room for the weights and ids of the found."""
    shape = (len(logits), active)
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    return torch.empty(shape, dtype=logits.dtype, device=logits.device), ids


def _best_of(count: int, active: int, summed: bool, pdl: bool) -> dict[str, Any]:
    width = triton.next_power_of_2(count)
    return {"EXPERTS": count, "WIDTH": width, "ACTIVE": active, "SUMMED": summed, "PDL": pdl}
