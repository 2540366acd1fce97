"""Answers that fit a JSON schema or a grammar: llguidance tells which tokens may come next.

A matcher must know every token of an answer before it allows the next. A step's own computation
needs no such knowledge, so masks are asked for once it is launched: then nothing but the end of
the step before is waited for, which the next plan waits for anyway, and the masks are made while
the device computes. Matchers are made beside the steps, on a thread.
"""

import logging
import os
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

from configs.grammars import end_ids, matcher_of, tokenizer_of
from modeling.transfer import HostCopy

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

logger = logging.getLogger("loray.grammars")


# Compiled constraints that are kept for those who ask for the same again.
_KEPT = 64

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
    """One place's matcher in the making, and the tokens that it was not told yet.

    known: those that the place's request brought along. sampled: then those of steps, each an
    index into what the step sampled.
    """

    matcher: "Future[LLMatcher]"
    known: list[int]
    sampled: list[tuple[_Samples, int]] = field(default_factory=list)

    def news(self) -> list[int]:
        """The tokens that the matcher was not told yet; waits for those that are on their way."""
        news = self.known + [step.values[index] for step, index in self.sampled]
        self.known, self.sampled = [], []
        return news

    def told(self, news: list[int]) -> "LLMatcher":
        """The matcher, told these tokens too."""
        matcher = self.matcher.result()
        # Rows planned beyond an answer's end bring tokens that nobody reads.
        if news and not matcher.is_stopped():
            matcher.consume_tokens(news)
        return matcher


class Grammars:
    """The matchers of all places of one rank; all ranks are told the same and allow the same."""

    def __init__(self, folder: Callable[[], Path], vocab_size: int) -> None:
        """Begin to read the tokenizer in the model's folder, if llguidance is installed."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._answers: dict[int, _Answer] = {}
        self._compiled: dict[str, LLMatcher] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        if find_spec("llguidance") is not None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")
            self._tokenizer = self._pool.submit(lambda: tokenizer_of(folder(), vocab_size))

    def join(self, place: int, constraint: str, known: Sequence[int] = ()) -> None:
        """Begin a place's answer, or go on after its `known` tokens.

        Without a constraint, forget who had the place before.
        """
        self._answers.pop(place, None)
        if constraint and self._pool is not None:
            matcher = self._pool.submit(self._matcher, constraint)
            self._answers[place] = _Answer(matcher, list(known))

    @property
    def num_compiled(self) -> int:
        """How many constraints are kept for those who ask for the same again."""
        return len(self._compiled)

    def follow(self, places: Sequence[int], tokens: Tensor) -> None:
        """Note what a step samples for these places, tokens int64 [n]; waits for nothing."""
        held = [(index, place) for index, place in enumerate(places) if place in self._answers]
        if not held:
            return
        samples = _Samples(tokens)
        for index, place in held:
            self._answers[place].sampled.append((samples, index))

    def masks(self, places: Sequence[int], device: torch.device) -> Tensor:
        """Which tokens these places may choose next: int32 [n, words], a bit for each token.

        Waits for their steps' tokens, and for nothing else that the device was given since.
        After an answer's end only the tokens that end it are allowed.
        """
        shape = (len(places), -(-self._vocab_size // 32))
        words = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        host: npt.NDArray[np.int32] = words.numpy()
        following = []
        for row, place in enumerate(places):
            matcher = self._told(place)
            if matcher is None:
                host[row] = self._nothing_more()
            else:
                following.append((matcher, row))
        self._fill(following, host)
        return words.to(device, non_blocking=True)

    def _fill(self, following: list[tuple["LLMatcher", int]], host: npt.NDArray[np.int32]) -> None:
        """Write the matchers' masks into their rows, on several threads."""
        if not following:
            return
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        if self._executor is None:
            self._executor = LLExecutor(min(_MOST_THREADS, os.cpu_count() or 1))
        fill_next_token_bitmask_par(self._executor, following, host)

    def _told(self, place: int) -> "LLMatcher | None":
        """A place's matcher, told all there is; None where there can be none."""
        answer = self._answers.get(place)
        # Outside: a device that failed is not the schema's fault.
        news = answer.news() if answer is not None else []
        try:
            if answer is None:
                raise RuntimeError("llguidance is not installed")
            return answer.told(news)
        except Exception:
            # The ingress has compiled the schema before, so this is our fault or the tokenizer's.
            # A rank must not stop over a request, and text that no schema held is not an answer.
            logger.exception("place %d cannot follow its schema: its answer ends here", place)
            return None

    def _nothing_more(self) -> npt.NDArray[np.int32]:
        """Allow the tokens that end an answer, and no other."""
        bits = np.zeros(-(-self._vocab_size // 32), dtype=np.uint32)
        for end in self._ends():
            bits[end // 32] |= np.uint32(1 << (end % 32))
        return bits.view(np.int32)

    def _ends(self) -> list[int]:
        return [end for end in end_ids(self._folder()) if end < self._vocab_size]

    def _matcher(self, constraint: str) -> "LLMatcher":
        """A matcher at the start of its answer; one that was asked for lately is copied."""
        if constraint not in self._compiled:
            self._compiled[constraint] = matcher_of(self._tokenizer.result(), constraint)
            if len(self._compiled) > _KEPT:
                del self._compiled[next(iter(self._compiled))]
        return self._compiled[constraint].deep_copy()
