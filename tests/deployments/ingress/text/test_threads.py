import asyncio
import threading

import pytest

from deployments.contract import ErrorKind
from deployments.ingress.http.errors import RequestError
from deployments.ingress.text.threads import BoundedThreads


def test_texts_are_refused_while_too_much_text_waits() -> None:
    """A single text may exceed the limit; finished and cancelled texts no longer count."""

    async def story() -> None:
        threads = BoundedThreads("test", 1, max_characters=100)
        go_on = threading.Event()

        def hold() -> str:
            go_on.wait()
            return "done"

        longest = asyncio.ensure_future(threads.run(1000, hold))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="too much text waits") as caught:
            await threads.run(1, str)
        assert caught.value.kind is ErrorKind.OVERLOADED
        go_on.set()
        assert await longest == "done"
        first, second = threads.run(60, str), threads.run(40, str)
        assert list(await asyncio.gather(first, second)) == ["", ""]
        go_on.clear()
        running = asyncio.ensure_future(threads.run(50, hold))
        left = asyncio.ensure_future(threads.run(50, str))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        waits = asyncio.ensure_future(threads.run(50, str))
        go_on.set()
        assert list(await asyncio.gather(running, waits)) == ["done", ""]
        threads.close()

    asyncio.run(story())
