"""Mamba 1's selective scan over a row's tokens, which goes on from the row's state.

Each channel has a state h of some numbers: h[t] = exp(A * dt[t]) * h[t - 1] + dt[t] * B[t] * x[t],
of which C[t] makes the output. Tokens are computed in blocks, all blocks at once, so a prompt takes
about twice the square root of its tokens in launches. No decay is above one and none is divided by,
so nothing grows that does not grow token by token.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

MOST = 2**25
"""Numbers in a tensor: tokens by channels by states; further tokens come behind these."""


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor | None = None,
    gate: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs, shaped as x is, and the state behind the last token.

    x, gate: [1, channels, tokens]. dt: of the same shape, already positive. a: float32 [channels,
    states], negative. b, c: [1, states, tokens]. skip: [channels], what x itself adds, times.
    state: float32 [1, channels, states] before the first token; None: zeros. Types are rounded to
    where transformers' own function rounds to them.
    """
    made = []
    tokens = max(1, MOST // a.numel())
    state = a.new_zeros(a.shape) if state is None else state[0]
    for start in range(0, x.shape[2], tokens):
        of_tokens = [each[0, :, start : start + tokens].t() for each in (x, dt, b, c)]
        y, state = _part(of_tokens, a, state)
        made.append(y)
    y = torch.cat(made).t()[None]
    y = y if skip is None else y + x * skip[None, :, None]
    return (y if gate is None else y * F.silu(gate)), state[None]


def _part(of_tokens: Sequence[Tensor], a: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Scan some tokens, without skip and gate.

    of_tokens: x, dt [tokens, channels], b and c [tokens, states].
    """
    x, dt, b, c = of_tokens
    count = len(x)
    length = math.isqrt(count - 1) + 1
    blocks = -(-count // length)
    # A token that pads the last block has no time: it decays nothing and adds nothing.
    rest = (0, 0, 0, blocks * length - count)
    x, dt, b = (F.pad(each, rest) for each in (x, dt, b))
    decays = torch.exp(a * dt[:, :, None]).view(blocks, length, *a.shape)
    states = (dt[:, :, None] * b[:, None].float()) * x[:, :, None].float()
    states = states.view(blocks, length, *a.shape)
    # In each block as if it began without a state; decays become those from its begin.
    for at in range(1, length):
        states[:, at].addcmul_(decays[:, at], states[:, at - 1])
        decays[:, at].mul_(decays[:, at - 1])
    for block in range(blocks):
        states[block].addcmul_(decays[block], state)
        state = states[block, -1]
    known = states.flatten(0, 1)[:count].to(c.dtype)
    return (known @ c[:, :, None])[:, :, 0], state.clone()
