"""What the table says of recorded rows: figures met, missed, and not judged."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import Case
from benchmarks.table.chart import NothingToDraw, draw
from benchmarks.table.command import main
from benchmarks.table.figures import CHIPS, RATE, TPOT, TTFT, limit
from benchmarks.table.goals import GoalVerdict, sheet_of, verdicts_of, why_not
from benchmarks.table.groups import FULL, groups
from benchmarks.table.page import adapter_figures, line_of, page
from benchmarks.table.rows import ResultsError, medians, read_rows
from tests.benchmarks.table.rows import H200, SERVER, rate, row

ONE_GPU = [
    row("one-gpu", "base-c1", tpot_p50_ms=4.51, output_tokens_per_s=218.0),
    row("one-gpu", "lora1-c1", tpot_p50_ms=5.20, output_tokens_per_s=190.0),
    rate("base-c64", 6866.0, tpot_p50_ms=8.44),
    rate("lora32-c64", 5875.0),
    rate("lora1-c64", 6100.0),
    rate("base-c256", 11000.0),
    rate("lora32-c256", 10331.0, server={**SERVER, "attention": "sdpa (no other imports)"}),
]


def verdicts(rows: list[dict[str, Any]], group: str = "one-gpu") -> dict[str, list[GoalVerdict]]:
    found: dict[str, list[GoalVerdict]] = {}
    for verdict in verdicts_of(sheet_of(rows), group):
        found.setdefault(verdict.case.removeprefix(f"{group}/"), []).append(verdict)
    return found


def test_goals_are_met_missed_or_not_judged() -> None:
    found = verdicts(ONE_GPU)
    assert [v.is_met for v in found["base-c1"]] == [True]  # 4.51 against the peer's 4.88
    [slow] = found["lora1-c1"]
    assert slow.is_met is False
    assert slow.note == "5.20 against 5.05, missed by 2.9%"  # 1.12 x 4.51
    assert [v.is_met for v in found["lora32-c64"]] == [True, True]
    assert [v.is_met for v in found["lora1-c64"]] == [False]
    assert [v.is_met for v in found["base-c256"]] == [False]
    assert {(v.is_met, v.note) for v in found["lora32-c256"]} == {(None, "attention through SDPA")}
    assert "mixed32-c64" not in found


def test_a_peer_that_was_measured_beside_us_counts_instead_of_the_quoted() -> None:
    slower = rate("lora32-c64", 2900.0, "peer")
    _, against = verdicts([*ONE_GPU, slower])["lora32-c64"]
    assert against.is_met is False
    assert "against 6,090" in against.note
    text = page([*ONE_GPU, slower])
    assert "| lora32-c64 | tokens/s | 5,875 | 2,900 | 2.03 |" in text
    assert (
        "| base-c64 | tokens/s | 6,866 | 6,619-6,695\\* | 1.03-1.04 | 9,141 | 75% | 1 of 1 met |"
        in text
    )
    assert "| **1 of 2 met** |" in text


def test_quoted_figures_are_for_their_own_machine_and_shape() -> None:
    other = {**H200, "gpus": ["NVIDIA A100-SXM4-80GB"]}
    rows = [rate("base-c64", 3000.0, machine=other)]
    [verdict] = verdicts(rows)["base-c64"]
    assert (verdict.is_met, verdict.note) == (None, "not measured: peer")
    assert "| base-c64 | tokens/s | 3,000 |  |  |  |  |" in page(rows)


def test_a_quoted_figure_is_not_another_shapes() -> None:
    one = rate("base-c64", 3752.0, shape="gemma2-9b", setup="gemma2-9b, bfloat16, cuda")
    assert "| base-c64 | tokens/s | 3,752 |  |  | 6,230 | 60% |" in page([one])


def test_latents_have_no_limit() -> None:
    """Their bytes and their layers' operations are not counted."""
    one = rate("base-c64", 3439.0, shape="glm-4.7-flash", setup="glm-4.7-flash, bfloat16, cuda")
    assert "| base-c64 | tokens/s | 3,439 |  |  |  |  |" in page([one])


@pytest.mark.parametrize("word", ["gptq", "engine.model.quantize=fp8"])
def test_quantised_rows_have_no_limit_and_no_quoted_peer(word: str) -> None:
    one = rate("base-c64", 9696.0, setup=f"llama3-8b, bfloat16, cuda, {word}")
    assert "| base-c64 | tokens/s | 9,696 |  |  |  |  |" in page([one])
    assert [(v.is_met, v.note) for v in verdicts([one])["base-c64"]] == [
        (None, "not measured: peer")
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"device": "cpu"}, "on a CPU"),
        ({"server": {**SERVER, "http front": "python proxy"}}, "through the Python proxy"),
        ({"captured_share": 0.0}, "no captured steps"),
        ({"captured_share": None}, "no captured steps"),
    ],
)
def test_rows_that_do_not_count(changes: dict[str, Any], reason: str) -> None:
    assert why_not(rate("base-c64", 1.0, **changes)) == reason


def test_starts_and_loads_have_no_steps_to_capture() -> None:
    warm = row("start", "warm", ready_s=31.0)
    weights = row("start", "weights", load_of_reading=0.5, server={})
    del warm["captured_share"], weights["captured_share"]
    found = verdicts([warm, weights], "start")
    assert [v.is_met for v in found["warm"] + found["weights"]] == [True, False]


def test_churn_is_shown_beside_its_own_resident_row() -> None:
    figures = {RATE: 6000.0, TTFT: 600.0, "itl_p99_ms": 60.0, "itl_p50_ms": 7.0}
    resident = {**row("churn", "resident"), **figures}
    zipf = {**resident, "case": "zipf", RATE: 5500.0, TTFT: 1900.0, "itl_p99_ms": 66.9}
    rotation = row("churn", "turns", output_tokens_per_s=4100.0)
    alone = verdicts([resident, zipf, rotation], "churn")
    assert [v.is_met for v in alone["zipf"]] == [True, False, True]
    assert [v.words for v in alone["zipf"]][2].endswith("≤ resident and one step")
    assert [v.note for v in alone["turns"]] == ["not measured: churn-all-resident/all-resident"]
    every = row("churn-all-resident", "all-resident", output_tokens_per_s=5400.0)
    found = verdicts([resident, zipf, rotation, every], "churn")
    assert [v.is_met for v in found["turns"]] == [True]


def test_repeated_cases_are_shown_by_their_median() -> None:
    rows = [rate("base-c64", value) for value in (6800.0, 6000.0, 6900.0)]
    merged = medians(rows)
    assert (merged[RATE], merged["runs"], merged["case"]) == (6800.0, 3, "base-c64")
    assert "| tokens/s | steps captured | runs |" in page(rows)
    assert "runs" not in page(rows[:1])


def test_rows_of_several_machines_are_marked() -> None:
    later = {**H200, "boot": "feedf00d"}
    assert "few per cent of doubt" in page([*ONE_GPU, rate("mixed32-c64", 5000.0, machine=later)])
    assert "few per cent of doubt" not in page(ONE_GPU)


def test_setups_are_shown_one_by_one() -> None:
    text = page([rate("base-c64", 6866.0), rate("base-c64", 200.0, setup="tiny, float32, cpu")])
    first, second = text.split("# tiny, float32, cpu")
    assert "6,866" in first
    assert "6,866" not in second


def test_what_failed_is_shown_and_not_counted() -> None:
    failed = rate("base-c64", 9999.0, errors=4, first_error=["503 no"])
    broken = row("churn", "(start)", failure="the server ended by itself:\nno memory")
    left = row("churn", "(end)", processes_left=2, gpu_mib_left=4096)
    text = page([failed, broken, left])
    assert "9,999" not in text
    assert "- one-gpu/base-c64 (ours): 4 requests failed, the first: ['503 no']" in text
    assert "- churn/(start) (ours): no memory" in text
    assert "- churn (ours) left 2 processes and 4096 MiB on the GPUs" in text


def test_what_adapters_did_is_shown_where_they_moved() -> None:
    counts = {"device_hits": 60, "host_hits": 30, "misses": 10, "fill_bytes": 3_400_000_000}
    found = adapter_figures({"adapters": counts, "loads": {"place": 2.5}})
    assert found == {
        "device_hits": 0.6,
        "host_hits": 0.3,
        "misses": 0.1,
        "filled_gb": 3.4,
        "place_ms": 2.5,
    }
    assert adapter_figures({"adapters": {"device_hits": 64}, "loads": {"fetch": 3.0}}) == {}
    assert adapter_figures({}) == {}


def test_a_case_in_one_line_says_its_own_figure_first() -> None:
    line = line_of(rate("base-c1", 218.0, tpot_p50_ms=4.51, errors=1, first_error=["500"]))
    assert line.startswith("base-c1      TPOT p50 ms 4.51, tokens/s 218")
    assert line.endswith("1 errors, the first: ['500']")


@pytest.mark.parametrize(
    ("name", "case", "metric", "expected"),
    [  # worked out by hand: 15.01 GB of weights, 131 KB a cached token, 84 MB an adapter
        ("one-gpu", "base-c1", TPOT, 3.51),
        ("one-gpu", "base-c64", TPOT, 4.74),
        ("one-gpu", "lora32-c64", TPOT, 5.37),
        ("one-gpu", "base-c256", TPOT, 8.48),
        ("two-gpus", "base-c1", TPOT, 1.755),
    ],
)
def test_limits_are_bytes_and_operations(
    name: str, case: str, metric: str, expected: float
) -> None:
    group = groups(FULL)[name]
    [what] = [play.what for play in group.plays if play.name == case]
    assert isinstance(what, Case)
    found = limit(what, CHIPS["NVIDIA H200"], "llama3-8b", group.gpus)
    assert found[metric] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("case", "metric", "expected"), [("base-c1", TPOT, 1.41), ("base-c64", RATE, 4_090)]
)
def test_limits_count_the_experts_that_a_step_touches(
    case: str, metric: str, expected: float
) -> None:
    [what] = [play.what for play in groups(FULL)["one-gpu"].plays if play.name == case]
    assert isinstance(what, Case)
    found = limit(what, CHIPS["NVIDIA H200"], "qwen3-30b-a3b", 1)
    assert found[metric] == pytest.approx(expected, rel=0.02)


def test_larger_ranks_have_lower_limits() -> None:
    plays = {play.name: play.what for play in groups(FULL)["one-gpu"].plays}
    plain, mixed = plays["lora32-c64"], plays["mixed32-c64"]
    assert isinstance(plain, Case)
    assert isinstance(mixed, Case)
    chip = CHIPS["NVIDIA H200"]
    assert limit(mixed, chip, "llama3-8b", 1)[RATE] < limit(plain, chip, "llama3-8b", 1)[RATE]


def test_a_file_is_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, chart = tmp_path / "results.jsonl", tmp_path / "figures.png"
    # The machine went away in the middle of the last line.
    file.write_text("".join(json.dumps(each) + "\n" for each in ONE_GPU) + '{"group": "one-')
    main(["--print", str(file), "--chart", str(chart)])
    printed = capsys.readouterr().out
    assert "Rows: 7, from 1 start(s) of a machine." in printed
    assert "1 x NVIDIA H200, driver 580.159.04, 16 CPUs; Python 3.12.3, CUDA 13.0" in printed
    assert "attention: flashinfer (the fastest that imports) / sdpa (no other imports);" in printed
    assert "## Goals: 4 of 9 met" in printed
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_a_file_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text('{"rows": 64}\n{"rows": 256}\n')
    with pytest.raises(ResultsError, match="line 1 is no row"):
        read_rows([file])
    for path in (file, tmp_path / "nothing.jsonl"):
        with pytest.raises(SystemExit) as ended:
            main(["--print", str(path)])
        assert ended.value.code == 2
        assert path.name in capsys.readouterr().err


def test_a_chart_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(NothingToDraw):
        draw([row("start", "warm", ready_s=30.0)], tmp_path / "figures.png")
