"""Answers that are JSON of a schema: which tokens may come next, told by llguidance's matchers.

A matcher must know every token of an answer before it allows the next, so a step with such rows
waits for the tokens of the step before. Matchers are made beside the steps, on a thread.
"""

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger("loray.grammars")


@dataclass
class _Answer:
    """One place's matcher in the making, and how many tokens it was told."""

    matcher: "Future[LLMatcher]"
    num_tokens: int = 0


class Grammars:
    """The matchers of all places of one rank; all ranks are told the same and allow the same."""

    def __init__(self, folder: Callable[[], Path], vocab_size: int) -> None:
        """Begin to read the tokenizer in the model's folder, if llguidance is installed."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._answers: dict[int, _Answer] = {}
        self._pool: ThreadPoolExecutor | None = None
        if find_spec("llguidance") is not None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")
            self._tokenizer = self._pool.submit(lambda: _tokenizer(folder(), vocab_size))

    def join(self, place: int, schema: str) -> None:
        """Begin a place's answer; without a schema, forget who had the place before."""
        self._answers.pop(place, None)
        if schema and self._pool is not None:
            self._answers[place] = _Answer(self._pool.submit(self._matcher, schema))

    def num_tokens(self, place: int) -> int:
        """How many tokens of its answer a place's matcher was told."""
        answer = self._answers.get(place)
        return 0 if answer is None else answer.num_tokens

    def allowed(self, place: int, tokens: Sequence[int]) -> npt.NDArray[np.int32]:
        """Which tokens may follow once these came, a bit each; after the end only its token."""
        answer = self._answers.get(place)
        try:
            if answer is None:
                raise RuntimeError("llguidance is not installed")
            matcher = answer.matcher.result()
            answer.num_tokens += len(tokens)
            matcher.consume_tokens(list(tokens))
            return np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        except Exception:
            # The ingress has compiled the schema before, so this is our fault or the tokenizer's.
            # A rank must not stop over a request, and text that no schema held is not an answer.
            logger.exception("place %d cannot follow its schema: its answer ends here", place)
            return self._nothing_more()

    def _nothing_more(self) -> npt.NDArray[np.int32]:
        """Allow the tokens that end an answer, and no other."""
        bits = np.zeros(-(-self._vocab_size // 32), dtype=np.uint32)
        for end in self._ends():
            bits[end // 32] |= np.uint32(1 << (end % 32))
        return bits.view(np.int32)

    def _ends(self) -> list[int]:
        return [end for end in _end_ids(self._folder()) if end < self._vocab_size]

    def _matcher(self, schema: str) -> "LLMatcher":
        from llguidance import LLMatcher

        return LLMatcher(self._tokenizer.result(), LLMatcher.grammar_from_json_schema(schema))


def _tokenizer(folder: Path, vocab_size: int) -> "LLTokenizer":
    from llguidance import LLTokenizer

    ends = [id for id in _end_ids(folder) if id < vocab_size]
    path = str(folder / "tokenizer.json")
    return LLTokenizer(path, n_vocab=vocab_size, eos_token=ends or None)


def _end_ids(folder: Path) -> list[int]:
    """The tokens that end an answer: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return found if isinstance(found, list) else [found]
    return []
