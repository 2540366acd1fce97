"""What an answer must fit: compiled here once, before the driver is asked, and cached."""

import asyncio
from importlib.util import find_spec
from typing import NamedTuple

from deployments.contract import EngineInfo
from deployments.ingress.errors import RequestError, invalid

MAX_CHARACTERS = 64 * 1024

# Of many tools at once.
_MAX_TRUSTED = 4 * MAX_CHARACTERS
# Each has a bound, so all that is kept has one too: 16 MiB.
_KEPT = 64


class Constraint(NamedTuple):
    """A JSON schema, or a grammar in Lark as llguidance reads it; both empty: any text.

    param: the field that asked for it. trusted: made by ourselves, so it may name special tokens.
    """

    param: str = ""
    json_schema: str = ""
    grammar: str = ""
    trusted: bool = False

    def __bool__(self) -> bool:
        """Whether anything is asked."""
        return bool(self.json_schema or self.grammar)


UNCONSTRAINED = Constraint()


class Compiler:
    """Tries constraints, and remembers what it found of the last ones."""

    def __init__(self) -> None:
        """Nothing tried yet."""
        self._faults: dict[Constraint, str] = {}

    async def compiled(self, asked: Constraint, info: EngineInfo) -> Constraint:
        """The same constraint; refuses what cannot be enforced whole, with the reason."""
        if not asked:
            return asked
        if find_spec("llguidance") is None:
            words = "this server has no compiler for schemas (pip install llguidance)"
            raise _unsupported(asked, words)
        if not info.stop_token_ids:
            raise _unsupported(asked, "this model has no token that ends an answer")
        kind = "schema" if asked.json_schema else "grammar"
        longest = _MAX_TRUSTED if asked.trusted else MAX_CHARACTERS
        if len(asked.json_schema or asked.grammar) > longest:
            raise invalid(f"the {kind} is longer than {longest} characters", asked.param)
        if fault := await self._fault(asked):
            raise invalid(f"the {kind} is not supported: {fault}", asked.param)
        return asked

    async def _fault(self, asked: Constraint) -> str:
        """What is wrong, in a line; "" for nothing."""
        found = self._faults.pop(asked, None)
        if found is None:
            found = await asyncio.to_thread(self.attempt, asked)
        self._faults[asked] = found
        if len(self._faults) > _KEPT:
            del self._faults[next(iter(self._faults))]
        return found

    @staticmethod
    def attempt(asked: Constraint) -> str:
        """What is wrong with a constraint, in a line; "" for nothing."""
        from llguidance import LLMatcher

        try:
            grammar = asked.grammar or LLMatcher.grammar_from_json_schema(asked.json_schema)
            failed, remarks = LLMatcher.validate_grammar_with_warnings(grammar)
        except ValueError as fault:
            return _reason(str(fault))
        if not failed and asked.trusted:
            return ""
        # A remark says that a part would not be enforced, or that only the ranks can tell.
        return _reason("\n".join(remarks) or ("it cannot be compiled" if failed else ""))


def check_endings(asked: Constraint, ignores_end: bool, min_tokens: int) -> None:
    """Refuse what would keep an answer from ending where its constraint is fulfilled."""
    if asked and (ignores_end or min_tokens):
        words = "ignored end tokens" if ignores_end else "`min_tokens`"
        raise invalid(f"`{asked.param}` cannot be combined with {words}", asked.param)


def _unsupported(asked: Constraint, words: str) -> RequestError:
    message = f"`{asked.param}` is not supported: {words}"
    return invalid(message, asked.param, "unsupported_parameter")


def _reason(text: str) -> str:
    """A compiler's words in a line: the first one, and what it says is the error."""
    lines = text.strip().split("\n")
    return " ".join([lines[0], *(line.strip() for line in lines[1:] if line.startswith("error:"))])
