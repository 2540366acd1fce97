"""The table played: against a peer's process by the one command, and against our own server."""

import asyncio
import fcntl
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import local, workload
from benchmarks.fairness import Terms
from benchmarks.serving import Case, run
from benchmarks.steps import cores, cpu_seconds, mean_loads, shares_of
from benchmarks.stored import STORED
from benchmarks.structured import Comparison
from benchmarks.table.command import main
from benchmarks.table.groups import SMALL, Fair, Open, Play, groups
from benchmarks.table.page import line_of
from benchmarks.table.play import Budget, LoadTarget, Player, Session, measure, warm_up
from benchmarks.table.rows import Results, Row, read_rows
from benchmarks.table.server import ServerError, StepReader, read_choices
from benchmarks.table.setup import Setup, server_config, write_files
from configs.engine import EngineConfig
from configs.serve import ServeConfig
from deployments.commands import serve
from deployments.driver.usage import LoadSum
from deployments.observability.steps import StepRecord
from tests.ports import free_port
from tests.served import served

FEW = 8
FAKE_MODULE = "tests.benchmarks.table.fake_server"
FAKE = f"{sys.executable} -m {FAKE_MODULE} --port {{port}} --models {{lora_modules}}"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of models and adapters for all tests of this file."""
    folder = tmp_path_factory.mktemp("table")
    made = ["--shape", "tiny", "--adapters", str(FEW), "--mixed-adapters", str(FEW)]
    workload.main([str(folder / "tiny"), *made])
    workload.main([str(folder / "tiny-json"), "--shape", "tiny", "--adapters", "0", "--json"])
    return folder


def play_peer(work: Path, out: Path, *more: str) -> str:
    """Play two of a peer's rows by the command line; returns what it printed, then how it ended."""
    arguments = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--only", "peer"]
    arguments += ["--out", str(out), "--work", str(work), "--port", str(free_port())]
    printed = io.StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        main([*arguments, "--cases", "base-c1", "lora1-c1", "--peer", FAKE, *more])
    return f"{printed.getvalue()}\nexit code {ended.value.code}"


def cases(out: Path) -> list[tuple[str, str]]:
    return [(row["case"], row["side"]) for row in read_rows([out])]


def test_one_command_measures_a_peer_and_goes_on_where_it_was(work: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    printed = play_peer(work, out)
    ended = ("(end)", "peer")
    assert cases(out) == [("base-c1", "peer"), ended, ("lora1-c1", "peer"), ended]
    base, end, lora, _ = read_rows([out])
    assert (base["errors"], base["requests"], lora["errors"], lora["requests"]) == (0, 2, 0, 2)
    assert base["cached_prompt_tokens"] == lora["cached_prompt_tokens"] == 0
    assert base["server"] == {"version": "1.2.3"}
    assert (end["processes_left"], end["gpu_mib_left"]) == (0, 0)
    assert "ready after" in printed
    assert "| lora1-c1, peer |" in printed
    assert "exit code 0" in printed
    again = play_peer(work, out)
    assert len(cases(out)) == 4
    assert "ready after" not in again
    play_peer(work, out, "--again", "--cases", "base-c1")
    assert cases(out)[4:] == [("base-c1", "peer"), ended]
    assert not [p for p in psutil.Process().children(recursive=True) if "fake_server" in str(p)]


def test_a_peer_that_ends_by_itself_is_reported(work: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    printed = play_peer(work, out, "--peer-base", f"{FAKE} --die", "--cases", "base-c1")
    end, failed = read_rows([out])
    assert (end["case"], failed["case"]) == ("(end)", "(start)")
    assert "there is no GPU for this server" in failed["failure"]
    assert "there is no GPU for this server" in printed
    assert "## What went wrong" in printed
    assert "exit code 1" in printed


def test_two_tables_of_a_group_do_not_share_its_files(work: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    with (work / "one-gpu-peer.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        printed = play_peer(work, out, "--cases", "base-c1")
    assert cases(out) == [("(start)", "peer")]
    assert "give this one a --work of its own" in printed


def test_a_peer_that_is_no_program_is_reported(work: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    printed = play_peer(work, out, "--peer-base", "/no/such/server")
    assert cases(out) == [("(start)", "peer"), ("lora1-c1", "peer"), ("(end)", "peer")]
    assert "/no/such/server cannot be run: No such file or directory" in printed
    assert "exit code 1" in printed


def test_a_server_without_an_adapter_is_reported(work: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    alone = FAKE.replace("{lora_modules}", "")
    printed = play_peer(work, out, "--peer", alone, "--cases", "lora1-c1")
    assert cases(out) == [("(end)", "peer"), ("(start)", "peer")]
    assert "fails 64 requests: 404" in printed


def test_connections_that_end_are_errors() -> None:
    unreachable = f"http://127.0.0.1:{free_port()}"
    row = asyncio.run(run(unreachable, Case("dead", ("base",), 2, 6, 4, 4), 1000))
    assert (row["errors"], row["output_tokens_per_s"], row["ttft_p50_ms"]) == (6, 0.0, None)
    assert "Connector" in row["first_error"][0]
    assert "errors" in line_of({**row, "group": "one-gpu"})


def test_no_request_is_sent_after_a_cases_time() -> None:
    unreachable, case = f"http://127.0.0.1:{free_port()}", Case("dead", ("base",), 2, 6, 4, 4)
    row = asyncio.run(run(unreachable, case, 1000, most_seconds=0.0))
    assert (row["requests"], row["errors"]) == (2, 2), "one of each client"


def test_no_server_is_started_without_time(work: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    printed = play_peer(work, out, "--seconds", "10")
    assert not out.exists()
    assert printed.count("no time is left for one-gpu (peer)") == 2


def test_a_case_that_would_end_too_late_is_not_started(work: Path, tmp_path: Path) -> None:
    group = groups(SMALL)["one-gpu"]
    quick, slow = group.plays[0], replace(small("lora32-c64"), seconds=1e6)
    lines: list[str] = []
    setup = Setup(work, "tiny", "cuda", "float32", port=free_port())
    results = Results(tmp_path / "results.jsonl")
    player = Player(setup, results, Budget(1e5), _machine(), lines.append, line_of)
    player.run(Session(group, "peer", (slow, quick), FAKE))
    assert [row["case"] for row in results.rows] == ["base-c1", "(end)"]
    assert "  no time is left for lora32-c64" in lines


def test_weights_are_written_by_a_process_of_its_own_and_only_once(work: Path) -> None:
    group, setup = groups(SMALL)["start"], Setup(work, "tiny", "cpu", "float32", layers=2)
    write_files(setup, group, group.plays)
    folder = setup.model_of(group)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    write_files(setup, group, group.plays)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_stored_form_stands_in_a_folder_of_its_own(work: Path) -> None:
    group, plain = groups(SMALL)["one-gpu"], Setup(work, "tiny", "cpu", "float32")
    stored = replace(plain, stored="gptq")
    write_files(stored, group, ())
    config, marked = (
        json.loads((setup.model_of(group) / "config.json").read_text()) for setup in (plain, stored)
    )
    assert marked == config | {"quantization_config": STORED["gptq"]}
    assert (stored.model_of(group) / "tokenizer.json").is_file()
    assert stored.adapters_of(group) == plain.adapters_of(group)
    assert stored.words(group) != plain.words(group)


def _machine() -> Row:
    return {"boot": "here", "gpus": []}


def tiny_engine(setup: Setup, name: str) -> EngineConfig:
    """A group's own engine, with a small cache, in this process."""
    config = server_config(setup, groups(SMALL)[name])
    args: dict[str, Any] = config["applications"][0]["args"]
    args["engine"]["cache"] = {"num_blocks": 2048}
    return ServeConfig.model_validate(args).engine


@pytest.fixture(scope="module")
def setup(work: Path) -> Setup:
    return Setup(work, "tiny", "cpu", "float32")


@pytest.fixture(scope="module")
def ours(setup: Setup) -> Iterator[LoadTarget]:
    """Our server over the one-GPU group's configuration, tiny and without Ray."""
    group = groups(SMALL)["one-gpu"]
    with served(local.build(tiny_engine(setup, "one-gpu"))) as url:
        yield LoadTarget(url, setup.vocabulary_of(group))


def played(target: LoadTarget, *plays: Play) -> list[Row]:
    """These cases' rows."""

    async def play() -> list[Row]:
        await warm_up(target, plays)
        return [await measure(each, target) for each in plays]

    return asyncio.run(play())


def small(name: str) -> Play:
    """A case of the one-GPU group over fewer adapters."""
    [play] = [play for play in groups(SMALL)["one-gpu"].plays if play.name == name]
    assert isinstance(play.what, Case)
    case = replace(play.what, models=play.models[:FEW], requests=2 * FEW)
    return replace(play, what=replace(case, input_length=16, output_length=4))


@pytest.mark.sweep
def test_our_server_answers_mixed_ranks_and_plain_ones(ours: LoadTarget) -> None:
    rows = played(ours, small("lora32-c64"), small("mixed32-c64"))
    assert [(row["case"], row["errors"]) for row in rows] == [("lora32-c64", 0), ("mixed32-c64", 0)]
    assert [row["cached_prompt_tokens"] for row in rows] == [0, 0]
    assert all(row["output_tokens_per_s"] > 0 for row in rows)


def test_our_server_is_fair_to_every_adapter(ours: LoadTarget) -> None:
    [play] = [play for play in groups(SMALL)["fairness"].plays if play.name == "flood"]
    assert isinstance(play.what, Fair)
    load = replace(play.what.load, requests=6, rate=20.0)
    [row] = played(ours, Play(Fair(load, Terms("", 0, 16, 4, flood_lead_s=0.1)), 1.0))
    assert (row["case"], row["requests"], row["errors"]) == ("flood", 6, 0)


@pytest.mark.sweep
def test_our_server_answers_what_comes_by_chance(ours: LoadTarget) -> None:
    steady, highest = (play.what for play in groups(SMALL)["open-loop"].plays)
    assert isinstance(steady, Open)
    assert isinstance(highest, Open)
    loads = [replace(each.load, models=("a0", "a1"), rate=20.0) for each in (steady, highest)]
    row, found = played(ours, *(Play(Open(load, load is loads[1]), 1.0) for load in loads))
    assert (row["case"], row["errors"]) == ("steady", 0)
    assert (found["case"], found["errors"]) == ("highest", 0)
    assert 5 < row["requests"] < 50
    assert row["cached_prompt_tokens"] > 0, "system prompts are shared"
    assert [rate for rate, _ in found["tried"]] in ([10.0, 20.0], [20.0, 40.0])


def test_our_server_holds_some_answers_to_a_schema(setup: Setup) -> None:
    group = groups(SMALL)["structured"]
    write_files(setup, group, group.plays)
    [play] = group.plays
    assert isinstance(play.what, Comparison)
    case = replace(play.what.case, concurrency=4, requests=4, output_length=4)
    with served(local.build(tiny_engine(setup, "structured"))) as url:
        target = LoadTarget(url, setup.vocabulary_of(group))
        [row] = played(target, replace(play, what=replace(play.what, case=case)))
    assert (row["errors"], row["share"], row["cached_prompt_tokens"]) == (0, 0.5, 0)
    expected = row["held_tokens_per_s"] / row["free_tokens_per_s"]
    assert row["ratio"] == pytest.approx(expected, abs=1e-3)


def test_what_the_server_announces_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    print("[loray 7] deploying tiny.yaml\n  a line of something else\n\nLoRay serves base on URL")
    choices = {
        "device": "cpu x 1",
        "adapter kernel": "reference (the CPU path)",
        "http front": "haproxy",
    }
    serve._print_table(choices)
    print("\nTry:\n  curl http://127.0.0.1 -H 'content-type: application/json'")
    assert read_choices(capsys.readouterr().out) == choices


def record(step: int, rows: int, tokens: int, captured: bool, idle: float | None) -> StepRecord:
    return StepRecord(step, rows, tokens, rows, 0, 0, 0.005, idle, captured)


SPENDER = """
import time
while time.process_time() < 0.3:
    pass
print("spent", flush=True)
input()
"""


def test_a_driver_that_does_not_reply_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    reader = StepReader("no address", log)
    with pytest.raises(ServerError, match="does not report its steps"):
        reader.join()
    reader.stop()
    assert "no address" in log.read_text()


def test_cpu_time_is_counted_by_the_titles_of_processes() -> None:
    mark = f"a-title-of-its-own-{os.getpid()}"
    command = [sys.executable, "-c", SPENDER, mark]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"spent\n"
        spent = cpu_seconds({"it": mark, "none": f"{mark}!"})
        process.kill()
    assert spent.keys() == {"it"}
    assert spent["it"] > 0.25
    assert cores({"it": 1.0}, {"it": 2.5, "new": 1.0}, 2.0) == {"it": 0.75, "new": 0.5}


def test_steps_are_reported_as_shares() -> None:
    steps = [
        record(7, 2, 700, False, 5.0),  # idle before the case began
        record(8, 2, 2, True, 0.001),
        record(9, 2, 2, True, 0.003),
        record(10, 2, 2, False, 0.0),
    ]
    assert shares_of(steps, 0.2) == {
        "steps": 4,
        "decode_steps": 3,
        "captured_share": 0.5,
        "device_idle_share": 0.02,
    }
    assert "device_idle_share" not in shares_of([record(1, 1, 1, False, None)], 0.1)
    before = {"stage": LoadSum(2, 0.5), "place": LoadSum(3, 0.1)}
    after = {"stage": LoadSum(4, 0.6), "place": LoadSum(3, 0.1), "fetch": LoadSum(1, 0.002)}
    assert mean_loads(before, after) == {"stage": 50.0, "fetch": 2.0}


def test_rows_are_in_the_file_at_once(tmp_path: Path) -> None:
    results = Results(tmp_path / "deep" / "results.jsonl")
    for case in ("base-c1", "base-c64"):
        results.append({"group": "one-gpu", "side": "ours", "case": case, "setup": "s"})
        last = results.path.read_text().splitlines()[-1]
        assert json.loads(last)["case"] == case
