"""Constraints on answers, and their check before a request goes to the driver."""

import asyncio
import hashlib
from importlib.util import find_spec
from typing import NamedTuple

from configs.grammars import INSTALL
from deployments.contract import EngineInfo
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.structured.compile_pool import CompilePool
from deployments.ingress.structured.compile_process import CompileResult, CompileTask

MAX_CHARACTERS = 64 * 1024

# Grammars of tool calls contain the schemas of many tools.
_MAX_TRUSTED = 4 * MAX_CHARACTERS
# At most 64 MiB, as each result is bounded.
_MAX_CACHED = 256


class Constraint(NamedTuple):
    """What an answer must fit; any text, if there is neither a schema nor a grammar.

    param: the request's field that it comes from, for error messages.
    json_schema: a JSON schema.
    grammar: in llguidance's dialect of Lark.
    trusted: the ingress made it, so it may name special tokens.
    foreign: the grammar may be GBNF and is not converted yet.
    """

    param: str = ""
    json_schema: str = ""
    grammar: str = ""
    trusted: bool = False
    foreign: bool = False

    def __bool__(self) -> bool:
        """Whether there is a constraint."""
        return bool(self.json_schema or self.grammar)

    @property
    def task(self) -> CompileTask:
        """The task that checks it."""
        return CompileTask(self.json_schema or self.grammar, self.foreign, self.trusted)


UNCONSTRAINED = Constraint()


class Compiler:
    """Checks constraints, and caches the last results, failures too."""

    def __init__(self) -> None:
        self._pool: CompilePool | None = None
        self._results: dict[bytes, asyncio.Task[CompileResult]] = {}

    async def compiled(self, constraint: Constraint, info: EngineInfo) -> Constraint:
        """The constraint in the form for the ranks.

        Refuses one that cannot be enforced completely, or is too expensive, with the reason.
        """
        if not constraint:
            return constraint
        if find_spec("llguidance") is None:
            raise _unsupported(constraint, f"this server has no compiler for schemas: {INSTALL}")
        if not info.stop_token_ids:
            raise _unsupported(constraint, "this model has no token that ends an answer")
        kind = "schema" if constraint.json_schema else "grammar"
        longest = _MAX_TRUSTED if constraint.trusted else MAX_CHARACTERS
        if len(constraint.json_schema or constraint.grammar) > longest:
            raise invalid(f"the {kind} is longer than {longest} characters", constraint.param)
        result = await self._result(constraint.task, info)
        if result.fault:
            raise invalid(f"the {kind} is not supported: {result.fault}", constraint.param)
        if constraint.foreign:
            return constraint._replace(grammar=result.text, foreign=False)
        return constraint

    async def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            await self._pool.close()

    async def check(self, task: CompileTask, info: EngineInfo) -> CompileResult:
        """Check a task in the pool."""
        if self._pool is None:
            self._pool = CompilePool(info.tokenizer, info.vocab_size)
        return await self._pool.check(task)

    async def _result(self, task: CompileTask, info: EngineInfo) -> CompileResult:
        """The cached result of a task; equal tasks at the same time share one check.

        A check that could not run is not cached.
        """
        digest = hashlib.blake2b(repr(task).encode(), digest_size=16).digest()
        running = self._results.pop(digest, None)
        if running is None or (running.done() and (running.cancelled() or running.exception())):
            running = asyncio.create_task(self.check(task, info))
        # Popped and inserted again, so that the first entry is the least recently used one.
        self._results[digest] = running
        if len(self._results) > _MAX_CACHED:
            del self._results[next(iter(self._results))]
        # A client that leaves must not cancel the check for other clients.
        return await asyncio.shield(running)


def check_endings(constraint: Constraint, ignores_end: bool, min_tokens: int) -> None:
    """Refuse settings under which an answer could not end when its constraint is complete."""
    if constraint and (ignores_end or min_tokens):
        other = "ignored end tokens" if ignores_end else "`min_tokens`"
        raise invalid(f"`{constraint.param}` cannot be combined with {other}", constraint.param)


def _unsupported(constraint: Constraint, reason: str) -> RequestError:
    message = f"`{constraint.param}` is not supported: {reason}"
    return invalid(message, constraint.param, "unsupported_parameter")
