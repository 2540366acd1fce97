"""What an answer must fit: tried here once, before the driver is asked, and remembered."""

import asyncio
import hashlib
from importlib.util import find_spec
from typing import NamedTuple

from configs.grammars import INSTALL
from deployments.contract import EngineInfo
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.structured.compile_pool import CPU_SECONDS, CompilePool
from deployments.ingress.structured.compile_process import CompileResult, CompileTask

MAX_CHARACTERS = 64 * 1024

# Of many tools at once.
_MAX_TRUSTED = 4 * MAX_CHARACTERS
# Each has a bound, so all that is kept has one too: 64 MiB.
_KEPT = 256


class Constraint(NamedTuple):
    """A JSON schema, or a grammar in Lark as llguidance reads it; both empty: any text.

    param: the field that asked for it. trusted: made by ourselves, so it may name special tokens.
    foreign: the grammar may still be GBNF.
    """

    param: str = ""
    json_schema: str = ""
    grammar: str = ""
    trusted: bool = False
    foreign: bool = False

    def __bool__(self) -> bool:
        """Whether anything is asked."""
        return bool(self.json_schema or self.grammar)

    @property
    def claim(self) -> CompileTask:
        """What is to be proved of it."""
        return CompileTask(self.json_schema or self.grammar, self.foreign, self.trusted)


UNCONSTRAINED = Constraint()


class Compiler:
    """Has constraints tried, and remembers what was found of the last ones, good or bad."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        """Nothing tried yet; one may take so many seconds of a processor."""
        self._cpu_seconds = cpu_seconds
        self._prover: CompilePool | None = None
        self._proofs: dict[bytes, asyncio.Task[CompileResult]] = {}

    async def compiled(self, asked: Constraint, info: EngineInfo) -> Constraint:
        """The constraint as the ranks are to read it.

        Refuses what cannot be enforced whole, or costs too much, with the reason.
        """
        if not asked:
            return asked
        if find_spec("llguidance") is None:
            raise _unsupported(asked, f"this server has no compiler for schemas: {INSTALL}")
        if not info.stop_token_ids:
            raise _unsupported(asked, "this model has no token that ends an answer")
        kind = "schema" if asked.json_schema else "grammar"
        longest = _MAX_TRUSTED if asked.trusted else MAX_CHARACTERS
        if len(asked.json_schema or asked.grammar) > longest:
            raise invalid(f"the {kind} is longer than {longest} characters", asked.param)
        proof = await self._proof(asked.claim, info)
        if proof.fault:
            raise invalid(f"the {kind} is not supported: {proof.fault}", asked.param)
        return asked._replace(grammar=proof.text, foreign=False) if asked.foreign else asked

    async def close(self) -> None:
        """End the processes."""
        if self._prover is not None:
            await self._prover.close()

    async def attempt(self, claim: CompileTask, info: EngineInfo) -> CompileResult:
        """Have a claim tried."""
        if self._prover is None:
            self._prover = CompilePool(info.tokenizer, info.vocab_size, self._cpu_seconds)
        return await self._prover.prove(claim)

    async def _proof(self, claim: CompileTask, info: EngineInfo) -> CompileResult:
        """What was found of a claim; those who ask for the same meanwhile share it.

        What could not be tried is not remembered.
        """
        digest = hashlib.blake2b(repr(claim).encode(), digest_size=16).digest()
        trying = self._proofs.pop(digest, None)
        if trying is None or (trying.done() and (trying.cancelled() or trying.exception())):
            trying = asyncio.create_task(self.attempt(claim, info))
        self._proofs[digest] = trying
        if len(self._proofs) > _KEPT:
            del self._proofs[next(iter(self._proofs))]
        # Who leaves takes nothing from the others.
        return await asyncio.shield(trying)


def check_endings(asked: Constraint, ignores_end: bool, min_tokens: int) -> None:
    """Refuse what would keep an answer from ending where its constraint is fulfilled."""
    if asked and (ignores_end or min_tokens):
        words = "ignored end tokens" if ignores_end else "`min_tokens`"
        raise invalid(f"`{asked.param}` cannot be combined with {words}", asked.param)


def _unsupported(asked: Constraint, words: str) -> RequestError:
    message = f"`{asked.param}` is not supported: {words}"
    return invalid(message, asked.param, "unsupported_parameter")
