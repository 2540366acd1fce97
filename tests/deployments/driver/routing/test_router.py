"""The router under Serve's own base class."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID

from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.contract import GenerateRequest
from deployments.driver.routing.policy import (
    COLD_SLACK,
    LEEWAY,
    HoldingTier,
    ReplicaReport,
    RoutingPolicy,
    adapter_hash,
)
from deployments.driver.routing.router import AdapterRouter
from deployments.early_submit import replica_listener
from tests.clocks import Clock
from tests.deployments.driver.routing.stories import PATIENCE_S

DRIVER = DeploymentID("Driver", "loray")
RED = AdapterReference(AdapterSource.LOCAL, "red")


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a router knows grows old, however slow the test is."""
    monkeypatch.setattr("deployments.driver.routing.router.time", Clock())


class Replica:
    """What Serve's base class asks of a replica; one that does not answer is silent for ever."""

    def __init__(self, name: str, stats: dict[str, Any] | None = None) -> None:
        self.replica_id = ReplicaID(name, DRIVER)
        self.routing_stats = stats or {}
        self.max_ongoing_requests = 100
        self.num_open = 0
        self.num_probes = 0
        self.answers = True

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.num_probes += 1
        if not self.answers:
            await asyncio.Event().wait()
        return self.num_open


class Calls:
    """Calls of a deployment over an `AdapterRouter`, sent as Serve sends them."""

    def __init__(self, *replicas: Replica) -> None:
        self.router = AdapterRouter(
            DRIVER,
            DeploymentHandleSource.REPLICA,
            use_replica_queue_len_cache=True,
            get_curr_time_s=Clock().monotonic,
        )
        self.router.initialize_state()
        self.router._routing = RoutingPolicy(random.Random(0))
        self.router.update_replicas(list(replicas))
        self.num_calls = 0

    async def call(self, *arguments: object, request: str | None = None, takes: bool = True) -> str:
        """The replica that takes a call of an HTTP request, by default of one of its own."""
        self.num_calls += 1
        http = request or f"request {self.num_calls}"
        metadata = RequestMetadata(request_id=http, internal_request_id=http)
        pending = PendingRequest(args=list(arguments), kwargs={}, metadata=metadata)
        replica = await self.router._choose_replica_for_request(pending)
        if not takes:
            return str(replica.replica_id.unique_id)
        self.router.on_send_request(replica.replica_id)
        replica.num_open += 1
        name: str = replica.replica_id.unique_id
        return name


def play(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def generate(adapter: AdapterReference | None) -> GenerateRequest:
    return GenerateRequest("", [], adapter)


def holding(name: str, adapter: AdapterReference) -> Replica:
    return Replica(name, ReplicaReport({adapter_hash(adapter): HoldingTier.DEVICE}).packed())


def test_every_call_about_an_adapter_goes_to_its_holder() -> None:
    async def story() -> None:
        for name in ("a", "b"):
            others = [Replica(other) for other in ("a", "b", "c") if other != name]
            calls = Calls(*others, holding(name, RED))
            assert await calls.call(generate(RED), "reply to") == name
            assert await calls.call(RED, None) == name

    play(story)


def test_calls_about_no_adapter_go_anywhere() -> None:
    async def story() -> None:
        calls = Calls(Replica("a"), Replica("b"), holding("c", RED))
        served = Counter([await calls.call(generate(None)) for _ in range(30)])
        served += Counter([await calls.call() for _ in range(30)])
        assert set(served) == {"a", "b", "c"}
        assert max(served.values()) - min(served.values()) <= 4, "the less busy of two"

    play(story)


def test_a_burst_is_spread_though_all_of_it_is_routed_at_once() -> None:
    """Each request counts before the next one is routed."""

    async def story() -> None:
        calls = Calls(Replica("a"), Replica("b"))
        served = Counter(await asyncio.gather(*(calls.call(generate(RED)) for _ in range(60))))
        few, many = sorted(served.values())
        at_once = calls.router.max_num_routing_tasks
        assert many <= LEEWAY * few + COLD_SLACK + at_once, served

    play(story)


def test_requests_follow_the_first_before_it_is_accepted() -> None:
    async def story() -> None:
        at_home = await Calls(Replica("a"), Replica("b")).call(RED)
        home, other = Replica(at_home), Replica("b" if at_home == "a" else "a")
        calls = Calls(home, other)
        for _ in range(50):
            calls.router.on_send_request(home.replica_id)
        assert await calls.call(RED, takes=False) == other.replica_id.unique_id
        for i in range(50):
            calls.router.on_request_completed(home.replica_id, f"request {i}")
        assert await calls.call(RED) == other.replica_id.unique_id

    play(story)


def test_a_late_report_of_acceptance_changes_no_count() -> None:
    """By gRPC it comes with the answer, and says how busy the replica was long ago."""

    async def story() -> None:
        at_home = await Calls(Replica("a"), Replica("b")).call(RED)
        home, other = Replica(at_home), Replica("b" if at_home == "a" else "a")
        calls = Calls(home, other)
        for _ in range(COLD_SLACK + 1):
            calls.router.on_send_request(home.replica_id)
        for i in range(COLD_SLACK + 1):
            calls.router.on_new_queue_len_info(home.replica_id, 50)
            calls.router.on_request_completed(home.replica_id, f"request {i}")
            calls.router.decrement_queue_len_cache(home.replica_id)
        assert await calls.call(RED) == at_home

    play(story)


def test_calls_of_one_http_request_may_come_at_once() -> None:
    async def story() -> None:
        calls = Calls(Replica("a"), Replica("b"))
        served = await asyncio.gather(*(calls.call(RED, request="one") for _ in range(8)))
        assert len(served) == 8

    play(story)


def test_a_full_or_silent_holder_is_passed_over() -> None:
    async def story() -> None:
        full, silent = holding("a", RED), holding("a", RED)
        full.num_open = full.max_ongoing_requests
        silent.answers = False
        for holder in (full, silent):
            calls = Calls(holder, Replica("b"))
            calls.router.replica_queue_len_cache.invalidate_key(holder.replica_id)
            assert await calls.call(generate(RED)) == "b"

    play(story)


def test_when_all_are_full_a_request_waits_and_tries_again() -> None:
    async def story() -> None:
        only = holding("a", RED)
        only.num_open = only.max_ongoing_requests
        calls = Calls(only)
        waiting = asyncio.create_task(calls.call(generate(RED)))
        await asyncio.wait([waiting], timeout=0.1)
        assert not waiting.done()
        assert only.num_probes < 20
        only.num_open = 3
        assert await waiting == "a"

    play(story)


def test_replicas_come_report_and_die() -> None:
    async def story() -> None:
        calls = Calls()
        waiting = asyncio.create_task(calls.call(generate(RED)))
        await asyncio.sleep(0)
        first = Replica("a")
        calls.router.update_replicas([first])
        assert await waiting == "a", "it came when there was no replica"
        holder = holding("b", RED)
        calls.router.update_replicas([first, holder])
        assert await calls.call(generate(RED)) == "b"
        calls.router.on_replica_actor_died(holder.replica_id)
        assert await calls.call(generate(RED)) == "a"
        calls.router.update_replicas([first])
        assert await calls.call(generate(RED)) == "a"

    play(story)


def test_a_client_that_leaves_delays_no_other() -> None:
    async def story() -> None:
        calls = Calls()
        leaving = asyncio.create_task(calls.call(generate(RED), request="one"))
        staying = asyncio.create_task(calls.call(generate(RED), request="one"))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        calls.router.update_replicas([Replica("a")])
        assert await staying == "a"

    play(story)


def test_a_listener_gets_the_replica_of_each_call() -> None:
    async def story() -> None:
        calls = Calls(holding("a", RED), Replica("b"))
        replies: list[str] = []
        with replica_listener(replies.append):
            requests = [asyncio.create_task(calls.call(generate(RED))) for _ in range(2)]
        await calls.call(generate(RED))
        assert await asyncio.gather(*requests) == replies == ["a", "a"]

    play(story)


def test_a_listener_gets_the_next_replica_after_a_retry() -> None:
    async def story() -> None:
        dead, other = holding("a", RED), Replica("b")
        calls = Calls(dead, other)
        replies: list[str] = []
        metadata = RequestMetadata(request_id="one", internal_request_id="one")
        pending = PendingRequest(args=[generate(RED)], kwargs={}, metadata=metadata)
        with replica_listener(replies.append):
            await calls.router._choose_replica_for_request(pending)
            calls.router.on_replica_actor_died(dead.replica_id)
            await calls.router._choose_replica_for_request(pending, is_retry=True)
        assert replies == ["a", "b"]

    play(story)
