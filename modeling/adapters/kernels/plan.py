"""A runner's buffers of adapters for the Triton kernels, and what launches over them."""

from collections.abc import Sequence

from modeling.adapters.bank import AdapterBank
from modeling.adapters.kernels.buffers import TritonBuffers
from modeling.adapters.kernels.step import TritonBatch, TritonEnds, TritonRows
from modeling.kernels.pairs import PairDeltas


class TritonPlan(TritonBuffers):
    """The buffers, and the data of steps that read them; see `AdapterStepPlan`."""

    def batch(
        self, num_tokens: int, num_tiles: int | None = None, has_experts: bool = False
    ) -> TritonBatch:
        """Return the data of steps of so many tokens; see `AdapterStepPlan`."""
        if num_tiles is not None:
            launched = TritonBatch(self, num_tokens, num_tiles)
            launched.expert_deltas = self._expert_deltas(num_tokens) if has_experts else None
            return launched
        kind = TritonBatch if self.bank.embedding is None else TritonEnds
        if kind is TritonBatch and self.bank.token_rows is not None:
            kind = TritonRows
        captured = kind(self, num_tokens, self.max_tiles(num_tokens))
        if self.bank.norms is not None:
            captured.norm_pages = self.norm_pages[:num_tokens]
        if has_experts:
            captured.expert_deltas = self._expert_deltas(num_tokens)
        return captured

    def _expert_deltas(self, num_tokens: int) -> PairDeltas:
        bank = self.bank
        pools = tuple((pool.a, pool.bt) for pool in bank.pools)
        return PairDeltas(self.slots[:num_tokens], bank.expert_table, pools, bank.expert_maps)


def triton_batch(bank: AdapterBank, slots: Sequence[int], lengths: Sequence[int]) -> TritonBatch:
    """Return one step's data in new buffers; one slot (-1: base) and one length for each row."""
    num_tokens = sum(lengths)
    plan = TritonPlan(bank, num_tokens)
    return plan.batch(num_tokens, plan.update(slots, lengths))
