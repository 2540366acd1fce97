"""The closed loop of even answers, on made-up ranks."""

import re

import pytest

from benchmarks.even_answers import main


def test_a_bound_evens_gaps_and_costs_little(capsys: pytest.CaptureFixture[str]) -> None:
    loop = "--in-flight 16 --requests 3 --prompt 1000 --answer 64 --max-step-tokens 4096"
    main(f"--simulate 6.4 18 --gap-ms 0 28 {loop}".split())
    found = re.findall(
        r"ms: (\d+) tokens/s; .* ([\d.]+), [\d.]+ ms; first", capsys.readouterr().out
    )
    (free_rate, free_gap), (bound_rate, bound_gap) = [(float(a), float(b)) for a, b in found]
    assert bound_rate > 0.97 * free_rate
    assert bound_gap < 30 < free_gap
