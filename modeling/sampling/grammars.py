"""Structured output: llguidance computes which tokens a JSON schema or a grammar allows next.

An answer may have a free part before it must fit: reasoning. A row with a draft gets a mask for
each of its samples, as if the draft's tokens before it were right.

A matcher must know every token of an output before it allows the next. The step's forward pass does
not need the masks, so they are computed after its launch, while the device computes: they wait only
for the end of the step before, as the next plan does anyway. Matchers are prepared beside the
steps, before their requests join.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from configs.architectures.select import end_token_ids
from configs.grammars import INSTALL, matcher_of, reason, tokenizer_of
from configs.wire.plan import StepRow
from configs.wire.sampling import Sampling
from modeling.sampling.slot_matchers import AnswerRow, FreeText, SlotMatcher, StepSamples

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

# A mask takes some 10 us of a core; more threads than this cost more to wake than they save.
_MOST_THREADS = 8


class _Part(NamedTuple):
    """Masks that a matcher gives: one row of the result, and one behind each token of a draft.

    number: the key under which the matcher was prepared.
    """

    slot: int
    number: int
    matcher: "LLMatcher"
    row: int
    drafts: tuple[int, ...]


class Grammars:
    """The matchers of all batch slots of one rank; all ranks get the same calls and results.

    Copies of a matcher share its lexer and its caches: what one copy has computed is cheap for the
    next one. So copies run one after the other, in the order of the rows: then the cost that counts
    against their limits is the same on every rank.
    """

    def __init__(self, folder: Callable[[], Path], vocab_size: int) -> None:
        """Start to read the tokenizer in the model's folder, if llguidance is installed."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._matchers: dict[int, SlotMatcher] = {}
        self._prepared: dict[int, LLMatcher] = {}
        self._faults: dict[int, str] = {}
        self._tokenizer: Future[LLTokenizer] | None = None
        self._executors: tuple[LLExecutor, LLExecutor] | None = None
        if find_spec("llguidance") is not None:
            pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")
            self._tokenizer = pool.submit(lambda: tokenizer_of(folder(), vocab_size))

    def prepare(self, number: int, constraint: str, gone: Sequence[int] = ()) -> str:
        """Make a constraint's matcher and remove those that are `gone`; runs beside the steps.

        Returns what is wrong, or "". The first mask, the most expensive, is computed here too.
        """
        for each in gone:
            self._prepared.pop(each, None)
        if self._tokenizer is None:
            return f"the ranks cannot follow constraints: {INSTALL}"
        try:
            matcher = matcher_of(self._tokenizer.result(), constraint)
        except ValueError as error:
            return f"the constraint cannot be followed: {reason(str(error))}"
        # On a copy, which shares its caches with the matcher and is then discarded.
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            return _too_much(first)
        self._prepared[number] = matcher
        return ""

    def join(
        self, slot: int, number: int, known: Sequence[int] = (), sampling: Sampling | None = None
    ) -> None:
        """Start a batch slot's output after its `known` tokens, with the prepared matcher `number`.

        Number -1: only remove the slot's matcher. sampling: has the answer's free part.
        """
        self._matchers.pop(slot, None)
        if number >= 0:
            prepared = self._prepared.get(number)
            own = prepared.deep_copy() if prepared is not None else None
            self._matchers[slot] = SlotMatcher(number, own, list(known))
            if sampling is not None and sampling.free_until:
                self._matchers[slot].free = FreeText(sampling.free_from, sampling.free_until)

    def take_faults(self, slots: Sequence[int]) -> list[tuple[int, str]] | None:
        """Take (index in `slots`, reason) of matchers that failed since the last call."""
        if not self._faults:
            return None
        faults, self._faults = self._faults, {}
        return [(row, faults[slot]) for row, slot in enumerate(slots) if slot in faults]

    def expect(self, rows: Sequence[StepRow], prompt_lengths: npt.NDArray[np.int64]) -> None:
        """Learn the next step's rows, some with drafts; without it none has one.

        prompt_lengths: by batch slot.
        """
        if not self._matchers:
            return
        for row in rows:
            if row.samples and (state := self._matchers.get(row.batch_slot)) is not None:
                first = row.start + row.length - len(row.drafts)
                state.row = AnswerRow(first - int(prompt_lengths[row.batch_slot]), row.drafts)

    def advance(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Record what a step samples for these batch slots, int64 [n], without waiting for it.

        A slot is named for each of its tokens, one after the other.
        """
        matched = [
            (index, slot) for slot, index in _firsts(slots).items() if slot in self._matchers
        ]
        if not matched:
            return
        samples = StepSamples(tokens)
        for index, slot in matched:
            self._matchers[slot].sample(samples, index)

    def masks(self, slots: Sequence[int], device: torch.device) -> Tensor:
        """Return the tokens that these batch slots may sample next as bits, int32 [n, words].

        slots: as in `advance`. Waits for their tokens of earlier steps, but not for work queued
        since. After an output's end, after a draft's token that is not allowed, and after a fault
        that `take_faults` reports, only end tokens are allowed.
        """
        shape = (len(slots), -(-self._vocab_size // 32))
        # Pinned, or this thread would wait for all queued steps in the copy at the end.
        words = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        host: npt.NDArray[np.int32] = words.numpy()
        firsts = _firsts(slots)
        parts = [part for slot, row in firsts.items() for part in self._parts(slot, row, host)]
        self._compute(parts, host)
        for part in parts:
            if part.matcher.is_error():
                self._faults[part.slot] = _too_much(part.matcher)
        for row, slot in enumerate(slots):
            if slot in self._faults:
                host[row] = self._only_end_tokens
            elif row == firsts[slot]:
                self._allow_begin(slot, host[row])
        return words.to(device, non_blocking=True)

    def _parts(self, slot: int, row: int, host: npt.NDArray[np.int32]) -> list[_Part]:
        """Return which of a batch slot's masks are to be computed, after writing the others.

        row: the first of them in `host`.
        """
        state = self._accepted(slot)
        if state is None or state.matcher is None:
            return []
        drafts, is_void = state.row.drafts, state.is_void
        if drafts or is_void:
            host[row : row + 1 + len(drafts)] = self._only_end_tokens
        if is_void:
            return []
        if state.free is None:
            return [_Part(slot, state.number, state.matcher, row, drafts)]
        free, masked = state.free.masked(drafts)
        host[row + free.start : row + free.stop] = ~self._only_end_tokens
        # Two parts need a matcher each; a copy shares its caches.
        matchers = (state.matcher, *(state.matcher.deep_copy() for _ in masked[1:]))
        return [
            _Part(slot, state.number, matcher, row + part.offset, part.drafts)
            for matcher, part in zip(matchers, masked, strict=False)
        ]

    def _compute(self, parts: Sequence[_Part], host: npt.NDArray[np.int32]) -> None:
        """Write the parts' masks into their rows, on several threads where no lexer is shared."""
        if not parts:
            return
        from llguidance import LLExecutor

        if self._executors is None:
            threads = min(_MOST_THREADS, os.cpu_count() or 1)
            self._executors = (LLExecutor(threads), LLExecutor(1))
        users = Counter(part.number for part in parts)
        alone = [part for part in parts if users[part.number] == 1]
        sharing = [part for part in parts if users[part.number] > 1]
        for executor, group in zip(self._executors, (alone, sharing), strict=True):
            _fill(executor, group, host)

    def _accepted(self, slot: int) -> SlotMatcher | None:
        """Return a batch slot's matcher after all its tokens; None, with a fault, if it failed."""
        state = self._matchers.get(slot)
        if state is None or state.matcher is None:
            self._faults[slot] = "the constraint was not prepared"
            return None
        # A step that was planned ahead may sample tokens beyond an output's end; they are dropped.
        tokens = state.pending()
        if state.free is not None:
            rest = state.free.rest(tokens)
            if rest is not None:
                state.free = None
            tokens = rest or []
        for token in tokens:
            if state.matcher.is_stopped():
                break
            state.matcher.consume_token(token)
        if state.matcher.is_error():
            self._faults[slot] = _too_much(state.matcher)
            return None
        return state

    def _allow_begin(self, slot: int, words: npt.NDArray[np.int32]) -> None:
        """Allow the token that begins a free part, while it may begin; changes `words`."""
        state = self._matchers[slot]
        if state.free is not None and state.free.begin >= 0:
            bits = words.view(np.uint32)
            bits[state.free.begin // 32] |= np.uint32(1 << (state.free.begin % 32))

    @cached_property
    def _only_end_tokens(self) -> npt.NDArray[np.int32]:
        """A mask that allows only the tokens that end an output."""
        bits = np.zeros(-(-self._vocab_size // 32), dtype=np.uint32)
        for end in end_token_ids(self._folder()):
            if end < self._vocab_size:
                bits[end // 32] |= np.uint32(1 << (end % 32))
        return bits.view(np.int32)


def _firsts(slots: Sequence[int]) -> dict[int, int]:
    """Where each slot is named first, in that order."""
    found: dict[int, int] = {}
    for index, slot in enumerate(slots):
        found.setdefault(slot, index)
    return found


def _fill(executor: "LLExecutor", parts: Sequence[_Part], host: npt.NDArray[np.int32]) -> None:
    """Write the parts' masks, as far as their drafts' tokens are allowed."""
    from llguidance.numpy import (
        fill_next_token_bitmask_par,
        fill_next_token_bitmask_par_with_draft_tokens,
    )

    plain = [(part.matcher, part.row) for part in parts if not part.drafts]
    drafted = [(part.matcher, part.row, list(part.drafts)) for part in parts if part.drafts]
    if plain:
        fill_next_token_bitmask_par(executor, plain, host)
    if drafted:
        fill_next_token_bitmask_par_with_draft_tokens(executor, drafted, host)


def _too_much(matcher: "LLMatcher") -> str:
    return f"the constraint cannot be followed any further: {reason(matcher.get_error())}"
