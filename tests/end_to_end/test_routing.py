"""Two driver replicas: each adapter has a home, a hot one has both, and a death moves them."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import httpx
import psutil
import pytest

from tests.end_to_end.clients import (
    MODELS,
    Answers,
    StreamError,
    longest_questions,
    stream_text,
    until_open,
    wait_for,
)
from tests.end_to_end.deploys import deploy, driver_options, started_config
from tests.end_to_end.processes import drivers, ranks, stopped_processes
from tests.end_to_end.serving import PATIENCE_SECONDS, Served

ADAPTERS = MODELS[1:]
QUESTION = "What is the capital of France?"

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def two(demo: Served) -> Served:
    """The demo with two driver replicas, as the ingress knows, and no adapter on either."""
    config = started_config(demo)
    driver_options(config)["autoscaling_config"] = {"min_replicas": 2, "max_replicas": 2}
    deploy(demo, config)
    wait_for(lambda: len(replicas(demo)) == 2)
    for adapter in ADAPTERS:
        gone = httpx.delete(f"{demo.url}/v1/adapters/{adapter}", timeout=PATIENCE_SECONDS)
        assert gone.status_code in (200, 404), gone.text  # 404: no test before has used it
    return demo


def replicas(served: Served) -> set[str]:
    """Ids of the driver replicas that the ingress knows."""
    rows = httpx.get(f"{served.url}/v1/adapters", timeout=30).raise_for_status().json()["data"]
    return {name for row in rows for name in row["replicas"]}


def holders(served: Served, adapter: str) -> set[str]:
    """The replicas whose ranks hold an adapter."""
    row = httpx.get(f"{served.url}/v1/adapters/{adapter}", timeout=PATIENCE_SECONDS).json()
    return {name for name, each in row["replicas"].items() if each["state"] in ("host", "device")}


def process_of(served: Served, replica: str) -> psutil.Process:
    """A driver replica's process, by the log that it writes."""
    [found] = [
        process
        for process in drivers(served)
        if any(file.path.endswith(f"_{replica}.log") for file in process.open_files())
    ]
    return found


def ask(
    served: Served,
    sent: Sequence[tuple[str, str]],
    at_once: int,
    open_at: Collection[str] = (),
    strike: Callable[[], None] = lambda: None,
) -> list[str | StreamError]:
    """The replies to each (model, question), some at a time.

    open_at: driver replicas of which each is to have a request over the first of these models
    before any ends, which is when the blow falls.
    """

    async def play() -> list[str | StreamError]:
        gate = asyncio.Semaphore(at_once)
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:

            async def one(model: str, question: str) -> str | StreamError:
                async with gate:
                    try:
                        return await stream_text(client, served.url, model, question)
                    except StreamError as error:
                        return error

            with stopped_processes(ranks(served) if open_at else ()):
                replies = asyncio.gather(*(one(*each) for each in sent))
                if open_at:
                    await until_open(client, served.url, sent[0][0], at=open_at)
                strike()
            return await replies

    return asyncio.run(play())


def test_adapters_stay_on_their_homes(two: Served, answers: Answers) -> None:
    requests = [(ADAPTERS[i % len(ADAPTERS)], QUESTION) for i in range(40)]
    reply = ask(two, requests, at_once=4)
    assert reply == [answers[model][question]["raw"] for model, question in requests]
    assert [len(holders(two, adapter)) for adapter in ADAPTERS] == [1] * len(ADAPTERS)


def test_a_hot_adapter_reaches_both_replicas(two: Served, answers: Answers) -> None:
    questions = longest_questions(answers, 2)
    requests = [("french", questions[i % 2]) for i in range(48)]
    reply = ask(two, requests, at_once=48, open_at=replicas(two))
    assert reply == [answers[model][question]["raw"] for model, question in requests]
    assert holders(two, "french") == replicas(two)


def test_a_pushed_adapter_is_served_by_both(two: Served, answers: Answers) -> None:
    folder = Path("configs/demo/adapters")
    for version in ("pirate", "french"):
        fields = {
            "lora_name": "policy",
            "load_inplace": "true",
            "adapter_config": (folder / version / "adapter_config.json").read_text(),
        }
        weights = (folder / version / "adapter_model.safetensors").read_bytes()
        pushed = httpx.post(
            f"{two.url}/v1/push_lora_adapter",
            data=fields,
            files={"adapter_model": ("adapter_model.safetensors", weights)},
            timeout=PATIENCE_SECONDS,
        )
        assert pushed.status_code == 200, pushed.text
        row = pushed.json()
        assert {each["state"] for each in row["replicas"].values()} <= {"host", "device"}
        assert set(row["replicas"]) == replicas(two)
        reply = ask(two, [("policy", QUESTION)] * 24, at_once=12)
        assert reply == [answers[version][QUESTION]["raw"]] * 24
    gone = httpx.post(
        f"{two.url}/v1/unload_lora_adapter", json={"lora_name": "policy"}, timeout=PATIENCE_SECONDS
    )
    assert gone.status_code == 200, gone.text


def test_a_replica_dies_and_its_adapters_and_requests_move_without_a_failure(
    two: Served, answers: Answers
) -> None:
    [dying] = holders(two, "pirate")
    assert len(replicas(two)) == 2
    victim = process_of(two, dying)
    long = longest_questions(answers, 1)[0]
    requests = [(ADAPTERS[i % len(ADAPTERS)], long) for i in range(24)]
    reply = ask(two, requests, at_once=24, open_at=[dying], strike=victim.kill)
    assert reply == [answers[model][question]["raw"] for model, question in requests]
    # One by one: a replica that comes meanwhile would get those that wait for the other.
    requests = [(MODELS[i % len(MODELS)], QUESTION) for i in range(30)]
    reply = ask(two, requests, at_once=1)
    assert reply == [answers[model][question]["raw"] for model, question in requests]
    homes = [holders(two, adapter) for adapter in ADAPTERS]
    assert all(len(home) == 1 for home in homes), homes
    assert dying not in set().union(*homes)
    wait_for(lambda: len(replicas(two)) == 2 and dying not in replicas(two))
    assert ask(two, requests, at_once=1) == reply
    assert [holders(two, adapter) for adapter in ADAPTERS] == homes, (
        "what is held stays where it is when a replica comes"
    )
