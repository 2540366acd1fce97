"""Quotas are shared out among replicas, however many there are just now."""

import asyncio
import threading

import httpx
import pytest

from configs.api import ApiConfig, KeyConfig
from deployments.ingress.access.peers import ReplicaCount
from deployments.ingress.access.quotas import Bucket, Quota
from deployments.ingress.generation.engine import IngressSettings
from tests.clocks import Clock
from tests.deployments.ingress.conftest import PATIENCE, Server


class Controller:
    """Returns the number of replicas, or fails; called from threads."""

    def __init__(self) -> None:
        self.replicas: int | None = 1
        self.times = 0
        self.called = threading.Condition()

    def __call__(self) -> int:
        with self.called:
            self.times += 1
            self.called.notify_all()
            if self.replicas is None:
                raise ConnectionError("it is gone")
            return self.replicas

    def wait(self, times: int) -> None:
        """Wait until it was called so often."""
        with self.called:
            assert self.called.wait_for(lambda: self.times >= times, timeout=PATIENCE)


def test_the_number_is_updated() -> None:
    controller = Controller()

    async def story() -> list[int]:
        seen = []
        peers = ReplicaCount(controller, seconds=0.001)
        async with peers.watched():
            for truth in (3, None, 0, 2):
                with controller.called:
                    controller.replicas, so_far = truth, controller.times
                # At the third call the result of the second one is stored.
                await asyncio.to_thread(controller.wait, so_far + 3)
                seen.append(peers.count())
        return seen

    assert asyncio.run(story()) == [3, 3, 1, 2]
    times = controller.times
    assert times >= 12


def test_replicas_share_a_bucket() -> None:
    clock, replicas = Clock(), 2
    bucket = Bucket(60, clock, lambda: replicas)
    assert bucket.seconds_until(30) == 0.0
    assert bucket.seconds_until(31) == pytest.approx(2.0)
    replicas = 3
    clock.now += 3600
    assert bucket.seconds_until(20) == 0.0
    assert bucket.seconds_until(21) == pytest.approx(3.0)
    replicas = 1
    clock.now += 3600
    assert bucket.seconds_until(60) == 0.0


def test_a_small_quota_is_not_divided_to_nothing() -> None:
    clock = Clock()
    quota = Quota(1, 1, clock, lambda: 4)
    quota.count_request()
    quota.admit_tokens()
    clock.now += 4 * 60
    quota.count_request()


def test_a_key_has_a_part_of_its_quota_on_each_replica(
    server: Server, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POETS_KEY", "poets")
    key = KeyConfig(name="poets", env="POETS_KEY", requests_per_minute=4)
    server.fresh_app(IngressSettings(api=ApiConfig(keys=(key,)), replicas=lambda: 2))
    headers = {"authorization": "Bearer poets"}
    replies = [http.post("/tokenize", json={"inputs": "a"}, headers=headers) for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 200, 429]
    assert replies[2].headers["retry-after"] == "30"
    server.clock.now += 30
    assert http.post("/tokenize", json={"inputs": "a"}, headers=headers).status_code == 200
