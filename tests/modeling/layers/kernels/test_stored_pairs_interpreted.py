"""Experts in mxfp4, pair by pair, against the equation, by Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4. The interpreter has no
assembly: what it does is written out here.
"""

import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling.quantisation.fp4 import MXFP4
from tests.modeling.attention.triton.test_interpreted import Interpreted
from tests.modeling.quantisation.stored_layers import fp4_weights
from tests.modeling.watched_memory import spoil_new_memory, watch_bounds

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)

LIMIT, ALPHA = 7.0, 1.702


def by_hand(words: Any, factors: Any, ASM: Any) -> Any:
    """The numbers of codes at one quarter, one by one."""
    import triton.language as tl

    (shift,) = re.findall(r"shl\.b32 s, \$1, (\d+);", getattr(ASM, "value", ASM))
    code = (words.to(tl.int32) >> (12 - int(shift))) & 15
    size = code & 7
    power = tl.exp2(((size >> 1) - 1).to(tl.float32))
    number = tl.where(size < 2, 0.5 * size, power * (1 + 0.5 * (size & 1)))
    factor = (factors & -65536).to(tl.float32, bitcast=True)
    return tl.where(code > 7, -number, number) * (factor * 2.0**-126)


@pytest.fixture
def experts_by_pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    kernels = pytest.importorskip("modeling.layers.kernels.stored_pairs")
    for name in ("_UP_OF_PAIR", "_DOWN_OF_TOKEN"):
        monkeypatch.setattr(kernels, name, Interpreted(getattr(kernels, name)._kernel))
    monkeypatch.setattr(kernels, "made_of_codes", by_hand)
    for name in ("UP_OF_PAIR", "DOWN_OF_TOKEN"):
        monkeypatch.setattr(kernels, name, kernels.PairCut(outputs=16, turn=2, warps=4))
    watch_bounds(monkeypatch)
    spoil_new_memory(monkeypatch)
    return kernels.experts_by_pair


def weights(count: int, outputs: int, inputs: int, has_bias: bool) -> tuple[Any, Tensor]:
    """Random ones, and the same as numbers."""
    own, numbers = fp4_weights(count, (outputs, inputs), MXFP4, device="cpu")
    return replace(own, bias=torch.randn(count, outputs) if has_bias else None), numbers


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("clamped", [True, False])
@pytest.mark.parametrize(("hidden", "inner"), [(160, 64), (288, 32)])
def test_layers(
    experts_by_pair: Any,
    tokens: int,
    has_bias: bool,
    interleaved: bool,
    clamped: bool,
    hidden: int,
    inner: int,
) -> None:
    """hidden: of parts of 128, and of more than are read at once."""
    from modeling.layers.kernels.stored_weights import Gate

    count, active = 5, 3
    up, up_numbers = weights(count, 2 * inner, hidden, has_bias)
    down, down_numbers = weights(count, hidden, inner, has_bias)
    x = torch.randn(tokens, hidden)
    shares, ids = torch.rand(tokens, count).softmax(-1).topk(active)
    wanted = torch.zeros(tokens, hidden)
    for token, place in ((t, p) for t in range(tokens) for p in range(active)):
        expert = int(ids[token, place])
        both = up_numbers[expert] @ x[token]
        both = both if up.bias is None else both + up.bias[expert]
        gate, other = (both[0::2], both[1::2]) if interleaved else both.chunk(2)
        if clamped:
            gate, other = gate.clamp(max=LIMIT), other.clamp(-LIMIT, LIMIT) + 1
        own = other * gate * torch.sigmoid(gate * (ALPHA if clamped else 1.0))
        out = down_numbers[expert] @ own
        out = out if down.bias is None else out + down.bias[expert]
        wanted[token] += out * shares[token, place]
    form = Gate(interleaved, LIMIT, ALPHA) if clamped else Gate(interleaved)
    found = experts_by_pair(x, up, down, form, ids, shares)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
