"""A constrained request's answer is the oracle's, whatever runs beside it and however it runs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.wire.sampling import Sampling
from modeling.runner.forward import PagedForward
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank, TensorParallel
from tests.checkpoints import (
    AdapterRecipe,
    load_adapted_oracle,
    load_oracle,
    oracle_logits,
    write_adapter,
    write_llama,
)
from tests.fakes import EOS, token_id, write_tokenizer
from tests.modeling.constrained import (
    DRAWN,
    ENDS,
    FREE,
    GOES_ON,
    NUM_TOKENS,
    PROMPTS,
    WEIGHED,
)
from tests.modeling.padded import generate_padded, padded_runner
from tests.modeling.parity.comparison import BLOCK_SIZE, NUM_BLOCKS, WHOLE, engine_config, place_all
from tests.modeling.runner.test_cuda_graphs import capture_on_cpu
from tests.modeling.stepping import Asked, generate
from tests.ranks import run_ranks

llguidance = pytest.importorskip("llguidance")

KINDS = (FREE, ENDS, GOES_ON, DRAWN, WEIGHED)

CPU = torch.device("cpu")


class Setup:
    """A model with a tokenizer that spells JSON, two adapters over it, and what the oracle says."""

    def __init__(self, root: Path) -> None:
        model = root / "model"
        model.mkdir()
        self.eos = token_id(write_tokenizer(model), EOS)
        self.model = write_llama(model, vocab_size=336, eos_token_id=self.eos)
        recipes = [AdapterRecipe(r=8, seed=2), AdapterRecipe(r=3, target_modules=("q_proj",))]
        self.adapters = [write_adapter(root / f"a{i}", model, r) for i, r in enumerate(recipes)]
        self.plain = self.runner(SingleRank())
        self.captured = self.runner(SingleRank())
        self.captured._decode_graphs = capture_on_cpu(self.captured)
        self._models = [load_adapted_oracle(model, folder) for folder in self.adapters]
        self._models.append(load_oracle(model))
        self._tokenizer = llguidance.LLTokenizer(
            str(model / "tokenizer.json"), n_vocab=336, eos_token=[self.eos]
        )
        self.expected = lru_cache(self._expected)

    def runner(self, group: TensorParallel) -> ModelRunner:
        """A runner with the adapters at their slots."""
        runner = load_paged(engine_config(self.model), group, CPU).allocate()
        place_all(runner, self.adapters)
        return runner

    def _expected(self, prompt: int, slot: int, kind: int) -> tuple[int, ...]:
        """The oracle's output, up to its end; where there is no oracle, the runner's alone."""
        params = KINDS[kind]
        if params.temperature or params.penalised:
            request = Asked(PROMPTS[prompt], NUM_TOKENS, slot, params)
            [answer] = generate(self.plain, [request], NUM_BLOCKS, BLOCK_SIZE)
            return self.until_end(answer.tokens)
        return self.until_end(self._greedy(PROMPTS[prompt], self._models[slot], params))

    def until_end(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """What a scheduler takes of a row's tokens."""
        end = tokens.index(self.eos) + 1 if self.eos in tokens else len(tokens)
        return tuple(tokens[:end])

    def _greedy(self, prompt: Sequence[int], model: Any, params: Sampling) -> list[int]:
        """One whole forward and one mask a token."""
        tokens = list(prompt)
        schema = params.json_schema
        grammar = (
            llguidance.LLMatcher.grammar_from_json_schema(schema) if schema else params.grammar
        )
        matcher = llguidance.LLMatcher(self._tokenizer, grammar) if params.constraint else None
        while len(tokens) < len(prompt) + NUM_TOKENS and tokens[-1] != self.eos:
            logits = oracle_logits(model, tokens)[-1]
            if matcher is not None:
                bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
                allowed = np.unpackbits(bits, bitorder="little", count=len(logits))
                logits[torch.from_numpy(allowed == 0)] = float("-inf")
            best = logits.topk(2).values
            assert best[0] - best[1] > 1e-3, "too close to tell right from wrong"
            tokens.append(int(logits.argmax()))
            assert matcher is None or matcher.consume_token(tokens[-1])
        return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return Setup(tmp_path_factory.mktemp("constrained"))


Row = tuple[int, int, int]
"""Which prompt, slot and kind."""

MIX: list[Row] = [(0, -1, 1), (1, 0, 2), (2, 1, 1), (1, -1, 0), (0, 1, 4), (2, 0, 3), (1, 1, 2)]


def request_of(row: Row, **changes: Any) -> Asked:
    prompt, slot, kind = row
    return Asked(PROMPTS[prompt], NUM_TOKENS, slot, KINDS[kind], **changes)


@st.composite
def mixes(draw: st.DrawFn) -> tuple[list[Row], list[Asked]]:
    """Rows that join whenever, in chunks, and may be preempted amid their answers."""
    row = st.tuples(st.integers(0, 2), st.integers(-1, 1), st.integers(0, len(KINDS) - 1))
    rows = draw(st.lists(row, min_size=1, max_size=6))
    requests = [
        request_of(
            each,
            chunk=draw(st.sampled_from([1, 3, 16, WHOLE])),
            joins_at=draw(st.integers(0, 6)),
            rejoins_at=draw(st.one_of(st.none(), st.integers(1, 6))),
        )
        for each in rows
    ]
    return rows, requests


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(mix=mixes(), captured=st.booleans())
def test_any_mix(setup: Setup, mix: tuple[list[Row], list[Asked]], captured: bool) -> None:
    rows, requests = mix
    runner = setup.captured if captured else setup.plain
    answers = generate(runner, requests, NUM_BLOCKS, BLOCK_SIZE)
    found = [setup.until_end(answer.tokens) for answer in answers]
    assert found == [setup.expected(*row) for row in rows]


def test_constrained_steps_are_replayed(setup: Setup) -> None:
    before = setup.captured.num_captured
    requests = [request_of(row) for row in MIX]
    answers = generate(setup.captured, requests, NUM_BLOCKS, BLOCK_SIZE)
    assert setup.captured.num_captured - before == NUM_TOKENS - 1
    assert [setup.until_end(a.tokens) for a in answers] == [setup.expected(*row) for row in MIX]


def test_two_ranks(setup: Setup) -> None:
    """Masks are made on each of them."""
    requests = [request_of(row, chunk=5, rejoins_at=3 + i) for i, row in enumerate(MIX)]

    def tokens(group: TensorParallel) -> list[tuple[int, ...]]:
        answers = generate(setup.runner(group), requests, NUM_BLOCKS, BLOCK_SIZE)
        return [setup.until_end(answer.tokens) for answer in answers]

    expected = [setup.expected(*row) for row in MIX]
    assert run_ranks(2, tokens) == [expected, expected]


def test_padded_models(setup: Setup) -> None:
    """The same model by transformers' own code."""
    runner = padded_runner(setup.model)
    rows: list[Row] = [(prompt, -1, kind) for prompt, _, kind in MIX]
    requests = [request_of(row, joins_at=i, rejoins_at=2 + i) for i, row in enumerate(rows)]
    answers = generate_padded(runner, requests)
    found = [setup.until_end(answer.tokens) for answer in answers]
    assert found == [setup.expected(*row) for row in rows]


def test_steps_are_launched_before_masks_are_computed(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the device computes while the host waits for the step before and makes the masks."""
    runner, order = setup.runner(SingleRank()), list[str]()
    masks = runner._grammars.masks

    def launching(forward: Any) -> Any:
        def launch(*args: Any) -> Any:
            order.append("forward")
            return forward(*args)

        return launch

    def ask(*args: Any) -> Any:
        order.append("masks")
        return masks(*args)

    for name in ("hidden", "tail"):
        monkeypatch.setattr(PagedForward, name, launching(getattr(PagedForward, name)))
    monkeypatch.setattr(runner._grammars, "masks", ask)
    requests = [replace(request_of(row), num_tokens=5) for row in MIX]
    generate(runner, requests, NUM_BLOCKS, BLOCK_SIZE)
    assert order == ["forward", "masks"] * 5
