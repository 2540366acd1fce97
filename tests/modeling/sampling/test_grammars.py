"""Answers under a schema: every one is JSON that fits, whatever the model would say."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from configs.wire.sampling import Sampling
from modeling.runner.load_paged import load_paged
from modeling.sampling import slot_matchers
from modeling.sampling.grammars import Grammars
from modeling.sampling.history import TokenHistory
from modeling.sampling.sampler import sample_tokens
from modeling.sampling.tensors import sampling_tensors
from modeling.transfer import HostCopy
from sharding.group import SingleRank
from tests.checkpoints import write_llama
from tests.fakes import EOS, byte_level_tokenizer, token_id, write_tokenizer
from tests.modeling.parity.comparison import BLOCK_SIZE, NUM_BLOCKS, engine_config
from tests.modeling.stepping import Asked, generate

pytest.importorskip("llguidance")

CPU = torch.device("cpu")
WIDTH = 400
PERSON = json.dumps({
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"enum": [7, 77]}},
    "required": ["name", "age"],
    "additionalProperties": False,
})  # fmt: skip


class Ranks:
    """Rows over random logits: the same model for all, with a buffer as a rank has it."""

    def __init__(self, folder: Path, params: Sequence[Sampling]) -> None:
        self.tokenizer = write_tokenizer(folder)
        self.eos = token_id(self.tokenizer, EOS)
        (folder / "config.json").write_text(json.dumps({"eos_token_id": [self.eos]}))
        # A head has more rows than the tokenizer has tokens.
        self.vocab_size = self.tokenizer.get_vocab_size() + 9
        self.grammars = Grammars(lambda: folder, self.vocab_size)
        self.params = params
        self.buffer = torch.zeros(len(params) * WIDTH, dtype=torch.int64)
        self.lengths = [3] * len(params)
        self.prepared = {"": -1}
        for slot, sampling in enumerate(params):
            self.join(slot, sampling.constraint, sampling=sampling)

    def join(
        self,
        slot: int,
        constraint: str,
        known: Sequence[int] = (),
        sampling: Sampling | None = None,
    ) -> None:
        """As a scheduler has it: one matcher for all requests with the same constraint."""
        if constraint not in self.prepared:
            self.prepared[constraint] = len(self.prepared)
            assert self.grammars.prepare(self.prepared[constraint], constraint) == ""
        self.grammars.join(slot, self.prepared[constraint], known, sampling)

    def step(self, seed: int) -> list[int]:
        slots = np.arange(len(self.params))
        targets = slots * WIDTH + np.array(self.lengths)
        prompts = np.full(len(self.params), 3)
        history = TokenHistory(self.buffer, targets, prompts, slots, self.grammars)
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(1, self.vocab_size, generator=generator) * 2
        logits = logits.repeat(len(self.params), 1)
        sampling = sampling_tensors(self.params, self.lengths, CPU, history)
        sampled = sample_tokens(logits, sampling).tokens
        self.grammars.advance(slots.tolist(), sampled)
        tokens: list[int] = sampled.tolist()
        self.buffer[targets] = sampled
        self.lengths = [length + 1 for length in self.lengths]
        return tokens

    def answer(self, slot: int) -> list[int]:
        start = slot * WIDTH
        output: list[int] = self.buffer[start + 3 : start + self.lengths[slot]].tolist()
        return output[: output.index(self.eos)] if self.eos in output else output


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text


def test_answers_fit_their_schemas(tmp_path: Path) -> None:
    params = [
        Sampling(json_schema=PERSON),
        Sampling(temperature=1.0, seed=3, json_schema=PERSON),
        Sampling(temperature=0.7, seed=4, top_p=0.9, json_schema='{"enum": ["fox", [1, true]]}'),
        Sampling(),
    ]
    ranks = Ranks(tmp_path, params)
    steps = [ranks.step(seed) for seed in range(150)]
    for slot in (0, 1):
        person = json.loads(decoded(ranks.tokenizer, ranks.answer(slot)))
        assert person.keys() == {"name", "age"}
        assert person["age"] in (7, 77)
    assert json.loads(decoded(ranks.tokenizer, ranks.answer(2))) in ("fox", [1, True])
    # Rows that were planned beyond the end do no harm, and others are as they would be.
    assert {row[2] for row in steps[100:]} == {ranks.eos}
    alone = Ranks(tmp_path, [Sampling()])
    assert [alone.step(seed)[0] for seed in range(150)] == [row[3] for row in steps]


def test_an_answer_is_free_until_its_reasoning_ends(tmp_path: Path) -> None:
    schema = '{"enum": ["fox"]}'
    tokenizer = byte_level_tokenizer()
    begin, eos = token_id(tokenizer, "<think>"), token_id(tokenizer, EOS)
    end = tuple(tokenizer.encode("x!", add_special_tokens=False).ids)
    quote = tokenizer.encode('"fox"', add_special_tokens=False).ids
    assert len(end) == 2
    free = Sampling(json_schema=schema, free_until=end)
    ranks = Ranks(tmp_path, [free, msgspec.structs.replace(free, free_from=begin)])
    grammar = Ranks(tmp_path, [Sampling(json_schema=schema)]).grammars

    def allowed() -> list[list[int]]:
        words = ranks.grammars.masks([0, 1], CPU).numpy().view(np.uint8)
        return [np.flatnonzero(row).tolist() for row in np.unpackbits(words, 1, None, "little")]

    [first] = np.unpackbits(grammar.masks([0], CPU).numpy().view(np.uint8), 1, None, "little")
    fits = np.flatnonzero(first).tolist()
    anything, either = allowed()
    assert eos not in anything
    assert len(anything) >= ranks.vocab_size - 1
    assert either == sorted([*fits, begin])
    # Ends of reasoning that are cut by steps, one with a token between, and one that only looks so.
    for pair in [(end[1], begin), (end[0], end[0]), (quote[0], end[0]), (end[1], quote[0])]:
        assert allowed()[0] == anything
        ranks.grammars.advance([0, 1], torch.tensor(pair))
    constrained, other = allowed()
    assert constrained == fits
    assert other == anything
    # A request that joins again after a preemption knows its tokens.
    known = [begin, *end, quote[0]]
    ranks.join(1, schema, known, ranks.params[1])
    assert allowed()[1] != anything
    # Without the token that begins it, there is no free part.
    ranks.join(1, schema, quote[:1], ranks.params[1])
    assert allowed()[1] not in (anything, either)
    assert ranks.grammars.take_faults([0, 1]) is None


def test_a_preempted_request_continues(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, [Sampling(json_schema=PERSON)])
    for seed in range(5):
        ranks.step(seed)
    ranks.join(0, PERSON, ranks.answer(0))
    for seed in range(5, 120):
        ranks.step(seed)
    assert json.loads(decoded(ranks.tokenizer, ranks.answer(0))).keys() == {"name", "age"}


def test_a_slot_is_free_for_another_request_afterwards(tmp_path: Path) -> None:
    """The next request knows nothing of the tokens before, even those in flight."""
    ranks = Ranks(tmp_path, [Sampling(json_schema=PERSON)])
    begin = ranks.grammars.masks([0], CPU)
    for seed in range(3):
        ranks.step(seed)
    assert not torch.equal(ranks.grammars.masks([0], CPU), begin)
    ranks.step(3)
    ranks.join(0, "")
    ranks.grammars.advance([0], torch.tensor([7]))
    ranks.join(0, PERSON)
    assert torch.equal(ranks.grammars.masks([0], CPU), begin)


def test_masks_wait_for_their_own_steps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a step with one wait cost one wait, and none waits before the masks are needed."""
    waits: list[list[int]] = []

    class Slow(HostCopy):
        def wait(self) -> list[Tensor]:
            found = super().wait()
            waits.append(found[0].tolist())
            return found

    monkeypatch.setattr(slot_matchers, "HostCopy", Slow)
    ranks = Ranks(
        tmp_path, [Sampling(json_schema=PERSON), Sampling(), Sampling(json_schema=PERSON)]
    )
    first = ranks.step(0)
    assert waits == []
    second = ranks.step(1)
    assert waits == [first]
    ranks.step(2)
    assert waits == [first, second]
    free = Ranks(tmp_path, [Sampling()])
    for seed in range(3):
        free.step(seed)
    assert waits == [first, second]


def test_an_unprepared_matcher_ends_its_own_request_only(tmp_path: Path) -> None:
    """Text that no schema held is not an answer: only the tokens that end it are allowed."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 37]}')
    none = Grammars(lambda: tmp_path, 40)
    assert "cannot" in none.prepare(0, PERSON) or "tokenizer" in none.prepare(0, PERSON)
    none.join(5, 0)
    assert none.masks([5], CPU).tolist() == [[1 << 3, 1 << 5]]
    assert none.take_faults([4, 5]) == [(1, "the constraint was not prepared")]
    assert none.take_faults([4, 5]) is None


def test_a_constraint_that_cannot_be_prepared_is_named(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, [])
    fault = ranks.grammars.prepare(0, "start: other")
    assert fault.startswith("the constraint cannot be followed: ")
    ranks.grammars.join(0, 0)
    ranks.grammars.masks([0], CPU)
    assert ranks.grammars.take_faults([0]) is not None


AMBIGUOUS = 'start: e\ne: e e e e | "a" | ""'


def test_a_constraint_that_costs_too_much_ends_its_own_request_only(tmp_path: Path) -> None:
    """It is reported to the driver by its row; other rows are as they would be without it."""
    endless = ((token_id(byte_level_tokenizer(), EOS), -100.0),)
    costly = Sampling(grammar=AMBIGUOUS, logit_bias=endless)
    params = [Sampling(json_schema=PERSON), costly, Sampling()]
    ranks, alone = Ranks(tmp_path, params), Ranks(tmp_path, [params[0], Sampling(), params[2]])
    faults: list[tuple[int, str]] = []
    for seed in range(390):
        found, expected = ranks.step(seed), alone.step(seed)
        assert (found[0], found[2]) == (expected[0], expected[2])
        faults = ranks.grammars.take_faults([7, 0, 1, 2]) or []
        if faults:
            assert found[1] == ranks.eos
            break
    [(row, fault)] = faults
    assert row == 2
    assert fault.startswith("the constraint cannot be followed any further: ")


def test_ranks_meet_limits_at_the_same_token(tmp_path: Path) -> None:
    """Also where rows share a lexer, and one may have spent its fuel for the other."""
    params = [Sampling(temperature=1.0, seed=s, grammar=r'start: /(\w{1,40} .{1,40}){1,40}/')
              for s in range(5)]  # fmt: skip

    def followed() -> list[tuple[list[int], object]]:
        ranks = Ranks(tmp_path, params)
        slots = range(len(params))
        return [(ranks.step(seed), ranks.grammars.take_faults(slots)) for seed in range(40)]

    assert followed() == followed()


def test_a_runner_is_a_step_ahead_of_unconstrained_rows(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    eos = token_id(tokenizer, EOS)
    model = write_llama(tmp_path, vocab_size=336, eos_token_id=eos)
    runner = load_paged(engine_config(model), SingleRank(), CPU).allocate()
    schema = json.dumps({
        "type": "object",
        "properties": {"kind": {"enum": ["fox", "dog"]}, "old": {"type": "boolean"}},
        "required": ["kind", "old"], "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    })  # fmt: skip
    requests = [
        Asked([5, 9, 33], 90, sampling=Sampling(json_schema=schema)),
        Asked([7, 8], 90, sampling=Sampling(temperature=0.9, seed=2, json_schema=schema),
              joins_at=2),
        Asked([44, 3, 17], 90),
    ]  # fmt: skip
    answers = [a.tokens for a in generate(runner, requests, NUM_BLOCKS, BLOCK_SIZE)]
    for tokens in answers[:2]:
        text = decoded(tokenizer, tokens[: tokens.index(eos)])
        assert json.loads(text).keys() == {"kind", "old"}, text
    for request, tokens in zip(requests, answers, strict=True):
        assert [a.tokens for a in generate(runner, [request], NUM_BLOCKS, BLOCK_SIZE)] == [tokens]


def test_grammars_constrain_output_too(tmp_path: Path) -> None:
    """Copies of one compiled grammar know nothing of each other."""
    words = Sampling(grammar='start: "fox" | "dog" ("-" /[0-9]/){2}')
    calls = Sampling(temperature=1.0, seed=3, grammar=(
        'start: "[" args "]"\n'
        'args: %json {"enum": [{"kind": "fox"}, {"kind": "dog"}]}'
    ))  # fmt: skip
    ranks = Ranks(tmp_path, [words, calls, words])
    for seed in range(60):
        ranks.step(seed)
    texts = [decoded(ranks.tokenizer, ranks.answer(slot)) for slot in range(3)]
    assert texts[0] == texts[2]
    assert re.fullmatch(r"fox|dog-\d-\d", texts[0])
    assert json.loads(texts[1]) in ([{"kind": "fox"}], [{"kind": "dog"}])


def test_released_matchers_are_forgotten(tmp_path: Path) -> None:
    """And requests that joined before continue."""
    ranks = Ranks(tmp_path, [Sampling(json_schema=PERSON)])
    begin = ranks.grammars.masks([0], CPU)
    assert ranks.grammars.prepare(9, 'start: "a"', gone=[1]) == ""
    assert torch.equal(ranks.grammars.masks([0], CPU), begin)
    assert ranks.grammars.take_faults([0]) is None
    ranks.grammars.join(0, 1)
    ranks.grammars.masks([0], CPU)
    assert ranks.grammars.take_faults([0]) is not None


def test_an_answer_fits_a_schema_or_a_grammar() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        Sampling(json_schema="{}", grammar='start: "a"')
