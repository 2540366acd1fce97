import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.wire.sampling import Sampling
from modeling.sampling.warpers import keep_best, keep_likely, keep_typical, warp_temperature
from tests.modeling.sampling.plain import plain_kept

INF = float("inf")


def plain_keep(logits: list[float], top_k: int, top_p: float) -> list[int]:
    """The definition, one row in float64: ids that stay, best first, lower id first on ties."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:top_k]
    weights = torch.tensor([logits[i] for i in order], dtype=torch.float64).softmax(0).tolist()
    kept, mass = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if top_p < 1 and mass >= top_p - 1e-7:
            break
        kept.append(token)
        mass += weight
    return kept


def kept_ids(row: torch.Tensor) -> list[int]:
    return [int(i) for i in torch.nonzero(row > -INF)[:, 0]]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-6, 6), min_size=2, max_size=24),
    st.integers(1, 30),
    st.sampled_from([1.0, 0.999, 0.9, 0.61, 0.37, 0.05]),
)
def test_kept_tokens_are_those_of_the_definition(
    values: list[int], top_k: int, top_p: float
) -> None:
    logits = torch.tensor([[v / 1.7 for v in values]])
    result = keep_best(logits, torch.tensor([top_k]), torch.tensor([top_p]))
    expected = sorted(plain_keep(logits[0].double().tolist(), top_k, top_p))
    assert kept_ids(result[0]) == expected
    assert torch.equal(result[0, expected], logits[0, expected])


def test_rows_have_their_own_parameters() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    top_k = torch.tensor([1, 50, 2**31 - 1, 7])
    top_p = torch.tensor([1.0, 0.5, 1.0, 1.0])
    together = keep_best(logits, top_k, top_p)
    for row in range(4):
        one = slice(row, row + 1)
        assert torch.equal(keep_best(logits[one], top_k[one], top_p[one])[0], together[row])
    assert torch.equal(together[2], logits[2])
    assert [len(kept_ids(row)) for row in together][::3] == [1, 7]


def test_of_equal_logits_the_highest_ids_are_dropped_first() -> None:
    logits = torch.zeros(1, 9)
    assert kept_ids(keep_best(logits, torch.tensor([4]), None)[0]) == [0, 1, 2, 3]
    assert kept_ids(keep_best(logits, None, torch.tensor([0.5]))[0]) == [0, 1, 2, 3, 4]


def test_top_p_keeps_at_least_the_best() -> None:
    logits = torch.tensor([[0.0, 30.0, 1.0]])
    for top_p in (1e-9, 1e-13, 1e-46):
        assert kept_ids(keep_best(logits, None, torch.tensor([top_p]))[0]) == [1]
        assert kept_ids(keep_typical(logits, torch.tensor([top_p]))[0]) == [1]


def test_top_p_counts_what_top_k_left() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    # Of two tokens the first has 4/7 of the mass, so 0.55 is reached by it alone.
    assert kept_ids(keep_best(logits, torch.tensor([2]), torch.tensor([0.55]))[0]) == [0]
    assert kept_ids(keep_best(logits, torch.tensor([4]), torch.tensor([0.55]))[0]) == [0, 1]


def test_temperature_divides_and_overflows_nothing() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [1e30, -1e30, 0.0]])
    warped = warp_temperature(logits, torch.tensor([2.0, 1e5]))
    assert torch.allclose(warped[0].softmax(0), torch.tensor([2.0, 6.0, 4.0]).softmax(0))
    assert int(warped[1].argmax()) == 0
    assert not bool(warped.isnan().any())


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=2, max_size=24),
    st.sampled_from([0.013, 0.107, 0.53, 1.0]),
    st.sampled_from([0.999, 0.91, 0.61, 0.37, 0.05]),
)
def test_min_p_and_typical_p_are_those_of_the_definition(
    values: list[int], min_p: float, typical_p: float
) -> None:
    logits = torch.tensor([[v / 7.3 for v in values]])
    plain = logits[0].double().tolist()
    likely = keep_likely(logits, torch.tensor([min_p]).log())
    assert kept_ids(likely[0]) == plain_kept(plain, Sampling(temperature=1.0, min_p=min_p))
    typical = keep_typical(logits, torch.tensor([typical_p]))[0]
    expected = plain_kept(plain, Sampling(temperature=1.0, typical_p=typical_p))
    assert kept_ids(typical) == expected
    assert torch.equal(typical[expected], logits[0, expected])


def test_rows_that_are_off_keep_all() -> None:
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(1))
    logits[:, 4] = -INF
    assert torch.equal(keep_likely(logits, torch.tensor([0.0, 0.2]).log())[0], logits[0])
    typical = keep_typical(logits, torch.tensor([1.0, 0.2]))
    assert torch.equal(typical[0], logits[0])
    assert torch.equal(keep_typical(logits[1:], torch.tensor([0.2]))[0], typical[1])


def test_typical_p_may_drop_the_best() -> None:
    logits = torch.log(torch.tensor([[0.4] + [0.1] * 6]))
    assert kept_ids(keep_typical(logits, torch.tensor([0.25]))[0]) == [1, 2, 3]
