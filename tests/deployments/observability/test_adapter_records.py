"""Which adapters have a label of their own: the most requested ones, and a bound."""

from deployments.observability.adapter_records import TopLabels
from deployments.observability.lorax_metrics import OTHER


def test_the_first_adapters_get_labels_and_the_rest_share_one() -> None:
    labels = TopLabels(2)
    assert [labels.count(name) for name in ("a", "b", "c", "a")] == ["a", "b", OTHER, "a"]
    assert labels.of("c") == labels.of(None) == labels.of("never seen") == OTHER


def test_an_adapter_with_far_more_requests_replaces_another() -> None:
    labels = TopLabels(2)
    for name in ("a", "a", "b"):
        labels.count(name)
    got = [labels.count("hot") for _ in range(4)]
    assert got == [OTHER, OTHER, "hot", "hot"]
    assert labels.of("b") == OTHER
    assert labels.of("a") == "a"


def test_no_matter_how_many_come_few_ever_have_a_label() -> None:
    labels = TopLabels(8, frozenset({"base"}))
    seen = set()
    for index in range(40_000):
        # Each is hot for a while, then it is not requested any more.
        seen.add(labels.count(f"adapter-{index // 40}"))
        seen.add(labels.count("base"))
    assert len(seen - {"base", OTHER}) <= 4 * 8
    assert len(labels._counts) < 10_000


def test_counts_of_names_that_come_once_are_forgotten() -> None:
    labels = TopLabels(4)
    for index in range(50_000):
        labels.count(f"once-{index}")
    assert len(labels._counts) <= 4096
