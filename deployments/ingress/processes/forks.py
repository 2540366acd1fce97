"""The worker's side of the pipes: reads requests, and runs work in forks with limits."""

import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import NamedTuple

LENGTH = struct.Struct("<I")
"""The number of bytes of a request or a reply, sent before it."""


class ForkResult(NamedTuple):
    """How a fork ended.

    exit_code: 0 when `output` is whole; negative: the signal that ended it.
    output: what the work returned.
    used: the resources that it took.
    """

    exit_code: int
    output: bytes
    used: resource.struct_rusage


def serve_requests(reply_to: Callable[[bytes], bytes]) -> None:
    """Write the reply to each request from stdin to stdout, until stdin ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        reply = reply_to(source.read(LENGTH.unpack(head)[0]))
        sink.write(LENGTH.pack(len(reply)) + reply)
        sink.flush()


def run_in_fork(
    work: Callable[[], bytes], cpu_seconds: float, memory: tuple[int, int]
) -> ForkResult:
    """Run `work` in a fork; SIGPROF kills it after `cpu_seconds` of CPU time.

    memory: a limit of the `resource` module, and its bytes.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _work_and_exit(work, cpu_seconds, memory, writer)
    os.close(writer)
    # Read before waiting: a child with more output than the pipe's buffer could not end.
    with open(reader, "rb") as pipe:
        output = pipe.read()
    _, status, used = os.wait4(child, 0)
    return ForkResult(os.waitstatus_to_exitcode(status), output, used)


def _work_and_exit(
    work: Callable[[], bytes], cpu_seconds: float, memory: tuple[int, int], writer: int
) -> None:
    """Run in the fork: do the work, write the output, exit. Never returns."""
    exit_code = 1
    try:
        # The ingress waits for the worker's stdout to close; a fork must not keep it open.
        os.close(sys.stdin.fileno())
        os.close(sys.stdout.fileno())
        # Libraries print when they run out of memory, which is an expected result here.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        limit, num_bytes = memory
        resource.setrlimit(limit, (num_bytes, num_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        output = work()
        with open(writer, "wb") as pipe:
            pipe.write(output)
        exit_code = 0
    finally:
        os._exit(exit_code)
