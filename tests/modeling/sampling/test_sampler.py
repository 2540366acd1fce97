from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from configs.wire.sampling import Sampling
from modeling.sampling import sampler
from modeling.sampling.sampler import no_rows, sample_tokens
from modeling.sampling.tensors import sampling_tensors
from tests.modeling.sampling.plain import plain_kept

CPU = torch.device("cpu")
VOCAB = 12


def draw(logits: Tensor, params: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
    sampled = sample_tokens(logits, sampling_tensors(params, positions, CPU))
    tokens: list[int] = sampled.tokens.tolist()
    return tokens


def plain_distribution(logits: Tensor, params: Sampling) -> Tensor:
    """The requested distribution, in float64, step by step as it is defined."""
    kept = plain_kept(logits.double().tolist(), params)
    result = torch.zeros(len(logits), dtype=torch.float64)
    result[kept] = (logits.double()[kept] / params.temperature).softmax(0)
    return result


@pytest.mark.parametrize(
    "params",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6, seed=2**63 + 11),
        Sampling(temperature=1.7, top_k=4),
        Sampling(temperature=1.0, top_p=0.7),
        Sampling(temperature=0.9, top_k=6, top_p=0.85, seed=3),
        Sampling(temperature=1.2, min_p=0.21),
        Sampling(temperature=0.8, typical_p=0.55, seed=8),
        Sampling(temperature=1.1, top_k=9, top_p=0.93, min_p=0.07, typical_p=0.8),
    ],
)
def test_frequencies_are_those_of_the_plain_sampler(params: Sampling) -> None:
    n = 20000
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 1.5
    tokens = torch.tensor(draw(logits.expand(n, VOCAB), [params] * n, range(n)))
    found = torch.bincount(tokens, minlength=VOCAB).double()
    expected = plain_distribution(logits, params) * n
    assert not bool(found[expected == 0].any())
    seen = expected > 0
    chi2 = float(((found - expected)[seen] ** 2 / expected[seen]).sum())
    # The mean of chi-square is its degrees of freedom, its variance twice that.
    free = int(seen.sum()) - 1
    assert chi2 < free + 4 * (2 * free) ** 0.5 + 4


def test_a_token_depends_on_its_row_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 300, generator=generator)
    params = [
        Sampling(
            temperature=0.3 * (i % 4),
            top_k=(i % 3) * 5,
            top_p=1 - 0.2 * (i % 2),
            seed=i % 7,
            min_p=0.05 * (i % 5),
            typical_p=1 - 0.1 * (i % 6),
        )
        for i in range(40)
    ]
    positions = [i * 13 % 50 for i in range(40)]
    together = draw(logits, params, positions)
    alone = [draw(logits[i : i + 1], [params[i]], [positions[i]])[0] for i in range(40)]
    assert together == alone
    shuffled = torch.randperm(40, generator=generator).tolist()
    again = draw(logits[shuffled], [params[i] for i in shuffled], [positions[i] for i in shuffled])
    assert again == [together[i] for i in shuffled]


def test_seed_and_position_change_the_token() -> None:
    logits = torch.zeros(200, 1000)
    by_seed = draw(logits, [Sampling(temperature=1.0, seed=i) for i in range(200)], [4] * 200)
    by_position = draw(logits, [Sampling(temperature=1.0, seed=9)] * 200, range(200))
    assert len(set(by_seed)) > 150
    assert len(set(by_position)) > 150


def test_greedy_rows_take_the_best_and_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0], [0.0, 0.0, 1.0]])
    params = [Sampling(), Sampling(), Sampling(temperature=1e-6, seed=1)]
    assert draw(logits, params, [0, 0, 0]) == [1, 0, 2]


def test_a_greedy_batch_does_no_sampling_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sampler, "exponential_noise")
    assert draw(torch.eye(3), [Sampling()] * 3, [0, 1, 2]) == [0, 1, 2]
    assert sampling_tensors([Sampling()] * 3, [0, 1, 2], CPU).random is None


def test_only_filtered_rows_are_sorted() -> None:
    params = [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=2)]
    random = sampling_tensors(params, [0, 0, 0], CPU).random
    assert random is not None
    assert random.filtered is not None
    assert random.rows.tolist() == [1, 2]
    assert random.filtered.rows.tolist() == [1]
    assert random.filters.tolist() == [-1, 0]
    assert not random.filtered.typical


def test_logprobs_are_those_of_the_model() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    params = [
        Sampling(temperature=3.0, top_k=2, logprobs=0),
        Sampling(logprobs=3),
        Sampling(),
    ]
    sampled = sample_tokens(logits, sampling_tensors(params, [0, 0, 0], CPU))
    assert sampled.logprobs is not None
    expected = logits.double().log_softmax(-1)
    best = expected.topk(3, dim=-1)
    assert sampled.logprobs.top_ids.tolist() == best.indices.tolist()
    assert torch.allclose(sampled.logprobs.top_logprobs.double(), best.values, atol=1e-6)
    own = expected.gather(1, sampled.tokens[:, None])[:, 0]
    assert torch.allclose(sampled.logprobs.logprob.double(), own, atol=1e-6)


def test_half_precision_logits_are_warped_in_float32() -> None:
    logits = torch.randn(8, 100, generator=torch.Generator().manual_seed(3)).bfloat16()
    params = [Sampling(temperature=0.7, top_p=0.9, seed=i) for i in range(8)]
    assert draw(logits, params, [1] * 8) == draw(logits.float(), params, [1] * 8)


def test_a_step_may_sample_nothing() -> None:
    sampled = no_rows(CPU)
    assert sampled.tokens.tolist() == []
    assert sampled.logprobs is None
