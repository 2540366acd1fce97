"""A step's adapters for the Triton kernels: tokens cut into tiles, in buffers that never move.

Everything that varies between steps is in these buffers. So what a `TritonBatch`
(step.py) launches may be captured: call `update` before each replay, on the replay's stream.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from modeling.adapters.bank import AdapterBank
from modeling.adapters.kernels.embed import embed_kernel
from modeling.adapters.kernels.expand import expand_kernel
from modeling.adapters.kernels.forms import MOST_PARTS, Form, forms_of
from modeling.adapters.kernels.gated import gated_kernel
from modeling.adapters.kernels.groups import (
    MAX_TARGETS,
    LaunchGroup,
    group_of,
)
from modeling.adapters.kernels.latents import latents_kernel
from modeling.adapters.kernels.product import MAX_BLOCKS, MAX_SUMS
from modeling.adapters.kernels.shrink import shrink_kernel
from modeling.adapters.kernels.tiles import HEADER, cut_tiles
from modeling.adapters.kernels.tokens import set_embedded_kernel, set_logits_kernel
from modeling.adapters.product import OutputSlice
from modeling.adapters.projection import ProjectionKind
from modeling.kernels.launch import Launcher, has_async_copies, has_dependent_launch


class TritonBuffers:
    """The buffers of steps of up to `max_tokens` tokens, written by `update`.

    Steps share them in the order of their stream, so one plan serves a runner.
    """

    def __init__(
        self, bank: AdapterBank, max_tokens: int, forms: Sequence[Form] | None = None
    ) -> None:
        """Allocate on the bank's device; forms: None for the tuned table."""
        self.bank = bank
        self.forms = tuple(forms) if forms is not None else forms_of(bank.pools[0].a.dtype)
        self.max_tokens = max_tokens
        device = bank.page_table.device
        widest = max(form.widest(bank.size.max_rank) for form in self.forms)
        # Whole passes, so that a load past the true rank stays within its row of partial sums.
        self.max_rank = -(-bank.size.max_rank // widest) * widest
        self.dependent_launch = has_dependent_launch(device)
        self.has_gated = has_async_copies(device)
        self.shrink, self.expand = Launcher(shrink_kernel), Launcher(expand_kernel)
        self.gated = Launcher(gated_kernel)
        self.embed = Launcher(embed_kernel)
        self.latents = Launcher(latents_kernel)
        self.set_embedded = Launcher(set_embedded_kernel)
        self.set_logits = Launcher(set_logits_kernel)
        used = self._used_forms()
        records = max(self.max_tiles(tokens) * (HEADER + form.tile_tokens) for form, tokens in used)
        # Of three targets with `splits` parts each, or of fewer with more.
        partials = max(max(form.splits * MAX_TARGETS, MOST_PARTS) * tokens for form, tokens in used)
        partials *= self.max_rank
        assert partials < 2**31, "kernels count partial sums in 32 bits"
        # Addresses that captured launches keep: no buffer is ever allocated again.
        self.records = torch.full((records,), -1, dtype=torch.int32, device=device)
        self.partials = torch.empty(partials, dtype=torch.float32, device=device)
        self.sums = torch.empty(MAX_SUMS, dtype=torch.float32, device=device)
        # Counters must be 0 before a launch; the last program to arrive sets them back.
        self.arrived = torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)
        most_tiles = max(self.max_tiles(tokens) for _, tokens in used)
        self.summed = torch.zeros(MAX_TARGETS, most_tiles, dtype=torch.int32, device=device)
        self._groups: dict[tuple[OutputSlice, ...], LaunchGroup] = {}
        self.norm_pages = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)
        self._has_norms = False
        # Read where adapters have factors of experts alone.
        self.slots = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)

    def form(self, num_tokens: int) -> Form:
        """Return how a step of so many tokens is cut."""
        return next(form for form in self.forms if num_tokens <= form.max_tokens)

    def max_tiles(self, num_tokens: int) -> int:
        """Return the most tiles that any mix of so many tokens is cut into."""
        # n tokens of a slot give at most one tile, and one more for each whole tile beyond.
        form = self.form(num_tokens)
        distinct = min(self.bank.size.slots + (form.gated is not None), num_tokens)
        return distinct + (num_tokens - distinct) // form.tile_tokens

    def update(self, slots: Sequence[int], lengths: Sequence[int]) -> int:
        """Write the next step's tiles: a slot (-1: base) and a length for each row, in x's order.

        Returns their number. A captured step is padded with rows of slot -1.
        """
        of_token = np.repeat(np.asarray(slots, dtype=np.int32), np.asarray(lengths))
        assert len(of_token) <= self.max_tokens, (len(of_token), self.max_tokens)
        form, most = self.form(len(of_token)), self.max_tiles(len(of_token))
        records, num_tiles = cut_tiles(of_token, form.tile_tokens, most, form.gated is not None)
        self._copy(self.records, records.reshape(-1))
        self._update_norms(of_token)
        if self.bank.changes(slots, (ProjectionKind.EXPERTS,)):
            self._copy(self.slots, of_token)
        return num_tiles

    def _update_norms(self, of_token: npt.NDArray[np.int32]) -> None:
        """Write each token's page of norms; nothing where no token of this step or the last has."""
        index, bank = self.bank.norms, self.bank
        if index is None:
            return
        slots = np.unique(of_token)
        pages = {slot: bank.page_of(slot, index) for slot in slots[slots >= 0].tolist()}
        had, self._has_norms = self._has_norms, max(pages.values(), default=-1) >= 0
        if not (had or self._has_norms):
            return
        found = np.full(self.max_tokens, -1, dtype=np.int32)
        for slot, page in pages.items():
            found[: len(of_token)][of_token == slot] = page
        self._copy(self.norm_pages, found)

    @staticmethod
    def _copy(buffer: torch.Tensor, values: npt.NDArray[np.int32]) -> None:
        """Queue a copy of the values to a buffer's beginning."""
        host = torch.from_numpy(values)
        if buffer.device.type == "cuda":
            # torch gives pinned memory back only after the copy: two steps may be in flight.
            host = host.pin_memory()
        buffer[: len(host)].copy_(host, non_blocking=True)

    def group(self, targets: tuple[OutputSlice, ...]) -> LaunchGroup:
        """Return what a launch for these targets reads, made once."""
        found = self._groups.get(targets)
        if found is None:
            found = self._groups[targets] = group_of(self.bank, targets, len(self._groups))
        return found

    def _used_forms(self) -> list[tuple[Form, int]]:
        """Return each form that steps may take, with the most tokens of such a step."""
        used = []
        smaller = 0
        for form in self.forms:
            if smaller < self.max_tokens:
                used.append((form, min(form.max_tokens, self.max_tokens)))
            smaller = form.max_tokens
        return used
