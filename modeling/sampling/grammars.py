"""Answers that fit a JSON schema or a grammar: llguidance tells which tokens may come next.

A matcher must know every token of an answer before it allows the next. A step's own computation
needs no such knowledge, so masks are asked for once it is launched: then nothing but the end of
the step before is waited for, which the next plan waits for anyway, and the masks are made while
the device computes. Matchers are prepared beside the steps, before their requests join.
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

from configs.grammars import INSTALL, end_ids, matcher_of, reason, tokenizer_of
from modeling.transfer import HostCopy

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

# A mask takes some 10 us of a core; more threads than this cost more to wake than they save.
_MOST_THREADS = 8


class _Samples:
    """The tokens that one step sampled, on their way to the host."""

    def __init__(self, tokens: Tensor) -> None:
        self._copy = HostCopy([tokens])

    @cached_property
    def values(self) -> list[int]:
        """Wait for them."""
        [tokens] = self._copy.wait()
        values: list[int] = tokens.tolist()
        return values


@dataclass
class _Answer:
    """One place's matcher, and the tokens that it was not told yet.

    number: what the matcher was prepared under. known: tokens that the place's request brought
    along. sampled: then those of steps, each an index into what the step sampled.
    """

    number: int
    matcher: "LLMatcher | None"
    known: list[int]
    sampled: list[tuple[_Samples, int]] = field(default_factory=list)

    def pending(self) -> list[int]:
        """The tokens that the matcher was not told yet; waits for those that are on their way."""
        news = self.known + [step.values[index] for step, index in self.sampled]
        self.known, self.sampled = [], []
        return news


class Grammars:
    """The matchers of all places of one rank; all ranks are told the same and allow the same.

    Copies of a matcher share its lexer, and what one has come across is cheaper for the next. So
    they are told and asked one after the other, in the order of the rows: then what is counted
    against their limits is the same on every rank.
    """

    def __init__(self, folder: Callable[[], Path], vocab_size: int) -> None:
        """Begin to read the tokenizer in the model's folder, if llguidance is installed."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._matchers: dict[int, _Answer] = {}
        self._prepared: dict[int, LLMatcher] = {}
        self._faults: dict[int, str] = {}
        self._tokenizer: Future[LLTokenizer] | None = None
        self._executors: tuple[LLExecutor, LLExecutor] | None = None
        if find_spec("llguidance") is not None:
            pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")
            self._tokenizer = pool.submit(lambda: tokenizer_of(folder(), vocab_size))

    def prepare(self, number: int, constraint: str, gone: Sequence[int] = ()) -> str:
        """Make a constraint's matcher and forget those that are `gone`; beside the steps.

        Returns what is wrong, "" for nothing. The first mask, the largest, is made here too.
        """
        for each in gone:
            self._prepared.pop(each, None)
        if self._tokenizer is None:
            return f"the ranks cannot hold answers to anything: {INSTALL}"
        try:
            matcher = matcher_of(self._tokenizer.result(), constraint)
        except ValueError as error:
            return f"the answer cannot be held to its constraint: {reason(str(error))}"
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            return _too_much(first)
        self._prepared[number] = matcher
        return ""

    def join(self, place: int, number: int, known: Sequence[int] = ()) -> None:
        """Begin a place's answer, or go on after its `known` tokens, under what was prepared.

        Without a number (-1), forget who had the place before.
        """
        self._matchers.pop(place, None)
        if number >= 0:
            prepared = self._prepared.get(number)
            own = prepared.deep_copy() if prepared is not None else None
            self._matchers[place] = _Answer(number, own, list(known))

    def take_faults(self, places: Sequence[int]) -> list[tuple[int, str]] | None:
        """Whose answers could not be followed since this was asked last, by index in `places`."""
        if not self._faults:
            return None
        faults, self._faults = self._faults, {}
        return [(row, faults[place]) for row, place in enumerate(places) if place in faults]

    def advance(self, places: Sequence[int], tokens: Tensor) -> None:
        """Note what a step samples for these places, tokens int64 [n]; waits for nothing."""
        held = [(index, place) for index, place in enumerate(places) if place in self._matchers]
        if not held:
            return
        samples = _Samples(tokens)
        for index, place in held:
            self._matchers[place].sampled.append((samples, index))

    def masks(self, places: Sequence[int], device: torch.device) -> Tensor:
        """Which tokens these places may choose next: int32 [n, words], a bit for each token.

        Waits for their steps' tokens, and for nothing else that the device was given since.
        After an answer's end only the tokens that end it are allowed, and so where it cannot be
        followed: `take_faults` tells of that.
        """
        shape = (len(places), -(-self._vocab_size // 32))
        words = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        host: npt.NDArray[np.int32] = words.numpy()
        following = []
        for row, place in enumerate(places):
            matcher = self._accepted(place)
            if matcher is not None:
                following.append((matcher, row))
        self._fill(following, [self._matchers[places[row]].number for _, row in following], host)
        for matcher, row in following:
            if matcher.is_error():
                self._faults[places[row]] = _too_much(matcher)
        for row, place in enumerate(places):
            if place in self._faults:
                host[row] = self._nothing_more()
        return words.to(device, non_blocking=True)

    def _fill(
        self,
        following: list[tuple["LLMatcher", int]],
        numbers: list[int],
        host: npt.NDArray[np.int32],
    ) -> None:
        """Write the matchers' masks into their rows; those that share nothing on several threads"""
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

    def _accepted(self, place: int) -> "LLMatcher | None":
        """A place's matcher, told all there is; None where there can be none, and that is noted."""
        answer = self._matchers.get(place)
        if answer is None or answer.matcher is None:
            self._faults[place] = "the answer's constraint was not prepared"
            return None
        # Rows planned beyond an answer's end bring tokens that nobody reads.
        news = answer.pending()
        if news and not answer.matcher.is_stopped():
            answer.matcher.consume_tokens(news)
        if answer.matcher.is_error():
            self._faults[place] = _too_much(answer.matcher)
            return None
        return answer.matcher

    def _nothing_more(self) -> npt.NDArray[np.int32]:
        """Allow the tokens that end an answer, and no other."""
        bits = np.zeros(-(-self._vocab_size // 32), dtype=np.uint32)
        for end in self._ends():
            bits[end // 32] |= np.uint32(1 << (end % 32))
        return bits.view(np.int32)

    def _ends(self) -> list[int]:
        return [end for end in end_ids(self._folder()) if end < self._vocab_size]


def _too_much(matcher: "LLMatcher") -> str:
    return f"the answer cannot be held to its constraint any further: {reason(matcher.get_error())}"
