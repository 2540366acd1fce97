"""Threads that work on texts, with a bound on the text that may wait for them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from deployments.contract import ErrorKind
from deployments.ingress.http.errors import RequestError

_Arguments = TypeVarTuple("_Arguments")
_Result = TypeVar("_Result")


class BoundedThreads:
    """A thread pool that refuses work when too many characters wait for it."""

    def __init__(self, name: str, threads: int, max_characters: int) -> None:
        """max_characters: of all texts that wait or run; a single text may be longer."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._max_characters = max_characters
        self._characters = 0

    async def run(
        self, characters: int, work: Callable[[*_Arguments], _Result], *args: *_Arguments
    ) -> _Result:
        """Run `work(*args)` in a thread; RequestError if too much text waits already."""
        if self._characters and self._characters + characters > self._max_characters:
            message = "too much text waits to be tokenized: try again"
            raise RequestError(ErrorKind.OVERLOADED, message, retry_after_s=1.0)
        self._characters += characters
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)
        finally:
            self._characters -= characters

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False)
