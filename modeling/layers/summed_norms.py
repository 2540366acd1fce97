"""Norms that sum over ranks in their own launch: tried, compared and measured at start."""

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modeling.layers.fused import FusedOps, fused_ops
from sharding.all_reduce import captured_us
from sharding.group import Summand, TensorParallel
from sharding.symmetric import MOST_ROWS, SUMMAND_BYTES, SymmetricRanks

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, MOST_ROWS)
"""Rows at which the two ways are measured."""

CHECKED_ROWS = (1, 3, 64, MOST_ROWS)

EPS = 1e-5

logger = logging.getLogger("loray.modeling.summed_norms")


def serve_summed_norms(
    group: TensorParallel, hidden: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Leave sums of [rows, hidden] to the norms behind them where that is exact and faster.

    All ranks call it together and decide the same.
    """
    fused = fused_ops(device)
    if fused is None or not isinstance(group, SymmetricRanks) or group.peer_buffers is None:
        return
    with torch.inference_mode():
        comparison = NormComparison(group, fused, _random(hidden, dtype, device, 0))
        # A rank that fails alone must not leave the others in a barrier.
        for check in (comparison.fault_alone, comparison.fault_together):
            fault = check()
            if any(comparison.slowest([float(bool(fault))])):
                reason = f"norms do not sum: {fault or 'another rank found a fault'}"
                logger.warning("%s", reason)
                group.serve_norms(dtype, 0, f"{group.method}; {reason}")
                return
        known = group.known_norm_rows
        most_rows = comparison.measure() if known is None else known
    found = f"norms sum up to {most_rows} rows" if most_rows else "norms do not sum: slower"
    logger.info("%s", found)
    group.serve_norms(dtype, most_rows, f"{group.method}; {found} (measured)")


@dataclass(frozen=True)
class NormComparison:
    """One norm behind a sum over ranks, both ways; weight: [hidden], the same on every rank."""

    group: SymmetricRanks
    fused: FusedOps
    weight: Tensor

    def fault_alone(self) -> str:
        """Say what is wrong with the kernel where every rank is this one; "" if nothing is.

        It waits for no other rank: so a fault that stops this one alone is found.
        """
        assert self.group.peer_buffers is not None
        flags = self.group.peer_buffers.flags
        try:
            for rows in self._rows(CHECKED_ROWS):
                x, summand = self._given(rows), self._summand(rows)
                own = summand.peers[:, self.group.rank, None]
                flags.fill_(1)
                summand.partial.copy_(x)
                found = self._norm(replace(summand, peers=own.repeat(1, self.group.size)), x)
                if not _equal(found, self._expected([x] * self.group.size, x)):
                    return f"the kernel is wrong for {rows} rows"
        except Exception as error:
            # Of Triton's compiler, or of a launch: no other rank waits for this one yet.
            return f"{type(error).__name__}: {error}".splitlines()[0]
        finally:
            flags.zero_()
        return ""

    def fault_together(self) -> str:
        """Say what is wrong with sums over all ranks; "" if nothing is."""
        wrong = []
        # All of them, whatever is found: a rank that stopped early would leave its peers waiting.
        for rows in self._rows(CHECKED_ROWS):
            x, residual = self._given(rows, 1 + self.group.rank), self._given(rows)
            parts = self.group.all_gather(x.view(1, -1)).view(self.group.size, *x.shape)
            for _ in range(3):
                summand = self._summand(rows)
                summand.partial.copy_(x)
                if not _equal(self._norm(summand, residual), self._expected(parts, residual)):
                    wrong.append(rows)
        return f"wrong sums of {wrong} rows" if wrong else ""

    def measure(self) -> int:
        """Return up to how many rows the one launch is always faster, on the slowest rank."""
        most = 0
        for rows in self._rows(ROWS):
            apart, joined = self.times(rows)
            logger.debug("sum and norm of %d rows: %.1f us, joined %.1f us", rows, apart, joined)
            if joined >= apart:
                break
            most = rows
        return most

    def times(self, rows: int) -> list[float]:
        """Return the microseconds of a sum and a norm in two launches, and in one."""
        residual = self._given(rows)

        def apart(x: Tensor) -> Tensor:
            total = self.group.all_reduce(x)
            return self.fused.add_rms_norm(total, residual, self.weight, EPS)[0]

        def joined(x: Tensor) -> Tensor:
            return self._norm(self._summand(len(x)), residual)[0]

        room = self.group.output_buffer(residual.shape, residual.dtype)
        x = residual.clone() if room is None else room.zero_()
        return self.slowest([captured_us(way, x) for way in (apart, joined)])

    def slowest(self, values: list[float]) -> list[float]:
        """Return each value's maximum over the ranks, which have then all come here."""
        mine = torch.tensor(values, dtype=torch.float32, device=self.weight.device)
        found: list[float] = self.group.all_gather(mine).view(self.group.size, -1).amax(0).tolist()
        return found

    def _rows(self, wanted: tuple[int, ...]) -> list[int]:
        return [rows for rows in wanted if rows * self.weight.nbytes <= SUMMAND_BYTES]

    def _given(self, rows: int, seed: int = 0) -> Tensor:
        return _random(rows * len(self.weight), self.weight.dtype, self.weight.device, seed).view(
            rows, -1
        )

    def _summand(self, rows: int) -> Summand:
        assert self.group.peer_buffers is not None
        shape = (rows, len(self.weight))
        return self.group.peer_buffers.take(shape, self.weight.dtype, self.group)

    def _norm(self, summand: Summand, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.fused.add_rms_norm(summand.partial, residual, self.weight, EPS, summand=summand)

    def _expected(self, parts: "Tensor | list[Tensor]", residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add in the order of the ranks, rounding each time, then as without a sum."""
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return self.fused.add_rms_norm(total, residual, self.weight, EPS)


def _equal(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


def _random(count: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(count, generator=generator, device=device).to(dtype)
