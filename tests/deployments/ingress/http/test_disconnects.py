"""A client that leaves must free its request on the driver, wherever the request is."""

import asyncio
import json
from typing import Any

import pytest

from deployments.contract import ReplyAddress
from deployments.ingress.app import build_app
from deployments.ingress.generation.engine import IngressSettings
from deployments.ingress.generation.frames import RequestInboxes
from deployments.ingress.http.sse import ClientGone, unless_gone, wait_unless_gone
from tests.deployments.ingress.conftest import PATIENCE, Server, send_by_hand
from tests.fakes import FakeDriver, engine_info, write_tokenizer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 50, "stream": True}),
        ("/generate_stream", {"inputs": "a"}),
    ],
)
def test_leaving_a_stream_cancels(server: Server, path: str, body: dict[str, Any]) -> None:
    server.driver.hold_after = 5
    connection = send_by_hand(server, path, body)
    assert b"200 OK" in connection.recv(4096)
    assert not server.driver.cancelled.is_set()
    connection.close()
    assert server.driver.cancelled.wait(PATIENCE)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": "a", "stream": True}),
        ("/v1/completions", {"model": "tiny", "prompt": "a"}),
        ("/generate_stream", {"inputs": "a"}),
        ("/generate", {"inputs": "a"}),
    ],
)
def test_leaving_before_the_first_token_cancels(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    server.driver.hold_after = 0
    connection = send_by_hand(server, path, body)
    assert server.driver.arrived.wait(PATIENCE)
    connection.close()
    assert server.driver.cancelled.wait(PATIENCE)


def test_a_cancelled_request_task_cancels_the_driver(tmp_path: Any) -> None:
    """Serve cancels the task that runs the application instead of closing a connection."""

    async def story() -> None:
        tokenizer = write_tokenizer(tmp_path)
        driver = FakeDriver(engine_info(tmp_path, tokenizer), tokenizer)
        inboxes = RequestInboxes()
        driver.deliver = inboxes.deliver
        driver.hold_after = 2
        app = build_app(driver, inboxes, lambda: ReplyAddress("h", 1, "hush"), IngressSettings())
        sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        body = json.dumps({"model": "tiny", "prompt": "a", "stream": True}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        request = asyncio.create_task(app(_completions(), receive, sent.put))  # type: ignore[arg-type]
        assert (await sent.get())["status"] == 200
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert driver.cancelled.is_set()
        assert len(inboxes) == 0

    asyncio.run(story())


def test_work_ends_with_its_result_or_its_client() -> None:
    async def forever() -> Any:
        await asyncio.Event().wait()

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def value() -> int:
        return 7

    async def broken() -> int:
        raise ValueError("ours")

    async def unknown() -> Any:
        raise KeyError("receive")

    async def later() -> int:
        await asyncio.sleep(0)
        return 8

    async def story() -> None:
        assert await unless_gone(forever, value()) == 7
        assert await unless_gone(unknown, later()) == 8
        with pytest.raises(ClientGone):
            await unless_gone(gone, forever())
        with pytest.raises(ValueError, match="ours"):
            await unless_gone(forever, broken())

    asyncio.run(story())


@pytest.mark.parametrize("breaks", [False, True])
def test_waiting_leaves_the_work_alone(breaks: bool) -> None:
    """It ends after the time or when the client leaves, and does not cancel the work."""

    async def receive() -> Any:
        if breaks:
            raise KeyError("receive")
        await asyncio.Event().wait()

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def story() -> None:
        work: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        await wait_unless_gone(receive, work, 0.01)
        with pytest.raises(ClientGone):
            await wait_unless_gone(gone, work, PATIENCE)
        assert not work.done()
        asyncio.get_running_loop().call_later(0.01, work.set_result, 7)
        await wait_unless_gone(receive, work, PATIENCE)
        assert work.result() == 7

    asyncio.run(story())


def test_a_client_that_leaves_at_once_leaves_no_task(tmp_path: Any) -> None:
    """Its call has only just begun."""

    async def story() -> None:
        tokenizer = write_tokenizer(tmp_path)
        driver = FakeDriver(engine_info(tmp_path, tokenizer), tokenizer)
        driver.hold_after = 0
        inboxes = RequestInboxes()
        app = build_app(driver, inboxes, lambda: ReplyAddress("h", 1, "hush"), IngressSettings())
        body = json.dumps({"model": "tiny", "prompt": "a", "stream": True}).encode()
        messages: list[dict[str, Any]] = [
            {"type": "http.disconnect"},
            {"type": "http.request", "body": body, "more_body": False},
        ]

        async def receive() -> dict[str, Any]:
            return messages.pop()

        async def send(_: object) -> None:
            pass

        await app(_completions(), receive, send)
        assert len(inboxes) == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(story())


def _completions() -> dict[str, Any]:
    """The ASGI scope of a POST to /v1/completions."""
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "method": "POST",
        "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
        "root_path": "", "scheme": "http", "server": ("h", 1), "client": ("c", 2),
    }  # fmt: skip
