"""Reads tokenizers in forks of one process that has imported transformers, which takes a second.

A server starts a new process for each (`deployments.ingress.text.conversion`), once in its life; a
suite does it some hundred times. What runs is the same. Tests under end_to_end/ start servers, and
those that trust a folder's code a process of their own, so both ways are tested.
"""

import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

import msgspec

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[bytes]"]

_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload([f"{__package__}.tokenizers_alone"])


def in_forks(own_process: Run) -> Run:
    """What runs a command in a fork; own_process: what runs it where a folder's code is trusted."""

    def run(command: Sequence[str]) -> "subprocess.CompletedProcess[bytes]":
        *_, folder, trust = command
        if trust:
            return own_process(command)
        receiver, sender = _FORKS.Pipe(duplex=False)
        fork = _FORKS.Process(target=_convert, args=(folder, sender))
        fork.start()
        sender.close()
        with receiver:
            code, output, errors = receiver.recv()
        fork.join()
        fork.close()
        return subprocess.CompletedProcess(command, code, output, errors)

    return run


def _convert(folder: str, reply: Connection) -> None:
    from deployments.ingress.text.conversion import converted

    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        reply.send((0, msgspec.msgpack.encode(converted(folder, False)), b""))
    except BaseException:
        reply.send((1, b"", traceback.format_exc().encode()))
