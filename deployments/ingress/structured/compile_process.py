"""Checks whether a constraint can be followed, in a fork with limits on time and memory.

The process reads the model's tokenizer once and forks for each constraint. The fork does what a
rank will do: it compiles, builds the matcher, and makes some masks over the whole vocabulary.
"""

import json
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from configs.grammars import matcher_of, reason, tokenizer_of
from deployments.ingress.processes.forks import run_in_fork, serve_requests

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MEMORY_BYTES = 128 << 20
"""Memory that one constraint may add to the process with the tokenizer."""

_WALK_TOKENS = 24
"""Tokens of the sample answers, drawn from the tokens that fit; each needs a mask."""

_DEAD_END = "NoExtensionBias"
"""The matcher's error where no token fits."""


_LARGEST = 2**63 - 1
"""llguidance cuts the bounds of integers to this; larger literals it writes as floats."""

_LITERALS = frozenset({"const", "enum"})
_LOWER = frozenset({"minimum", "exclusiveMinimum"})
_UPPER = frozenset({"maximum", "exclusiveMaximum"})

# Clients cannot set llguidance's option.
_ONE_OF = (
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    "Write anyOf, or give each alternative a required property with a const of its own",
)


class CompileTask(msgspec.Struct, frozen=True, array_like=True):
    """A constraint to check.

    text: a JSON schema if it begins with a brace, else a grammar.
    foreign: the grammar may be GBNF.
    trusted: the ingress made it, so the compiler's warnings are expected.
    """

    text: str
    foreign: bool = False
    trusted: bool = False


class CompileResult(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a check.

    text: the constraint for the ranks. fault: in one line, why it is not served; "" if it is.
    """

    text: str = ""
    fault: str = ""


def serve(folder: str, vocab_size: str, cpu_seconds: str) -> None:
    """Check tasks from stdin until it ends."""
    # Here once, or each fork imports it.
    import numpy as np  # noqa: F401

    seconds = float(cpu_seconds)
    try:
        tokenizer = tokenizer_of(Path(folder), int(vocab_size))
    except Exception as error:
        # Not fatal: the model still serves requests without constraints.
        fault = f"this model's tokenizer does not support constraints: {error}"
        refusal = msgspec.msgpack.encode(CompileResult(fault=fault))
        serve_requests(lambda task: refusal)
    else:
        serve_requests(lambda task: _check_in_fork(tokenizer, task, seconds))


def _check_in_fork(tokenizer: "LLTokenizer", task: bytes, cpu_seconds: float) -> bytes:
    """Check a task in a fork; returns its result, or the reason why it was killed."""
    data_bytes = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    fork = run_in_fork(
        lambda: msgspec.msgpack.encode(check(tokenizer, task)),
        cpu_seconds,
        (resource.RLIMIT_DATA, data_bytes + MEMORY_BYTES),
    )
    if fork.exit_code == 0:
        return fork.output
    faults = {
        -signal.SIGPROF: f"it takes over {cpu_seconds:g} s to compile",
        -signal.SIGABRT: "it takes too much memory",
        -signal.SIGKILL: "it takes too much memory",
    }
    fault = faults.get(fork.exit_code, "it makes the compiler fail")
    return msgspec.msgpack.encode(CompileResult(fault=fault))


def check(tokenizer: "LLTokenizer", data: bytes) -> CompileResult:
    """Do what a rank will do with a constraint."""
    task = msgspec.msgpack.decode(data, type=CompileTask)
    try:
        text = _lark(task.text) if task.foreign else task.text
        if fault := _beyond(text) or _warnings(text, task.trusted):
            return CompileResult(fault=fault)
        _walk(tokenizer, text)
    except ValueError as error:
        return CompileResult(fault=reason(str(error)))
    except MemoryError:
        return CompileResult(fault="it takes too much memory")
    return CompileResult(text)


def _lark(grammar: str) -> str:
    from llguidance import gbnf_to_lark

    try:
        return str(gbnf_to_lark.any_to_lark(grammar))
    except MemoryError:
        raise
    except Exception as fault:
        # The converter has no exception type of its own.
        message = str(fault).strip().split("\n")[0]
        raise ValueError(f"the grammar is not valid GBNF: {message}") from fault


def _beyond(text: str) -> str:
    """Which number of a schema the compiler would change; "" if none."""
    for name, value in _numbers(json.loads(text)) if text.startswith("{") else ():
        too_high = name in _LOWER and value >= _LARGEST
        too_low = name in _UPPER and value <= -_LARGEST
        if too_high or too_low or (name in _LITERALS and not -(2**63) <= value < 2**64):
            return f"`{name}` has {value}, which is beyond the integers that can be enforced"
    return ""


def _numbers(schema: object) -> Iterator[tuple[str, Any]]:
    """The numbers that bound a value in any part of a schema, and the integers of its literals."""
    waiting: list[tuple[str, object]] = [("", schema)]
    while waiting:
        name, part = waiting.pop()
        if isinstance(part, list):
            waiting += [(name, each) for each in part]
        elif isinstance(part, dict):
            literal = name if name in _LITERALS else None
            waiting += [(literal or key, each) for key, each in part.items()]
        elif type(part) is int or (type(part) is float and name not in _LITERALS):
            yield name, part


def _warnings(text: str, trusted: bool) -> str:
    """The compiler's errors and warnings about a grammar without a vocabulary; "" if it is fine."""
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(text) if text.startswith("{") else text
    failed, warnings = LLMatcher.validate_grammar_with_warnings(grammar)
    if not failed and trusted:
        return ""
    # A warning means that a part would not be enforced, or may fail on the ranks only.
    fault = reason("\n".join(warnings) or ("it cannot be compiled" if failed else ""))
    return fault.replace(*_ONE_OF)


def _walk(tokenizer: "LLTokenizer", text: str) -> None:
    """Follow sample answers that fit; ValueError if a mask is too expensive."""
    import numpy as np  # The ingress imports this file too and needs no numpy.

    matcher = matcher_of(tokenizer, text)
    draw = random.Random(0)
    for _ in range(_WALK_TOKENS):
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        fitting = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        continuing = fitting[~np.isin(fitting, tokenizer.eos_tokens)]
        if len(continuing):
            matcher.try_consume_tokens([int(continuing[draw.randrange(len(continuing))])])
        if matcher.is_error():
            fault = reason(matcher.get_error())
            if fault == _DEAD_END:
                raise ValueError("no answer fits it")
            raise ValueError(f"it takes too much to follow: {fault}")
        if matcher.is_stopped():
            matcher.reset()
