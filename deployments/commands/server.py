"""A running server's HTTP routes, for the commands."""

import json
from collections.abc import Generator
from typing import Any, NoReturn
from urllib.parse import quote

import httpx
import typer

from deployments.commands.failing import fail

_TIMEOUT = httpx.Timeout(None, connect=10.0)

Json = dict[str, Any]


class ServerRefused(typer.Exit):
    """The server refused a request; its message is on stderr."""


class Server:
    """One server's HTTP routes. A refusal ends the command with the server's message.

    Only connecting has a time limit: answers may take long.
    """

    def __init__(self, url: str, key: str | None) -> None:
        """url: with or without OpenAI's /v1. key: sent as a bearer token."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def request(self, method: str, path: str, body: Json | None = None) -> Json:
        """Send one request; returns the JSON of the reply."""
        try:
            reply = httpx.request(
                method, self._url + path, json=body, headers=self._headers, timeout=_TIMEOUT
            )
        except httpx.TransportError as error:
            self._unreachable(error)
        _require_success(reply)
        answer: Json = reply.json()
        return answer

    def stream(self, path: str, body: Json) -> Generator[Json, None, None]:
        """The events of a streamed answer; closing it ends the request."""
        request = httpx.stream(
            "POST",
            self._url + path,
            json={**body, "stream": True},
            headers=self._headers,
            timeout=_TIMEOUT,
        )
        try:
            with request as reply:
                if reply.is_error:
                    reply.read()
                    _require_success(reply)
                for line in reply.iter_lines():
                    if line.startswith("data:") and line != "data: [DONE]":
                        yield _event(line)
        except httpx.TransportError as error:
            self._unreachable(error)

    def _unreachable(self, error: Exception) -> NoReturn:
        fail(f"{self._url} cannot be reached ({error}): start a server, or name one with --url")


def adapter_path(name: str) -> str:
    """The route of one adapter."""
    return f"/v1/adapters/{quote(name, safe='/:@')}"


def _event(line: str) -> Json:
    event: Json = json.loads(line.removeprefix("data:"))
    if "error" in event:
        fail(_message(event))
    return event


def _require_success(reply: httpx.Response) -> None:
    if reply.is_error:
        try:
            message = _message(reply.json())
        except ValueError:
            message = reply.text.strip() or reply.reason_phrase
        hint = ": give it with --api-key or --admin-key" if reply.status_code == 401 else ""
        typer.echo(f"loray: the server answers {reply.status_code}: {message}{hint}", err=True)
        raise ServerRefused(1)


def _message(body: Json) -> str:
    """The message of an error, in either dialect."""
    error = body.get("error", body)
    return str(error.get("message", error) if isinstance(error, dict) else error)
