"""The process that renders adapters' chat templates, each rendering in a fork.

A template is a program. Jinja's sandbox protects files and objects, but allows endless loops and
any amount of memory, so a fork has limits on both. The time limit is CPU time: on a busy machine a
good template must not look like an endless one.
"""

import marshal
import resource
import signal
from collections import OrderedDict

import msgspec

from configs.wire.templates import TemplateSource
from deployments.ingress.chat_templates.template import ChatTemplate, Conversation
from deployments.ingress.http.errors import RequestError
from deployments.ingress.processes.forks import run_in_fork, serve_requests

MEMORY_BYTES = 512 << 20

_MAX_REPLY_BYTES = 16 << 20
_MAX_FAULT = 500
_MAX_COMPILED = 32
# Limits of a rendering after which its template is cached.
_MAX_COMPILED_KIB = 16 << 10
_MAX_COMPILED_S = 0.25
_LIMIT = "the prompt would be longer than 16 MiB"
_NO_UNICODE = "the chat template wrote half of a surrogate pair, which is not valid Unicode"


class Task(msgspec.Struct, frozen=True, array_like=True):
    """Render the template `source.text`. The conversation is `packed`; only the fork decodes it."""

    source: TemplateSource
    conversation: bytes


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """The prompt, or why there is none.

    refusal: the reason, "" for a prompt. late: the rendering exceeded its time limit.
    """

    prompt: str = ""
    refusal: str = ""
    late: bool = False


def packed(conversation: Conversation) -> bytes:
    """A conversation as bytes. With marshal: JSON has numbers and strings that msgpack has not."""
    return marshal.dumps(msgspec.structs.astuple(conversation))


class _CompiledTemplates:
    """A cache of templates that rendered cheaply once.

    Other templates are compiled in forks: Jinja's compiler executes constant parts of a template.
    """

    def __init__(self) -> None:
        self._templates: OrderedDict[bytes, ChatTemplate] = OrderedDict()

    def get(self, source: TemplateSource) -> ChatTemplate:
        """The cached template, or a new one."""
        key = msgspec.msgpack.encode(source)
        if template := self._templates.get(key):
            return template
        return ChatTemplate(source.text, source.special_tokens)

    def keep(self, source: TemplateSource, reply: bytes) -> None:
        """Cache the template if this reply is a prompt."""
        if msgspec.msgpack.decode(reply, type=Rendered).refusal:
            return
        key = msgspec.msgpack.encode(source)
        if key not in self._templates:
            self._templates[key] = ChatTemplate(source.text, source.special_tokens)
        self._templates.move_to_end(key)
        if len(self._templates) > _MAX_COMPILED:
            self._templates.popitem(last=False)


def serve(limit_s: str) -> None:
    """Render tasks from stdin until it ends."""
    compiled = _CompiledTemplates()
    serve_requests(lambda task: _render_in_fork(task, float(limit_s), compiled))


def _render_in_fork(data: bytes, limit_s: float, compiled: _CompiledTemplates) -> bytes:
    task = msgspec.msgpack.decode(data, type=Task)
    fork = run_in_fork(
        lambda: _encoded(_rendered(task, compiled)), limit_s, (resource.RLIMIT_AS, MEMORY_BYTES)
    )
    if fork.exit_code == 0:
        grown_kib = fork.used.ru_maxrss - resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if grown_kib <= _MAX_COMPILED_KIB and fork.used.ru_utime <= _MAX_COMPILED_S:
            compiled.keep(task.source, fork.output)
        return fork.output
    if fork.exit_code == -signal.SIGPROF:
        return msgspec.msgpack.encode(Rendered(late=True))
    refusal = f"the chat template needs more than {MEMORY_BYTES >> 20} MiB of memory"
    return msgspec.msgpack.encode(Rendered(refusal=refusal))


def _rendered(task: Task, compiled: _CompiledTemplates) -> Rendered:
    try:
        conversation = Conversation(*marshal.loads(task.conversation))
        return Rendered(compiled.get(task.source).render(conversation))
    except RequestError as error:
        return Rendered(refusal=error.message)
    except MemoryError:
        raise
    except Exception as error:
        # A template can raise anything; the client gets it as the reason of the refusal.
        fault = f"{type(error).__name__}: {error}"[:_MAX_FAULT]
        return Rendered(refusal=f"the chat template is broken: {fault}")


def _encoded(reply: Rendered) -> bytes:
    try:
        written = msgspec.msgpack.encode(reply)
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(Rendered(refusal=_NO_UNICODE))
    if len(written) > _MAX_REPLY_BYTES:
        return msgspec.msgpack.encode(Rendered(refusal=_LIMIT))
    return written
