"""Strangers' chat templates, rendered in a process that ends itself when it computes too long.

A template is a program: Jinja's sandbox keeps it from files and objects, not from endless loops or
from filling the memory. It has nothing to wait for, so what is counted is the processor's time: on
a busy machine a good template is not taken for an endless one.
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
# By the clock on the wall; for a process that hangs, not for one that is slow.
_HANGING_S = 120.0
_MEMORY_BYTES = 1 << 30
_MAX_ANSWER_BYTES = 16 << 20
_LENGTH = struct.Struct("<I")
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_START = (
    f"import sys; sys.path.insert(0, {_PACKAGE_ROOT!r}); "
    "from deployments.ingress.renderer import serve; serve(float(sys.argv[1]))"
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

    def __init__(self, longest_s: float = _LONGEST_S) -> None:
        """Nothing runs yet; a template may compute for `longest_s`."""
        self._longest_s = longest_s
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
            answer = await _exchange(process, asked)
            done = True
            return msgspec.msgpack.decode(answer, type=Rendered)
        except TimeoutError:
            return Rendered(refusal="the adapter's chat template was not rendered in time")
        except (asyncio.IncompleteReadError, ConnectionError):
            if await process.wait() == -signal.SIGPROF:
                words = f"took over {self._longest_s:g} s"
            else:
                words = "took too much memory"
            return Rendered(refusal=f"the adapter's chat template {words}")
        finally:
            if not done:  # Also when the client left: half an answer would be the next one's.
                await self.close()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", _START, str(self._longest_s), stdin=pipe, stdout=pipe
            )
            await _exchange(self._process, msgspec.msgpack.encode(None))
        return self._process


async def _exchange(process: asyncio.subprocess.Process, asked: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    async with asyncio.timeout(_HANGING_S):
        process.stdin.write(_LENGTH.pack(len(asked)) + asked)
        await process.stdin.drain()
        (size,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
        return await process.stdout.readexactly(size)


def serve(longest_s: float) -> None:
    """Render what comes by stdin until it ends; the process's whole life."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (asked := _read(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, longest_s)  # Its signal ends the process.
        task = msgspec.msgpack.decode(asked, type=Task | None)
        answer = msgspec.msgpack.encode(Rendered() if task is None else _render(task))
        if len(answer) > _MAX_ANSWER_BYTES:
            answer = msgspec.msgpack.encode(Rendered(refusal="the prompt is too long"))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sink.write(_LENGTH.pack(len(answer)) + answer)
        sink.flush()


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
