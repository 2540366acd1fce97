"""Threads for texts of a kind, and a bound on how much text may wait for them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from deployments.contract import ErrorKind
from deployments.ingress.http.errors import RequestError

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Lane:
    """Work by the length of its text; who comes when too much is in line is refused."""

    def __init__(self, name: str, threads: int, most_characters: int) -> None:
        """most_characters: of all texts in line; one alone may be longer."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._most = most_characters
        self._in_line = 0

    async def run(
        self, characters: int, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """The work's result, when its turn has come; RequestError when the line is too long."""
        assert not kwargs, "threads take positional arguments"
        if self._in_line and self._in_line + characters > self._most:
            message = "too much text waits to be tokenized: try again"
            raise RequestError(ErrorKind.OVERLOADED, message, retry_after_s=1.0)
        self._in_line += characters
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)
        finally:
            self._in_line -= characters

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False)
