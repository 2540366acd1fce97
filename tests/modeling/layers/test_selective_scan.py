"""Mamba 1's scan in blocks against transformers' token by token."""

import inspect
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.mamba import modeling_mamba

from modeling.layers import selective_scan as scanning
from modeling.layers.selective_scan import selective_scan

CHANNELS, STATES = 12, 4


class Inputs(NamedTuple):
    """What a scan of some tokens gets: x, dt, gate [1, channels, tokens], b, c [1, states, tokens];
    a [channels, states], skip [channels]."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    skip: Tensor
    gate: Tensor

    def part(self, start: int, stop: int) -> "Inputs":
        """Some of the tokens."""
        cut = {name: getattr(self, name)[..., start:stop] for name in ("x", "dt", "b", "c", "gate")}
        return self._replace(**cut)


def inputs(tokens: int, scale: float = 1.0) -> Inputs:
    """Random ones; scale: of the time steps, of which a large one forgets and a small one keeps."""
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    a = -torch.arange(1.0, STATES + 1).repeat(CHANNELS, 1)
    x, dt, gate = (random(1, CHANNELS, tokens) for _ in range(3))
    b, c = (random(1, STATES, tokens) for _ in range(2))
    return Inputs(x, F.softplus(dt) * scale, a, b, c, random(CHANNELS), gate)


def by_transformers(given: Inputs) -> tuple[Tensor, Tensor]:
    scan: Any = inspect.unwrap(modeling_mamba.mamba_selective_scan)
    wide = [each.double() for each in given]
    out, state = scan(*wide, return_last_state=True)
    return out.float(), state.float()


@pytest.mark.parametrize("scale", [0.001, 1.0, 50.0])
@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 17, 700])
def test_it_is_the_scan_token_by_token(tokens: int, scale: float) -> None:
    given = inputs(tokens, scale)
    expected, state = by_transformers(given)
    out, last = selective_scan(*given)
    largest = float(expected.abs().max())
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6 * (1 + largest))
    torch.testing.assert_close(last, state, rtol=1e-5, atol=1e-6 * (1 + float(state.abs().max())))


@pytest.mark.parametrize("cuts", [(1,), (40,), (13, 14, 15), (39, 40)])
def test_it_goes_on_from_a_state(cuts: tuple[int, ...]) -> None:
    given = inputs(41)
    expected, state = by_transformers(given)
    known, found = None, []
    for start, stop in zip((0, *cuts), (*cuts, 41), strict=True):
        out, known = selective_scan(*given.part(start, stop), state=known)
        found.append(out)
    torch.testing.assert_close(torch.cat(found, 2), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(known, state, rtol=1e-4, atol=1e-5)


def test_many_tokens_come_in_parts_of_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(50)
    expected = selective_scan(*given)
    sizes: list[int] = []
    real = scanning._part

    def part(of_tokens: Any, *others: Any) -> Any:
        sizes.append(len(of_tokens[0]))
        return real(of_tokens, *others)

    monkeypatch.setattr(scanning, "_part", part)
    monkeypatch.setattr(scanning, "MOST", 8 * CHANNELS * STATES)
    for own, whole in zip(selective_scan(*given), expected, strict=True):
        torch.testing.assert_close(own, whole, rtol=1e-4, atol=1e-5)
    assert sizes == [8] * 6 + [2]


def test_a_state_that_it_began_with_stays() -> None:
    """Kept states are read again by other sequences."""
    given, state = inputs(5), torch.ones(1, CHANNELS, STATES)
    selective_scan(*given, state=state)
    assert (state == 1).all()
