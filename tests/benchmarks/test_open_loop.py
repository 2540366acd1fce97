"""Arrivals by chance, and which requests were in time."""

from collections import Counter

import pytest

from benchmarks.open_loop import Arrivals, requests, share_in_time
from benchmarks.serving import Measured


def test_arrivals_are_what_they_say() -> None:
    load = Arrivals("steady", ("a0", "a1", "a2"), rate=50.0, seconds=20.0)
    made = list(requests(load, 1000, seed=3))
    assert made == list(requests(load, 1000, seed=3))
    assert len(made) == pytest.approx(1000, rel=0.15)
    assert [due for due, _ in made] == sorted(due for due, _ in made)
    models = Counter(body["model"] for _, body in made)
    assert models["a0"] == pytest.approx(2 * models["a1"], rel=0.3)
    lengths = sorted(len(body["prompt"].split()) for _, body in made)
    assert lengths[-1] == 3500
    assert lengths[0] < 256 < lengths[500] < 1000
    heads = Counter((body["model"], *body["prompt"].split()[:500]) for _, body in made)
    shared = [count for _, count in heads.most_common(4)]
    assert sum(shared[:3]) == pytest.approx(500, rel=0.15), "half of them, by adapter"
    assert shared[3] == 1


def test_failed_and_late_requests_are_not_in_time() -> None:
    seen = Measured(first=[0.1, 0.6, 0.2], per_token=[0.02, 0.02, 0.03], errors=["500"])
    assert share_in_time(seen, 4) == 0.25
