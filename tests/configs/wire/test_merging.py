import msgspec
import pytest

from configs.wire.adapters import AdapterKey, FetchedAdapter
from configs.wire.merging import MergeRule, MergeStrategy, SignMethod

FREQUENCY = SignMethod.FREQUENCY


def ties(density: float, by: SignMethod = SignMethod.TOTAL) -> MergeRule:
    return MergeRule((1, 2), MergeStrategy.TIES, density, by)


def dare(density: float, by: SignMethod = SignMethod.TOTAL) -> MergeRule:
    return MergeRule((1, 2), MergeStrategy.DARE_LINEAR, density, by)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (MergeRule((1, 2)), MergeRule((1.0, 2), density=0.3, sign_method=FREQUENCY), True),
        (MergeRule((1, 2)), MergeRule((2, 1)), False),
        (ties(0.3), ties(0.4), False),
        (ties(0.3), ties(0.3, FREQUENCY), False),
        (ties(0.3), dare(0.3), False),
        (dare(0.3), dare(0.3, FREQUENCY), True),
        (MergeRule((1, 2)), dare(1.0), False),
    ],
)
def test_a_digest_names_all_that_counts(one: MergeRule, other: MergeRule, same: bool) -> None:
    assert (one.digest(["a", "b"]) == other.digest(["a", "b"])) is same
    assert one.digest(["a", "b"]) != one.digest(["b", "a"])
    assert MergeRule((2.0,)).digest(["a"]) == MergeRule((2.0,), MergeStrategy.TIES).digest(["a"])


def test_a_merge_travels_to_the_ranks() -> None:
    parts = tuple(FetchedAdapter(AdapterKey(i), "a", "/a", "d", (("f", 1, 2),)) for i in (1, 2))
    sent = FetchedAdapter(AdapterKey(3), "m", "", "dm", parts=parts, rule=ties(0.5, FREQUENCY))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=FetchedAdapter) == sent
