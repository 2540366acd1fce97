"""A limit on what a client may send, for parsing a body holds up everybody else."""

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """Answers 413 once a body is longer than max_bytes, whatever length it announced."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        """Stand before `app`."""
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass messages on while they are not too much."""
        left = self._max_bytes

        async def limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, f"the body is longer than {self._max_bytes} bytes")
            return message

        await self._app(scope, limited if scope["type"] == "http" else receive, send)
