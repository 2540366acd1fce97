"""Strangers' chat templates, rendered in a process that is ended when it takes too long.

A template is a program: Jinja's sandbox keeps it from files and objects, not from endless loops or
from filling the memory.
"""

import asyncio
import contextlib
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from configs.templates import TemplateSource
from deployments.ingress.chat import ChatTemplate
from deployments.ingress.errors import RequestError, invalid

_LONGEST_S = 2.0
_STARTING_S = 30.0
_LAST_S = 10
_MEMORY_BYTES = 1 << 30
_MAX_ANSWER_BYTES = 16 << 20
_LENGTH = struct.Struct("<I")
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_START = (
    f"import sys; sys.path.insert(0, {_PACKAGE_ROOT!r}); "
    "from deployments.ingress.renderer import serve; serve()"
)


class Task(msgspec.Struct, frozen=True, array_like=True):
    """What to render."""

    template: TemplateSource
    messages: list[dict[str, Any]]
    variables: dict[str, Any]


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """The prompt, or why there is none."""

    prompt: str = ""
    refusal: str = ""


class Renderer:
    """One process, started by the first template and after each that had to be ended."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def render(self, task: Task) -> str:
        """The prompt; RequestError when the template refuses, breaks or takes too long."""
        try:
            asked = msgspec.msgpack.encode(task)
        except UnicodeEncodeError as error:
            raise invalid("the messages are not valid Unicode", "messages") from error
        except OverflowError as error:
            raise invalid("the messages hold a number of over 64 bits", "messages") from error
        async with self._turn:
            answer = await self._ask(asked)
        if answer.refusal:
            raise invalid(answer.refusal, "messages")
        return answer.prompt

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _ask(self, asked: bytes) -> Rendered:
        done = False
        try:
            process = await self._running()
            async with asyncio.timeout(_LONGEST_S):
                answer = await _exchange(process, asked)
            done = True
            return msgspec.msgpack.decode(answer, type=Rendered)
        except TimeoutError:
            return Rendered(refusal=f"the adapter's chat template took over {_LONGEST_S:g} s")
        except (asyncio.IncompleteReadError, ConnectionError):
            return Rendered(refusal="the adapter's chat template took too much memory")
        finally:
            if not done:  # Also when the client left: half an answer would be the next one's.
                await self.close()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _START, stdin=pipe, stdout=pipe
            )
            async with asyncio.timeout(_STARTING_S):
                await _exchange(self._process, msgspec.msgpack.encode(None))
        return self._process


async def _exchange(process: asyncio.subprocess.Process, asked: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(_LENGTH.pack(len(asked)) + asked)
    await process.stdin.drain()
    (size,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
    return await process.stdout.readexactly(size)


def serve() -> None:
    """Render what comes by stdin until it ends; the process's whole life."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (asked := _read(source)) is not None:
        signal.alarm(_LAST_S)  # Ends the process, should nobody be left to do it.
        task = msgspec.msgpack.decode(asked, type=Task | None)
        answer = msgspec.msgpack.encode(Rendered() if task is None else _render(task))
        if len(answer) > _MAX_ANSWER_BYTES:
            answer = msgspec.msgpack.encode(Rendered(refusal="the prompt is too long"))
        sink.write(_LENGTH.pack(len(answer)) + answer)
        sink.flush()
        signal.alarm(0)


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(_LENGTH.size)
    return source.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else None


def _render(task: Task) -> Rendered:
    try:
        template = ChatTemplate(task.template.text, task.template.special_tokens)
        return Rendered(template.render(task.messages, task.variables))
    except RequestError as error:
        return Rendered(refusal=error.message)
    except Exception as error:
        # Whatever a stranger's template does wrong is told to who asked for it.
        fault = f"{type(error).__name__}: {error}"
        return Rendered(refusal=f"the adapter's chat template is broken: {fault}")
