"""Structured output: llguidance computes which tokens a JSON schema or a grammar allows next.

An answer may have a free part before it must fit: reasoning. Its end is watched here.

A matcher must know every token of an output before it allows the next. The step's forward pass does
not need the masks, so they are computed after its launch, while the device computes: they wait only
for the end of the step before, as the next plan does anyway. Matchers are prepared beside the
steps, before their requests join.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from configs.architectures.select import end_token_ids
from configs.grammars import INSTALL, matcher_of, reason, tokenizer_of
from configs.wire.sampling import Sampling
from modeling.transfer import HostCopy

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

# A mask takes some 10 us of a core; more threads than this cost more to wake than they save.
_MOST_THREADS = 8


class _Samples:
    """The tokens that one step sampled, while they are copied to the host."""

    def __init__(self, tokens: Tensor) -> None:
        self._copy = HostCopy([tokens])

    @cached_property
    def values(self) -> list[int]:
        """Wait for the tokens and return them."""
        [tokens] = self._copy.wait()
        values: list[int] = tokens.tolist()
        return values


class _FreeText:
    """The part of an answer before its constraint begins: a model's reasoning.

    begin: the answer has such a part only if this is its first token; -1: in any case.
    end: the tokens that end it.
    """

    def __init__(self, begin: int, end: tuple[int, ...]) -> None:
        self.begin = begin
        self._end = end
        self._newest: list[int] = []

    def rest(self, tokens: list[int]) -> list[int] | None:
        """Add tokens; returns those after this part, None while it lasts."""
        if self.begin >= 0 and tokens:
            if tokens[0] != self.begin:
                return tokens
            self.begin = -1
        for index, token in enumerate(tokens):
            self._newest = [*self._newest, token][-len(self._end) :]
            if tuple(self._newest) == self._end:
                return tokens[index + 1 :]
        return None


@dataclass
class _SlotMatcher:
    """One batch slot's matcher, and the tokens that it has not consumed yet.

    number: the key under which the matcher was prepared.
    matcher: None if it was not prepared.
    known: tokens of the request when it joined.
    sampled: tokens of steps since, each an index into what the step sampled.
    free: the part of the answer before the constraint; None once it has begun.
    """

    number: int
    matcher: "LLMatcher | None"
    known: list[int]
    sampled: list[tuple[_Samples, int]] = field(default_factory=list)
    free: _FreeText | None = None

    def pending(self) -> list[int]:
        """Take the tokens that the matcher has not consumed; waits for copies from the device."""
        tokens = self.known + [step.values[index] for step, index in self.sampled]
        self.known, self.sampled = [], []
        return tokens


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
        self._matchers: dict[int, _SlotMatcher] = {}
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
            self._matchers[slot] = _SlotMatcher(number, own, list(known))
            if sampling is not None and sampling.free_until:
                self._matchers[slot].free = _FreeText(sampling.free_from, sampling.free_until)

    def take_faults(self, slots: Sequence[int]) -> list[tuple[int, str]] | None:
        """Take (index in `slots`, reason) of matchers that failed since the last call."""
        if not self._faults:
            return None
        faults, self._faults = self._faults, {}
        return [(row, faults[slot]) for row, slot in enumerate(slots) if slot in faults]

    def advance(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Record what a step samples for these batch slots, int64 [n], without waiting for it."""
        matched = [(index, slot) for index, slot in enumerate(slots) if slot in self._matchers]
        if not matched:
            return
        samples = _Samples(tokens)
        for index, slot in matched:
            self._matchers[slot].sampled.append((samples, index))

    def masks(self, slots: Sequence[int], device: torch.device) -> Tensor:
        """Return the tokens that these batch slots may sample next as bits, int32 [n, words].

        Waits for their tokens of earlier steps, but not for work queued since. After an output's
        end, and after a fault that `take_faults` reports, only end tokens are allowed.
        """
        shape = (len(slots), -(-self._vocab_size // 32))
        # Pinned, or this thread would wait for all queued steps in the copy at the end.
        words = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        host: npt.NDArray[np.int32] = words.numpy()
        following = []
        free = []
        for row, slot in enumerate(slots):
            matcher = self._accepted(slot)
            if matcher is not None:
                following.append((matcher, row))
            elif slot not in self._faults:
                free.append(row)
        self._compute(following, [self._matchers[slots[row]].number for _, row in following], host)
        for matcher, row in following:
            if matcher.is_error():
                self._faults[slots[row]] = _too_much(matcher)
        for row in free:
            host[row] = ~self._only_end_tokens
        for row, slot in enumerate(slots):
            if slot in self._faults:
                host[row] = self._only_end_tokens
            else:
                self._allow_begin(slot, host[row])
        return words.to(device, non_blocking=True)

    def _compute(
        self,
        following: list[tuple["LLMatcher", int]],
        numbers: list[int],
        host: npt.NDArray[np.int32],
    ) -> None:
        """Write the matchers' masks into their rows, on several threads where none are shared."""
        if not following:
            return
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._executors is None:
            threads = min(_MOST_THREADS, os.cpu_count() or 1)
            self._executors = (LLExecutor(threads), LLExecutor(1))
        users = Counter(numbers)
        alone = [each for each, at in zip(following, numbers, strict=True) if users[at] == 1]
        sharing = [each for each, at in zip(following, numbers, strict=True) if users[at] > 1]
        for executor, group in zip(self._executors, (alone, sharing), strict=True):
            if group:
                fill_next_token_bitmask_par(executor, group, host)

    def _accepted(self, slot: int) -> "LLMatcher | None":
        """Return a batch slot's matcher after all its tokens.

        None while its answer is free, and, with a fault, if it failed.
        """
        state = self._matchers.get(slot)
        if state is None or state.matcher is None:
            self._faults[slot] = "the constraint was not prepared"
            return None
        # A step that was planned ahead may sample tokens beyond an output's end; they are dropped.
        tokens = state.pending()
        if state.free is not None:
            rest = state.free.rest(tokens)
            if rest is None and state.free.begin < 0:
                return None
            if rest is not None:
                state.free = None
            tokens = rest or []
        if tokens and not state.matcher.is_stopped():
            state.matcher.consume_tokens(tokens)
        if state.matcher.is_error():
            self._faults[slot] = _too_much(state.matcher)
            return None
        return state.matcher

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


def _too_much(matcher: "LLMatcher") -> str:
    return f"the constraint cannot be followed any further: {reason(matcher.get_error())}"
