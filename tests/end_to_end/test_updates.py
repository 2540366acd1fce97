"""The yaml is edited while clients keep asking: no request fails, and only what must restarts."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.end_to_end.clients import (
    MODELS,
    Answers,
    adapter_of,
    ask_driver,
    wait_for,
)
from tests.end_to_end.deploys import deploy, driver_options, restore, started_config
from tests.end_to_end.processes import drivers
from tests.end_to_end.serving import PATIENCE_SECONDS, Served

QUESTION = "What is the capital of France?"
NUM_CLIENTS = 4

pytestmark = pytest.mark.ray


class Load:
    """Clients that ask again and again; every answer must be the right one."""

    def __init__(self, served: Served, answers: Answers) -> None:
        self.served, self.answers = served, answers
        self.num_answered = 0
        self.failures: list[str] = []
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(NUM_CLIENTS)]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, i: int) -> None:
        with httpx.Client(timeout=PATIENCE_SECONDS) as client:
            while not self._ending.is_set():
                i += 1
                model = MODELS[i % 5]
                body = {"inputs": QUESTION, "parameters": {"adapter_id": adapter_of(model)}}
                try:
                    reply = client.post(f"{self.served.url}/generate", json=body)
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    continue
                self.num_answered += 1
                expected = self.answers[model][QUESTION]["raw"]
                if reply.status_code != 200 or reply.json()["generated_text"] != expected:
                    self.failures.append(f"{reply.status_code} {reply.text[:300]}")


@pytest.mark.sweep
def test_replicas_come_and_go_without_restarting_the_first(
    served: Served, answers: Answers
) -> None:
    [first] = drivers(served)
    config = started_config(served)
    with given_by_hand(served) as reached, Load(served, answers) as load:
        options = driver_options(config)
        options["autoscaling_config"] = {"min_replicas": 2, "max_replicas": 3}
        deploy(served, config)
        wait_for(lambda: len(drivers(served)) == 2)
        assert first in drivers(served), "the first driver was restarted"
        wait_for(lambda: reached() == 2)
        check_that_commands_reach(served, 2)
        before = load.num_answered
        wait_for(lambda: load.num_answered > before + 20)
        options["autoscaling_config"] = {
            "min_replicas": 1,
            "max_replicas": 1,
            "downscale_delay_s": 0.5,
        }
        deploy(served, config)
        wait_for(lambda: len(drivers(served)) == 1)
        assert drivers(served) == [first], "scaling down stopped the first driver"
        before = load.num_answered
        wait_for(lambda: load.num_answered > before + 20)
    assert load.failures == []
    restore(served)
    assert drivers(served) == [first], "going back to the first numbers restarted the driver"


@pytest.mark.sweep
def test_to_zero_replicas_and_back(served: Served, answers: Answers) -> None:
    config = started_config(served)
    driver_options(config)["autoscaling_config"] = {
        "min_replicas": 0,
        "max_replicas": 1,
        "downscale_delay_s": 0.5,
        "upscale_delay_s": 0.0,
        "look_back_period_s": 2.0,
    }
    deploy(served, config)
    wait_for(lambda: drivers(served) == [])
    body = {"inputs": QUESTION, "parameters": {"adapter_id": "pirate"}}
    reply = httpx.post(f"{served.url}/generate", json=body, timeout=PATIENCE_SECONDS)
    assert reply.json()["generated_text"] == answers["pirate"][QUESTION]["raw"]


def operator(served: Served) -> httpx.Client:
    return httpx.Client(base_url=f"{served.url}/v1", timeout=PATIENCE_SECONDS)


@contextmanager
def given_by_hand(served: Served) -> Iterator[Callable[[], int]]:
    """A name and a pin that no yaml has; returns how many driver replicas know both."""
    with operator(served) as client:
        name = {"lora_name": "captain", "lora_path": "local:pirate"}
        assert client.post("/load_lora_adapter", json=name).is_success
        pin = {"id": "french", "pin": True}
        assert client.post("/adapters", json=pin).is_success

        def reached() -> int:
            named, pinned = (
                client.get(f"/adapters/{each}").raise_for_status().json()["replicas"]
                for each in ("captain", "french")
            )
            # A replica may have come between the two questions.
            both = named.keys() & pinned.keys()
            return sum(named[each]["state"] != "absent" and pinned[each]["pinned"] for each in both)

        assert reached() == 1
        yield reached
        client.post("/unload_lora_adapter", json={"lora_name": "captain"})
        client.patch("/adapters/french", json={"pinned": False})


def check_that_commands_reach(served: Served, num_replicas: int) -> None:
    """Every driver replica loads, pins and unloads what an operator names."""

    def residency(reply: httpx.Response) -> list[str]:
        result = reply.raise_for_status().json()["replicas"]
        return [each["state"] for each in result.values()]

    with operator(served) as client:
        # The ingress may hear of a new replica a moment later than Ray does.
        wait_for(lambda: len(residency(client.get("/adapters/pirate"))) == num_replicas)
        loaded = residency(client.post("/adapters", json={"id": "pirate", "pin": True}))
        assert len(loaded) == num_replicas
        assert set(loaded) <= {"host", "device"}
        wait_for(lambda: set(residency(client.get("/adapters/pirate"))) == {"device"})
        reply = client.patch("/adapters/pirate", json={"pinned": False})
        assert not reply.json()["pinned"]
        assert len(residency(client.delete("/adapters/pirate"))) == num_replicas


def concurrency(served: Served) -> int:
    """How many requests the driver takes at once, waiting ones included, as /info reports it."""
    reply = httpx.get(f"{served.url}/info", timeout=30).raise_for_status()
    limit: int = reply.json()["max_concurrent_requests"]
    return limit


def test_changes_and_mistakes_of_the_yaml_end_no_replica(served: Served, answers: Answers) -> None:
    """A change of user_config, a typo in it, and a model that is not there; one after another."""
    [first] = drivers(served)
    config = started_config(served)

    def refused() -> bool:
        selected = httpx.get(f"{served.url}/info", timeout=30).raise_for_status().json()["chosen"]
        return "pined_adapters" in selected.get("user_config", "")

    with Load(served, answers) as load:
        before = concurrency(served)
        options = driver_options(config)
        options["user_config"] = {"pined_adapters": ["pirate"]}
        deploy(served, config)
        wait_for(refused)
        options["user_config"] = {"pinned_adapters": ["pirate"], "max_queued": 77}
        deploy(served, config)
        # The ingress asks the driver for its description, so the new limit shows in /info.
        wait_for(lambda: concurrency(served) == before - 512 + 77 and load.num_answered > 20)
        options["user_config"] = {"pined_adapters": ["pirate"]}
        deploy(served, config)
        wait_for(refused)
        options["user_config"] = {"pinned_adapters": ["pirate"]}
        deploy(served, config)
        wait_for(lambda: not refused())
        options["user_config"] = {"max_queued": 77}
        deploy(served, config)
        wait_for(lambda: concurrency(served) == before - 512 + 77)
        del options["user_config"]
        deploy(served, config)
        wait_for(lambda: concurrency(served) == before)
        assert drivers(served) == [first]
        config["applications"][0]["args"]["engine"]["model"]["id"] = "/no/such/model"
        deploy(served, config)
        wait_for(lambda: ask_driver(served, "status") == "DEPLOY_FAILED")
        assert drivers(served) == [first]
    assert load.failures == []
    restore(served)
    assert drivers(served) == [first]


@pytest.mark.sweep
def test_a_rolling_update_serves_without_a_gap(served: Served, answers: Answers) -> None:
    """Another policy and new arguments are a new version: its replicas start before old ones stop.

    The last test of the file, for the way back is a new version too.
    """
    config = started_config(served)
    for options in config["applications"][0]["deployments"]:
        options["max_surge_percent"] = 100
    deploy(served, config)
    with Load(served, answers) as load:
        [first] = drivers(served)
        policy = {"policy_function": "deployments.autoscaling:LoadPolicy"}
        driver_options(config)["autoscaling_config"]["policy"] = policy
        config["applications"][0]["args"]["engine"]["limits"]["max_queued"] = 100
        deploy(served, config)
        wait_for(lambda: drivers(served) != [first] and len(drivers(served)) == 1)
        before = load.num_answered
        wait_for(lambda: load.num_answered > before + 20)
    assert load.failures == []
