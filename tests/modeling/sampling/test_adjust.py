"""Biases, penalties, masks and watermark against the plain definition, in mixed batches."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from configs.wire.sampling import Sampling
from modeling.sampling import adjustments as building
from modeling.sampling.adjustments import adjust, adjustments
from modeling.sampling.history import TokenHistory
from modeling.sampling.sampler import SampledStep, sample_tokens
from modeling.sampling.tensors import sampling_tensors
from modeling.sampling.watermark import green
from tests.modeling.sampling.plain import PlainRow, plain_adjusted

CPU = torch.device("cpu")
VOCAB, WIDTH = 24, 40

tokens = st.lists(st.integers(0, VOCAB - 1), max_size=12)
penalties = st.sampled_from([0.0, 0.0, 0.5, -1.0, 2.0])
sampling_params = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7]),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    frequency_penalty=penalties,
    presence_penalty=penalties,
    watermark=st.booleans(),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-50, 50), max_size=4).map(
        lambda biases: tuple(biases.items())
    ),
    masked_ids=st.sampled_from([(), (3,), (0, 7)]),
    masked_tokens=st.integers(0, 6),
    allowed_ids=st.sampled_from([(), (), (1, 2, 5, 9, 23)]),
    bad_words=st.lists(
        st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=3
    ).map(tuple),
)
plain_rows = st.builds(PlainRow, sampling_params, tokens.filter(bool), tokens)


def history(rows: Sequence[PlainRow]) -> TokenHistory:
    """The rows' tokens as a rank keeps them: a batch slot each, and what others left behind."""
    buffer = torch.full((len(rows), WIDTH), VOCAB - 1)
    for index, row in enumerate(rows):
        buffer[index, : len(row.tokens)] = torch.tensor(row.tokens)
    ends = [index * WIDTH + len(row.tokens) for index, row in enumerate(rows)]
    prompts = np.array([len(row.prompt) for row in rows])
    return TokenHistory(buffer.view(-1), np.array(ends), prompts, np.arange(len(rows)))


def adjusted(logits: Tensor, rows: Sequence[PlainRow]) -> Tensor:
    positions = [len(row.tokens) for row in rows]
    found = adjustments([row.params for row in rows], positions, history(rows), CPU)
    return logits.float() if found is None else adjust(logits, found)


def sampled(logits: Tensor, rows: Sequence[PlainRow]) -> SampledStep:
    positions = [len(row.tokens) for row in rows]
    params = [row.params for row in rows]
    return sample_tokens(logits, sampling_tensors(params, positions, CPU, history(rows)))


@settings(max_examples=80, deadline=None)
@given(st.lists(plain_rows, min_size=1, max_size=5), st.integers(0, 99))
def test_logits_are_those_of_the_definition(rows: list[PlainRow], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), VOCAB, generator=generator) * 3
    result = adjusted(logits, rows)
    for index, row in enumerate(rows):
        expected = torch.tensor(plain_adjusted(logits[index].double().tolist(), row))
        torch.testing.assert_close(result[index].double(), expected.double(), rtol=1e-5, atol=1e-5)
        if not row.params.adjusted:
            assert torch.equal(result[index], logits[index])


@settings(max_examples=40, deadline=None)
@given(st.lists(plain_rows, min_size=2, max_size=5), st.integers(0, 99))
def test_other_rows_never_matter(rows: list[PlainRow], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), VOCAB, generator=generator) * 3
    together = adjusted(logits, rows)
    picked = sampled(logits, rows).tokens.tolist()
    for index, row in enumerate(rows):
        one = logits[index : index + 1]
        assert torch.equal(adjusted(one, [row])[0], together[index])
        assert sampled(one, [row]).tokens.tolist() == picked[index : index + 1]


def test_bad_words_are_those_of_transformers() -> None:
    words = [[3], [1, 4], [1, 1, 5], [2, 6], [7, 1]]
    for tokens in ([1], [1, 1], [2], [2, 1], [9]):
        row = PlainRow(Sampling(bad_words=tuple(map(tuple, words))), tokens, [])
        scores = torch.zeros(1, VOCAB)
        theirs = NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([0]))
        expected = theirs(torch.tensor([tokens]), scores)
        assert torch.equal(adjusted(scores, [row]), expected)


def test_greedy_rows_choose_from_adjusted_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]] * 5)
    rows = [
        PlainRow(Sampling(), [1], []),
        PlainRow(Sampling(logit_bias=((0, 5.0),)), [1], []),
        PlainRow(Sampling(repetition_penalty=2.0), [1], []),
        PlainRow(Sampling(presence_penalty=1.5), [1], []),
        PlainRow(Sampling(masked_ids=(1,), masked_tokens=1), [1], []),
    ]
    assert sampled(logits, rows).tokens.tolist() == [1, 0, 2, 1, 2]
    again = [PlainRow(row.params, row.prompt, [1]) for row in rows]
    assert sampled(logits, again).tokens.tolist() == [1, 0, 2, 2, 1]


def test_penalties_count_the_output_alone() -> None:
    logits = torch.zeros(1, VOCAB)
    row = PlainRow(Sampling(frequency_penalty=0.5, presence_penalty=1.0), [4, 4, 5], [5, 6, 6])
    result = adjusted(logits, [row])[0]
    assert result[[4, 5, 6]].tolist() == [0.0, -1.5, -2.0]


@pytest.mark.parametrize("drawn", [0.0, 1e-300, 1.0, 1e308])
def test_the_smallest_and_the_largest_numbers_are_numbers(drawn: float) -> None:
    """Float32 has no 1e-300 and no 1e300; they are clamped to its range."""
    logits = torch.tensor([[4.0, 7.0, -3.0, 9.0]])
    for penalty, expected in ((5e-324, 1), (1e-40, 1), (1e39, 3), (1e308, 3)):
        params = Sampling(temperature=drawn, repetition_penalty=penalty, top_k=1 if drawn else 0)
        row = PlainRow(params, [0, 1, 2], [])
        assert bool(adjusted(logits, [row]).isfinite().all())
        assert sampled(logits, [row]).tokens.tolist() == [expected]


def test_the_newest_token_is_read_on_the_device() -> None:
    row = PlainRow(Sampling(repetition_penalty=2.0), [1, 2], [3])
    logits = torch.ones(1, VOCAB)
    known = history([row])
    found = adjustments([row.params], [3], known, CPU)
    assert found is not None
    known.buffer[2] = 9
    assert adjust(logits, found)[0, [3, 9]].tolist() == [1.0, 0.5]


def test_reported_logprobs_are_the_models_own() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(4))
    params = Sampling(logit_bias=((3, 100.0),), logprobs=2)
    result = sampled(logits, [PlainRow(params, [1], []), PlainRow(Sampling(), [1], [])])
    assert result.tokens.tolist()[0] == 3
    assert result.logprobs is not None
    own = logits.double().log_softmax(-1)
    assert torch.allclose(result.logprobs.logprob.double()[0], own[0, 3], atol=1e-6)
    assert 3 not in result.logprobs.top_ids[0].tolist()


def test_logits_are_adjusted_in_float32() -> None:
    logits = torch.full((2, 4), 8.0).bfloat16()
    rows = [PlainRow(Sampling(logit_bias=((2, 0.01),)), [1], []), PlainRow(Sampling(), [1], [])]
    assert sampled(logits, rows).tokens.tolist() == [2, 0]
    assert logits.tolist() == [[8.0] * 4] * 2


def test_ids_beyond_the_vocabulary_do_no_harm() -> None:
    params = Sampling(logit_bias=((500, 9.0),), repetition_penalty=2.0)
    logits = torch.ones(1, 4)
    assert adjusted(logits, [PlainRow(params, [1, 23], [])])[0].tolist() == [1.0, 0.5, 1.0, 1.0]


def test_nothing_is_built_where_no_row_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(building, "to_device")
    rows = [
        PlainRow(Sampling(), [1], []),
        PlainRow(Sampling(masked_ids=(1,), masked_tokens=2), [1], [5, 6]),
    ]
    assert sampling_tensors([row.params for row in rows], [1, 3], CPU, history(rows)).plain


def test_each_token_makes_its_own_half_of_the_vocabulary_green() -> None:
    lists = green(torch.arange(200), 4000)
    shares = lists.double().mean(dim=-1)
    assert bool(((shares - 0.5).abs() < 0.05).all())
    same = (lists[:-1] == lists[1:]).double().mean(dim=-1)
    assert bool(((same - 0.5).abs() < 0.05).all())
    assert torch.equal(lists[7:8], green(torch.tensor([7]), 4000))


def test_watermarked_text_is_detected() -> None:
    generator = torch.Generator().manual_seed(0)
    hits = {True: 0, False: 0}
    for marked in hits:
        row = PlainRow(Sampling(temperature=1.0, seed=5, watermark=marked), [1], [])
        for _ in range(38):
            logits = torch.randn(1, VOCAB, generator=generator)
            token = int(sampled(logits, [row]).tokens[0])
            hits[marked] += int(green(torch.tensor([row.tokens[-1]]), VOCAB)[0, token])
            row = PlainRow(row.params, row.prompt, [*row.output, token])
    assert hits[True] > 28 > hits[False]
