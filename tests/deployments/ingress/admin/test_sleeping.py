"""vLLM's routes for sleep, over two replicas."""

import httpx
import pytest
from msgspec.structs import replace

from configs.api import ApiConfig
from configs.wire.sleep import SleepMode
from deployments.contract import EngineLoad, ErrorKind, Failed
from deployments.engine_commands import SleepEngine, WakeEngine
from deployments.ingress.generation.engine import IngressSettings
from tests.deployments.ingress.conftest import Server

LOAD = EngineLoad("tiny", 0, 0, 8, 8, 16, 4, 0, 0, 0, 0, [])


@pytest.fixture(autouse=True)
def _open_admin(server: Server) -> None:
    server.fresh_app(IngressSettings(loopback=True))


def test_every_replica_sleeps_and_wakes(http: httpx.Client, server: Server) -> None:
    assert http.post("/sleep?level=2&mode=keep").status_code == 200
    assert http.post("/sleep").status_code == 200
    assert http.post("/wake_up").status_code == 200
    kept, aborted, woken = server.driver.replicas.commands[-3:]
    assert isinstance(kept, SleepEngine)
    assert isinstance(aborted, SleepEngine)
    assert isinstance(woken, WakeEngine)
    assert (kept.mode, aborted.mode) == (SleepMode.KEEP, SleepMode.ABORT)
    assert kept.sent_at < aborted.sent_at < woken.sent_at


def test_a_clock_that_is_set_back_delays_no_wake(
    http: httpx.Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert http.post("/sleep").status_code == 200
    monkeypatch.setattr("time.time_ns", lambda: 1)
    assert http.post("/wake_up").status_code == 200
    slept, woken = server.driver.replicas.commands[-2:]
    assert isinstance(slept, SleepEngine)
    assert isinstance(woken, WakeEngine)
    assert slept.sent_at < woken.sent_at


def test_the_server_sleeps_once_all_replicas_do(http: httpx.Client, server: Server) -> None:
    asleep = replace(LOAD, asleep=True)
    for loads, sleeping in (([asleep, LOAD], False), ([asleep, asleep], True)):
        server.driver.engine_loads = loads
        assert http.get("/is_sleeping").json() == {"is_sleeping": sleeping}
    server.driver.engine_loads = []
    assert http.get("/is_sleeping").status_code == 503


def test_a_sleeping_server_is_healthy_and_says_that_it_sleeps(
    http: httpx.Client, server: Server
) -> None:
    server.driver.info = replace(server.driver.info, asleep=True)
    reply = http.get("/health")
    assert (reply.status_code, reply.json()) == (200, {"status": "sleeping"})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/sleep?level=0", "`level` must be one of 1, 2"),
        ("/sleep?mode=never", "`mode` must be one of abort, wait, keep"),
        ("/wake_up?tags=weights", "leave `tags` out"),
    ],
)
def test_what_cannot_be_done_is_refused(http: httpx.Client, path: str, message: str) -> None:
    reply = http.post(path)
    assert 400 <= reply.status_code < 500
    assert message in reply.text


def test_a_wake_that_fails_says_so(http: httpx.Client, server: Server) -> None:
    server.driver.replicas.members[1].broken = Failed(ErrorKind.UNAVAILABLE, "no room", 5.0)
    reply = http.post("/wake_up")
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
    assert "no room (on 1 of 2 replicas)" in reply.text


def test_only_the_admin_may_do_it(http: httpx.Client, server: Server) -> None:
    server.fresh_app(IngressSettings(api=ApiConfig(), loopback=False))
    assert [http.post(f"/{each}").status_code for each in ("sleep", "wake_up")] == [401, 401]
    assert http.get("/is_sleeping").status_code == 401
