"""Norms that sum over ranks, without GPUs: a kernel's stand-in adds up over gloo."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.layers import norm, summed_norms
from modeling.layers.fused import FusedOps
from modeling.layers.summed_norms import ROWS, serve_summed_norms
from sharding.group import Summand, TensorParallel
from sharding.symmetric import Method, PeerBuffers, SizeTable, SymmetricRanks, peer_bytes
from tests.checkpoints import write_llama, write_relative
from tests.modeling.models.stepping import Stepper, load
from tests.ranks import run_ranks

CPU = torch.device("cpu")
WIDTH = 32


class NamedBuffers(PeerBuffers):
    """Buffers that write down in `events` which of them is taken."""

    events: list[str]

    def take(self, shape: Any, dtype: torch.dtype, group: TensorParallel) -> Summand:
        summand = super().take(shape, dtype, group)
        self.events.append(f"buffer {int(summand.peers[0, 0] != self._peers[0, 0, 0])}")
        return summand


class PeerRanks(SymmetricRanks):
    """Ranks over gloo with buffers for norms; `events` has what they were asked for, in order."""

    def __init__(self, group: TensorParallel) -> None:
        memory = torch.zeros(peer_bytes(group.size), dtype=torch.uint8)
        # Other ranks' memory is never read here.
        addresses = [memory.data_ptr() + rank for rank in range(group.size)]
        buffers = NamedBuffers(memory, addresses)
        self.events = buffers.events = []
        super().__init__(group, None, {}, SizeTable([(1, Method.NCCL)]), buffers)  # type: ignore[arg-type]

    def all_reduce(self, x: Tensor) -> Tensor:
        self.events.append("sum")
        return self._ranks.all_reduce(x)


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    summand: Summand | None = None,
    **_others: object,
) -> tuple[Tensor, Tensor]:
    """What the kernel computes, and that a summand's buffer may be overwritten after the next."""
    total = x
    if summand is not None:
        ranks = summand.group
        assert isinstance(ranks, PeerRanks)
        assert x is summand.partial
        alone = bool((summand.peers[0] == summand.peers[0, ranks.rank]).all())
        total = x * ranks.size if alone else ranks._ranks.all_reduce(x.clone())
        if not alone:
            ranks.events.append("norm's sum")
    total = total if residual is None else total + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


def unused(*_given: object) -> NoReturn:
    raise AssertionError


def ops(add: Callable[..., tuple[Tensor, Tensor]]) -> FusedOps:
    return FusedOps(add, *[unused] * 7)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (norm, summed_norms):
        monkeypatch.setattr(module, "fused_ops", lambda device: ops(add_rms_norm))
    monkeypatch.setattr(summed_norms, "CHECKED_ROWS", (1, 3))


def steps(folder: Path, group: TensorParallel) -> list[Tensor]:
    """The logits of two steps."""
    stepper = Stepper(load(folder, group))
    first = stepper.step([(0, [3, 5, 7, 11]), (1, [2] * 9)])
    return [*first, *stepper.step([(0, [4]), (1, [6])])]


def times(monkeypatch: pytest.MonkeyPatch, faster_to: int) -> None:
    """Say that one launch is faster up to so many rows."""
    given: list[int] = []

    def captured_us(way: Callable[[Tensor], Tensor], x: Tensor) -> float:
        given.append(len(x))
        is_joined = way.__name__ == "joined"
        return 1.0 if is_joined == (len(x) <= faster_to) else 2.0

    monkeypatch.setattr(summed_norms, "captured_us", captured_us)


def joined(layers: int) -> list[str]:
    """What a step asks for: its first sum is apart, then each buffer is summed before the next."""
    return ["sum", *layers * ["buffer 0", "norm's sum", "buffer 1", "norm's sum"]]


MODELS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "llama": (write_llama, joined(2)),
    "factors": (lambda folder: write_relative(folder, "granite"), 5 * ["sum"]),
    # Where a skip connection ends or begins the stream is needed, so the sum is apart.
    "skips": (
        lambda folder: write_relative(folder, "solar"),
        [each if i not in (4, 8, 12, 16) else "sum" for i, each in enumerate(joined(5))],
    ),
}


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("model", MODELS)
def test_a_model_steps_as_with_its_sums_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    write, wanted = MODELS[model]
    write(tmp_path)
    [expected, _] = run_ranks(2, lambda group: steps(tmp_path, group))
    times(monkeypatch, faster_to=ROWS[-1])

    def on_rank(group: TensorParallel) -> tuple[list[Tensor], list[str]]:
        ranks = PeerRanks(group)
        found = steps(tmp_path, ranks)
        # Without the comparison at start, which asks for whole blocks of buffers.
        return found, ranks.events[-2 * len(wanted) :]

    for found, events in run_ranks(2, on_rank):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        assert events == wanted + wanted


def test_without_a_kernel_the_ranks_sum(tmp_path: Path) -> None:
    write_llama(tmp_path)
    [expected, _] = run_ranks(2, lambda group: steps(tmp_path, group))

    def on_rank(group: TensorParallel) -> tuple[list[Tensor], list[str]]:
        ranks = PeerRanks(group)
        ranks.serve_norms(torch.float32, 4, "")
        return steps(tmp_path, ranks), ranks.events

    apart = [each.replace("norm's sum", "sum") for each in joined(2)]
    for found, events in run_ranks(2, on_rank):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        # The first step has 13 rows, more than are served.
        assert events == 5 * ["sum"] + apart


def served(
    monkeypatch: pytest.MonkeyPatch,
    add: Callable[..., Any],
    faster_to: int,
    known: int | None = None,
) -> list[str]:
    """What two ranks say of how they sum, and that they give summands accordingly."""
    times(monkeypatch, faster_to)
    monkeypatch.setattr(summed_norms, "fused_ops", lambda device: ops(add))

    def on_rank(group: TensorParallel) -> str:
        ranks = PeerRanks(group)
        ranks.known_norm_rows = known
        serve_summed_norms(ranks, WIDTH, torch.float32, CPU)
        given = [rows for rows in (1, 4, 5, 256) if ranks.summand((rows, WIDTH), torch.float32)]
        assert ranks.summand((1, WIDTH), torch.bfloat16) is None
        assert ranks.peer_buffers is not None
        assert not ranks.peer_buffers.flags.any()
        return f"{ranks.method}, {given}"

    return run_ranks(2, on_rank)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("faster_to", "said"),
    [
        (256, "gloo; norms sum up to 256 rows (measured), [1, 4, 5, 256]"),
        (4, "gloo; norms sum up to 4 rows (measured), [1, 4]"),
        (0, "gloo; norms do not sum: slower (measured), []"),
    ],
)
def test_norms_sum_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, faster_to: int, said: str
) -> None:
    assert served(monkeypatch, add_rms_norm, faster_to) == [said] * 2


@pytest.mark.usefixtures("kernel")
def test_what_is_known_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = served(monkeypatch, add_rms_norm, faster_to=256, known=4)
    assert found == ["gloo; norms sum up to 4 rows (measured), [1, 4]"] * 2


def wrong_together(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """A number differs on rank 1 where ranks sum."""
    normed, total = add_rms_norm(*args, **kwargs)
    summand = kwargs.get("summand")
    if summand is not None and summand.group.rank == 1:
        is_alone = bool((summand.peers[0] == summand.peers[0, 1]).all())
        total = total + (0 if is_alone else 1e-3)
    return normed, total


def wrong_alone(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """A number differs on rank 0 already where it is alone."""
    normed, total = add_rms_norm(*args, **kwargs)
    summand = kwargs.get("summand")
    return normed, total + float(summand is not None and summand.group.rank == 0)


def broken_alone(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Rank 1 cannot launch the kernel; the other must not wait for it."""
    summand = kwargs.get("summand")
    if summand is not None and summand.group.rank == 1:
        raise RuntimeError("out of resources")
    return add_rms_norm(*args, **kwargs)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("add", [wrong_together, wrong_alone, broken_alone])
def test_a_fault_on_one_rank_leaves_all_sums_to_the_ranks(
    monkeypatch: pytest.MonkeyPatch, add: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    found = served(monkeypatch, add, faster_to=256)
    assert all(each.startswith("gloo; norms do not sum: ") for each in found), found
    assert all(each.endswith(", []") for each in found), found
    assert "norms do not sum: " in caplog.text


def test_other_ranks_and_devices_are_left_as_they_are() -> None:
    def on_rank(group: TensorParallel) -> tuple[str, object]:
        serve_summed_norms(group, WIDTH, torch.float32, CPU)
        ranks = PeerRanks(group)
        serve_summed_norms(ranks, WIDTH, torch.float32, CPU)
        return group.method, ranks.summand((1, WIDTH), torch.float32)

    assert run_ranks(2, on_rank) == [("gloo", None)] * 2
