"""The process that renders strangers' chat templates, each rendering in a child of its own.

A template is a program: Jinja's sandbox keeps it from files and objects, not from endless loops or
from filling the memory. A child has limits of both and ends itself when it is over one. It has
nothing to wait for, so what is counted is the processor's time: on a busy machine a good template
is not taken for an endless one.
"""

import marshal
import os
import resource
import signal
import struct
import sys
from collections import OrderedDict

import msgspec

from configs.wire.templates import TemplateSource
from deployments.ingress.chat_templates.template import ChatTemplate, Conversation
from deployments.ingress.http.errors import RequestError

MEMORY_BYTES = 512 << 20
HEAD = struct.Struct("<Id")
"""Before what is asked: its bytes and the seconds that it may compute."""
LENGTH = struct.Struct("<I")
"""Before an answer."""

_MAX_ANSWER_BYTES = 16 << 20
_MAX_FAULT = 500
_MAX_COMPILED = 32
# What a rendering may have taken for its template to be kept compiled.
_MAX_COMPILED_KIB = 16 << 10
_MAX_COMPILED_S = 0.25
_LIMIT = "the prompt would be longer than 16 MiB"
_NO_UNICODE = "the chat template wrote half of a surrogate pair, which is no valid Unicode"


class Task(msgspec.Struct, frozen=True, array_like=True):
    """What to render: of `source` its text; the conversation is read by the child alone."""

    source: TemplateSource
    conversation: bytes


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """The prompt, or why there is none; late: it was not done in the time that it had."""

    prompt: str = ""
    refusal: str = ""
    late: bool = False


def packed(conversation: Conversation) -> bytes:
    """A conversation on its way here: JSON may hold numbers and strings that others cannot."""
    return marshal.dumps(msgspec.structs.astuple(conversation))


class _Compiled:
    """Templates that have proven harmless: compiling one runs parts of it."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, ChatTemplate] = OrderedDict()

    def of(self, source: TemplateSource) -> ChatTemplate:
        """The template of this source."""
        key = msgspec.msgpack.encode(source)
        if known := self._known.get(key):
            return known
        return ChatTemplate(source.text, source.special_tokens)

    def keep(self, source: TemplateSource, answer: bytes) -> None:
        """Keep it for the next time, if this answer is a prompt."""
        if msgspec.msgpack.decode(answer, type=Rendered).refusal:
            return
        key = msgspec.msgpack.encode(source)
        if key not in self._known:
            self._known[key] = ChatTemplate(source.text, source.special_tokens)
        self._known.move_to_end(key)
        if len(self._known) > _MAX_COMPILED:
            self._known.popitem(last=False)


def serve() -> None:
    """Render what comes by stdin until it ends; the process's whole life."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    compiled = _Compiled()
    while len(head := source.read(HEAD.size)) == HEAD.size:
        size, limit_s = HEAD.unpack(head)
        answer = _answer(source.read(size), limit_s, compiled)
        sink.write(LENGTH.pack(len(answer)) + answer)
        sink.flush()


def _answer(asked: bytes, limit_s: float, compiled: _Compiled) -> bytes:
    task = msgspec.msgpack.decode(asked, type=Task)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _render_and_leave(task, limit_s, compiled, writer)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read(_MAX_ANSWER_BYTES + 1)
    _, status, used = os.wait4(child, 0)
    if status == 0:
        grown_kib = used.ru_maxrss - resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if grown_kib <= _MAX_COMPILED_KIB and used.ru_utime <= _MAX_COMPILED_S:
            compiled.keep(task.source, answer)
        return answer
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return msgspec.msgpack.encode(Rendered(late=True))
    words = f"needs more than {MEMORY_BYTES >> 20} MiB of memory"
    return msgspec.msgpack.encode(Rendered(refusal=f"the chat template {words}"))


def _render_and_leave(task: Task, limit_s: float, compiled: _Compiled, writer: int) -> None:
    """The child's whole life."""
    status = 1
    try:
        os.close(sys.stdin.fileno())
        os.close(sys.stdout.fileno())  # Who waits for the parent sees its end at once.
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # Its signal ends the process.
        answer = _encoded(_rendered(task, compiled))
        with open(writer, "wb") as pipe:
            pipe.write(answer)
        status = 0
    finally:
        os._exit(status)


def _rendered(task: Task, compiled: _Compiled) -> Rendered:
    try:
        conversation = Conversation(*marshal.loads(task.conversation))
        return Rendered(compiled.of(task.source).render(conversation))
    except RequestError as error:
        return Rendered(refusal=error.message)
    except MemoryError:
        raise
    except Exception as error:
        # Whatever a stranger's template does wrong is told to who asked for it.
        fault = f"{type(error).__name__}: {error}"[:_MAX_FAULT]
        return Rendered(refusal=f"the chat template is broken: {fault}")


def _encoded(answer: Rendered) -> bytes:
    try:
        written = msgspec.msgpack.encode(answer)
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(Rendered(refusal=_NO_UNICODE))
    if len(written) > _MAX_ANSWER_BYTES:
        return msgspec.msgpack.encode(Rendered(refusal=_LIMIT))
    return written


if __name__ == "__main__":
    serve()
