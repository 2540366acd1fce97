"""Whether a constraint can be followed: built and tried in a process that its cost may end.

The process reads the model's tokenizer once and forks for each constraint. The fork may take so
much processor time and memory and no more, and is gone afterwards. It does all that a rank will
do: compile, build, and make masks over the whole vocabulary, the first and some on the way.
"""

import contextlib
import os
import random
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from configs.grammars import matcher_of, reason, tokenizer_of

if TYPE_CHECKING:
    from llguidance import LLTokenizer

LENGTH = struct.Struct("<I")
MEMORY_BYTES = 128 << 20
"""What one constraint may add to a process that has the tokenizer."""

_WALK = 24
"""Tokens of answers that are tried, drawn among those that fit; each needs a mask."""


class CompileTask(msgspec.Struct, frozen=True, array_like=True):
    """A constraint that somebody says can be followed.

    text: a schema if it begins with a brace, else a grammar. foreign: it may be GBNF. trusted:
    made by ourselves, so what the compiler remarks is known.
    """

    text: str
    foreign: bool = False
    trusted: bool = False


class CompileResult(msgspec.Struct, frozen=True, array_like=True):
    """The constraint as the ranks are to read it, or what is wrong with it, in a line."""

    text: str = ""
    fault: str = ""


def serve(folder: str, vocab_size: int, cpu_seconds: float) -> None:
    """Answer the claims that come by stdin until it ends; the process's whole life."""
    try:
        tokenizer, fault = tokenizer_of(Path(folder), vocab_size), ""
    except Exception as error:
        # Models that only write free text have tokenizers of every kind.
        tokenizer, fault = None, f"it cannot be held to this model's tokenizer: {error}"
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while (asked := _read(source)) is not None:
        if tokenizer is None:
            answer = msgspec.msgpack.encode(CompileResult(fault=fault))
        else:
            answer = _tried(tokenizer, asked, cpu_seconds)
        sink.write(LENGTH.pack(len(answer)) + answer)
        sink.flush()


def _tried(tokenizer: "LLTokenizer", asked: bytes, cpu_seconds: float) -> bytes:
    """The proof that a fork comes to, or what ended it."""
    come, go = os.pipe()
    child = os.fork()
    if child == 0:
        _limit(cpu_seconds)
        with contextlib.suppress(Exception), os.fdopen(go, "wb") as sink:
            sink.write(msgspec.msgpack.encode(prove(tokenizer, asked)))
            sink.flush()
            os._exit(0)
        os._exit(1)
    os.close(go)
    with os.fdopen(come, "rb") as answer:
        found = answer.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0:
        return found
    words = {
        -signal.SIGPROF: f"it takes over {cpu_seconds:g} s to compile",
        -signal.SIGABRT: "it takes too much memory",
        -signal.SIGKILL: "it takes too much memory",
    }
    return msgspec.msgpack.encode(
        CompileResult(fault=words.get(status, "it makes the compiler fail"))
    )


def _limit(cpu_seconds: float) -> None:
    """Have this process ended when it takes more than a constraint may."""
    taken = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    most = taken + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    # What a compiler says when it dies is no news to operators.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def prove(tokenizer: "LLTokenizer", asked: bytes) -> CompileResult:
    """Do with a claim all that a rank will do."""
    claim = msgspec.msgpack.decode(asked, type=CompileTask)
    try:
        text = _lark(claim.text) if claim.foreign else claim.text
        if fault := _remarks(text, claim.trusted):
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
        # The converter raises what its parser happened to run into.
        words = str(fault).strip().split("\n")[0]
        raise ValueError(f"the grammar is not valid GBNF: {words}") from fault


def _remarks(text: str, trusted: bool) -> str:
    """What the compiler has to say without a vocabulary; "" for nothing that matters."""
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(text) if text.startswith("{") else text
    failed, remarks = LLMatcher.validate_grammar_with_warnings(grammar)
    if not failed and trusted:
        return ""
    # A remark says that a part would not be enforced, or that only the ranks can tell.
    return reason("\n".join(remarks) or ("it cannot be compiled" if failed else ""))


def _walk(tokenizer: "LLTokenizer", text: str) -> None:
    """Follow answers that fit, one after the other; ValueError where a mask takes too much."""
    import numpy as np  # The ingress itself, which imports this file, has no use for it.

    matcher = matcher_of(tokenizer, text)
    draw = random.Random(0)
    for _ in range(_WALK):
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        fitting = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        going_on = fitting[~np.isin(fitting, tokenizer.eos_tokens)]
        if len(going_on):
            matcher.try_consume_tokens([int(going_on[draw.randrange(len(going_on))])])
        if matcher.is_error():
            raise ValueError(f"it takes too much to follow: {reason(matcher.get_error())}")
        if matcher.is_stopped():
            matcher.reset()


def _read(source: BinaryIO) -> bytes | None:
    head = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None
