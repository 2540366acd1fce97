"""What the table would play, and that its servers hold what its cases need."""

import argparse
import itertools
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks.table.command import check_port, main, parser, peer_of, selected_names, sessions_of
from benchmarks.table.figures import FIGURES
from benchmarks.table.groups import FULL, SMALL, Play, RowGroup, groups, written
from benchmarks.table.play import PEER_OF, Budget, Peer, Session, plan, seed_of, unmeasured
from benchmarks.table.rows import Gpu, Results, gpus
from benchmarks.table.setup import (
    PEERS,
    Setup,
    SetupError,
    change,
    check_space,
    host_bytes,
    peer_command,
    server_config,
)
from benchmarks.workload import WorkloadRecipe
from configs.serve import ServeConfig
from scheduler.adapters.page_pool import AdapterPages
from tests.benchmarks.table.rows import rate

PEER = Peer("serve-base {model}", "serve-adapters {lora_modules}")
ALL = list(groups(FULL).values())


def parsed(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(list(arguments))


def names(sessions: list[Session]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(s.group.name, s.side, tuple(p.name for p in s.plays)) for s in sessions]


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvidia-smi with two GPUs."""
    script = tmp_path / "nvidia-smi"
    lines = "0, NVIDIA H200, 4, 143771, 580.159.04\n1, NVIDIA H200, 900, 143771, 580.159.04\n"
    only = 'case "$*" in *--id=1*) printf "$lines" | tail -n 1;; *) printf "$lines";; esac'
    script.write_text(f"#!/bin/sh\nlines='{lines}'\n{only}\n")
    script.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize("group", ALL, ids=lambda group: group.name)
def test_every_configuration_is_one_that_the_server_takes(group: RowGroup, tmp_path: Path) -> None:
    config = yaml.safe_load(yaml.safe_dump(server_config(Setup(tmp_path), group)))
    [app] = config["applications"]
    engine = ServeConfig.model_validate(app["args"]).engine
    assert engine.tensor_parallel == group.gpus
    assert engine.adapters.host_bytes == host_bytes(Setup(tmp_path), group, group.plays)
    ranks = [recipe.rank for recipe in written(group.plays)]
    assert engine.adapters.max_rank >= max(ranks, default=0)


@pytest.mark.parametrize(
    ("name", "case", "slots"),
    [
        ("one-gpu", "lora32-c64", 32),
        ("one-gpu", "mixed32-c64", 32),
        ("two-gpus", "mixed32-c64", 32),
        ("seventy-b", "lora32-c64", 32),
        ("churn", "resident", 32),
        ("churn", "turns", 32),
        ("churn", "small", 32),
        ("churn-all-resident", "all-resident", 128),
        ("open-loop", "steady", 32),
        ("fairness", "open", 3),
    ],
)
def test_pools_hold_as_many_adapters_as_the_case_is_about(name: str, case: str, slots: int) -> None:
    group = groups(FULL)[name]
    [play] = [play for play in group.plays if play.name == case]
    kind = play.models[0][0]
    ranks = [each.rank for each in written([play]) if each.name[0] == kind]
    pages = AdapterPages([group.pages], group.slots)
    for rank in ranks[:slots]:
        need = [-(-rank // 8)]
        assert pages.fits(need, 0, [0])
        pages.allocate(need)
    assert not pages.fits([1], 0, [0]), "there is room for one more"


@pytest.mark.parametrize("scale", [FULL, SMALL])
def test_every_case_has_a_figure_and_a_seed_of_its_own(scale: object) -> None:
    made = groups(FULL if scale is FULL else SMALL)
    played = [(group.name, play.name) for group in made.values() for play in group.plays]
    assert sorted(played) == sorted(FIGURES)
    for group in made.values():
        seeds = sorted(seed_of(play) for play in group.plays)
        apart = [after - before for before, after in itertools.pairwise(seeds)]
        # A case may use a few seeds from its own on.
        assert min(apart, default=100) >= 100


def test_patterns_choose_cases() -> None:
    sessions = plan(groups(FULL), ["one-gpu", "churn"], ["lora*-c64", "zipf"], None)
    assert names(sessions) == [
        ("one-gpu", "ours", ("lora8-c64", "lora32-c64", "lora1-c64")),
        ("churn", "ours", ("zipf",)),
    ]


def test_a_start_has_a_server_of_its_own() -> None:
    sessions = plan(groups(FULL), ["start"], [], None)
    assert [case for _, _, case in names(sessions)] == [("first",), ("warm",), ("weights",)]


def test_a_peer_pays_for_adapters_only_where_they_are() -> None:
    sessions = plan(groups(FULL), ["peer"], ["*-c64", "base-c1"], PEER)
    assert names(sessions) == [
        ("one-gpu", "peer", ("base-c1", "base-c64")),
        ("one-gpu", "peer", ("lora8-c64", "lora32-c64", "lora1-c64", "system32-c64")),
        ("one-gpu", "peer", ("mixed32-c64",)),
    ]
    assert [s.template for s in sessions] == [PEER.base, PEER.adapters, PEER.adapters]
    churned = plan(groups(FULL), ["peer-churn"], [], PEER)
    assert names(churned) == [
        ("churn", "peer", ("resident", "zipf", "turns")),
        ("churn", "peer", ("small",)),
    ]


def test_a_peers_command_is_filled_in(tmp_path: Path) -> None:
    setup = Setup(tmp_path, port=8123)
    [session] = plan(groups(FULL), ["peer"], ["mixed*"], Peer(*PEERS["vllm"]))
    command = peer_command(setup, session.group, session.plays, session.template)
    options = dict(itertools.pairwise(command))
    assert (options["--max-lora-rank"], options["--max-loras"], options["--port"]) == (
        "64",
        "32",
        "8123",
    )
    modules = command[command.index("--lora-modules") + 1 :]
    assert len(modules) == 32
    assert modules[3] == f"m3={tmp_path / 'llama3-8b' / 'adapters' / 'm3'}"
    with pytest.raises(SetupError, match="lora_modules"):
        peer_command(setup, session.group, session.plays, "serve {modell}")


def test_what_the_results_hold_is_not_played_again(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    for row in (
        rate("lora32-c64", 5875.0),
        rate("lora1-c64", 0.0, errors=3),
        rate("base-c64", 6600.0, "peer"),
        rate("base-c1", 218.0, setup="tiny, float32, cpu"),
    ):
        results.append(row)
    setup = Setup(tmp_path)
    sessions = plan(groups(FULL), ["one-gpu"], ["base-c1", "*-c64"], None)
    left = unmeasured(sessions, Results(tmp_path / "results.jsonl"), setup)
    [(_, _, cases)] = names(left)
    rest = ("lora8-c64", "lora1-c64", "mixed32-c64", "system32-c64")
    assert cases == ("base-c1", "base-c64", *rest)
    arguments = ("--only", "one-gpu", "--cases", "lora32-c64")
    assert sessions_of(parsed(*arguments, "--device", "cpu", "--again"), results)
    assert sessions_of(parsed(*arguments, "--device", "cpu"), results)
    shared = unmeasured(plan(groups(FULL), ["one-gpu"], ["lora32-c64"], None), results, setup)
    assert shared == []


def test_a_budget_counts_down() -> None:
    clock = iter([100.0, 130.0, 165.0])
    budget = Budget(60.0, lambda: next(clock))
    assert budget.left == 30.0
    assert budget.left == -5.0
    assert Budget(None).left == float("inf")


@pytest.mark.usefixtures("two_gpus")
def test_groups_are_those_that_the_gpus_allow() -> None:
    assert gpus()[1] == Gpu(1, "NVIDIA H200", 900, 143771, "580.159.04")
    known = groups(FULL)
    here = selected_names(parsed(), known)
    assert "two-gpus" in here
    assert not {"seventy-b", "experts"} & set(here)
    assert "experts" in selected_names(parsed("--shape", "qwen3-30b-a3b"), known)
    assert not set(here) & set(PEER_OF)
    assert {"peer", "peer-two-gpus", "peer-churn"} < set(
        selected_names(parsed("--peer", "vllm"), known)
    )
    with pytest.raises(SetupError, match="needs 4 GPUs, this machine has 2"):
        selected_names(parsed("--only", "seventy-b"), known)
    with pytest.raises(SetupError, match="needs --peer"):
        selected_names(parsed("--only", "peer"), known)
    with pytest.raises(SetupError, match="experts needs a --shape with routed experts"):
        selected_names(parsed("--only", "experts"), known)


def test_a_host_tier_holds_adapters_of_experts(tmp_path: Path) -> None:
    group, setup = groups(FULL)["experts"], Setup(tmp_path, "qwen3-30b-a3b")
    # Eight of rank 16 over 48 layers of 128 experts, gate, up and down of 2,048 by 768 each.
    of_experts = 8 * 16 * 48 * 128 * 3 * (2048 + 768) * 2
    held = host_bytes(setup, group, group.plays) - host_bytes(
        setup, replace(group, expert_pages=None), group.plays
    )
    assert of_experts < held < 1.2 * of_experts


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_those_that_cuda_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.index for gpu in gpus()] == [1]
    with pytest.raises(SetupError, match="needs 2 GPUs, this machine has 1"):
        selected_names(parsed("--only", "two-gpus"), groups(FULL))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus() == []


def test_peers_by_name_and_by_command() -> None:
    assert peer_of(parsed()) is None
    assert peer_of(parsed("--peer", "mine {port}")) == Peer("mine {port}", "mine {port}")
    both = parsed("--peer", "mine {port}", "--peer-base", "plain {port}")
    assert peer_of(both) == Peer("plain {port}", "mine {port}")
    found = peer_of(parsed("--peer", "vllm", "--peer-env", "PYTHONPATH=/tmp/vllm"))
    assert found is not None
    assert found.base.startswith("env PYTHONPATH=/tmp/vllm {python} -m vllm")
    assert found.adapters.startswith(found.base)


def test_settings_go_where_they_are_named() -> None:
    args: dict[str, object] = {"engine": {"limits": {"max_running": 256}}}
    change(args, "engine.limits.max_running=64")
    change(args, "engine.cache.dtype=float16")
    assert args == {"engine": {"limits": {"max_running": 64}, "cache": {"dtype": "float16"}}}
    for wrong in ("engine.limits", "=4", "engine.limits.max_running.more=1"):
        with pytest.raises(SetupError, match="--set"):
            change(args, wrong)


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    large = WorkloadRecipe("a0", rank=10**9, seed=0)
    with pytest.raises(SetupError, match="GB are free: name another disk"):
        check_space(Setup(tmp_path), groups(FULL)["churn"], [large])


def test_a_port_that_is_taken() -> None:
    other = socket.create_server(("127.0.0.1", 0))
    with other, pytest.raises(SetupError, match="name a free one"):
        check_port(other.getsockname()[1])


def test_the_plan_is_printed_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "tiny", "--device", "cpu", "--plan", "--only", "fairness"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--out", "/no/file"])
    assert ended.value.code == 0
    assert "open calm flood" in capsys.readouterr().out


def test_no_gpu_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["--only", "one-gpu", "--out", str(tmp_path / "results.jsonl")])
    assert ended.value.code == 2
    assert "--shape tiny --device cpu" in capsys.readouterr().err


def test_vocabularies_leave_out_what_ends_a_prompt(tmp_path: Path) -> None:
    setup, known = Setup(tmp_path, shape="tiny"), groups(SMALL)
    assert setup.vocabulary_of(known["one-gpu"]) < 2048 - 1
    assert 300 < setup.vocabulary_of(known["structured"]) < 2048 - 1368
    assert Setup(tmp_path).vocabulary_of(known["one-gpu"]) == 120_000


def test_a_play_names_its_models() -> None:
    plays: dict[str, Play] = {p.name: p for group in ALL for p in group.plays}
    assert plays["flood"].models == ("a0", "a1", "a2", "a3", "a4", "a5")
    assert plays["half-held"].models == plays["warm"].models == ("base",)
    assert len(plays["small"].models) == 1000
