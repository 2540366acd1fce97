"""A rank without a model, in a process of its own: it answers each plan after a given time.

As a RankGroup it lets a driver run as in service while nothing is computed, so that what is
left is the cost of everything else. Tokens are taken in rotation from a range of ids.
"""

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from configs.wire.plan import Capacity, StepPlan, StepResult
from deployments.rank.messages import LoadReport, RunStep, StepDone, Stop
from deployments.rank.transport import Channel, RankLinks


class TimedRanks:
    """One rank that needs `step_seconds` for every step, whatever is in it."""

    def __init__(self, capacity: Capacity, step_seconds: float, tokens: range) -> None:
        """tokens: the ids that it answers."""
        self._capacity = capacity
        self._arguments = [str(step_seconds), str(tokens.start), str(tokens.stop)]
        self._process: subprocess.Popen[bytes] | None = None
        self._links: RankLinks | None = None

    def start(self) -> tuple[RankLinks, list[LoadReport]]:
        """Start the process."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "benchmarks.timed_ranks", str(theirs.fileno())]
        self._process = subprocess.Popen([*command, *self._arguments], pass_fds=[theirs.fileno()])
        theirs.close()
        self._links = RankLinks([Channel(ours)])
        report = LoadReport(
            rank=0,
            pid=self._process.pid,
            capacity=self._capacity,
            dtype="none",
            device="none: every step takes its time and computes nothing",
            attention="none",
            adapter_kernel="none",
            all_reduce="none",
            weight_bytes_resident=0,
            cache_bytes=0,
            adapter_bytes=0,
            load_seconds=0.0,
        )
        return self._links, [report]

    def stop(self) -> None:
        """Hang up; the process ends by that."""
        if self._links is not None:
            self._links.close()
        if self._process is not None:
            self._process.wait(timeout=10.0)

    def release(self) -> None:
        """End as `stop` does."""
        self.stop()

    def await_ends(self) -> None:
        """Return at once: `stop` has waited."""


def answer(channel: Channel, step_seconds: float, tokens: range) -> None:
    """Take plans until the driver hangs up; a step begins when the one before has ended."""
    decoder: msgspec.msgpack.Decoder[RunStep | Stop] = msgspec.msgpack.Decoder(RunStep | Stop)
    encoder = msgspec.msgpack.Encoder()
    ended = 0.0
    while (frame := channel.receive()) is not None:
        command = decoder.decode(frame)
        if isinstance(command, Stop):
            return
        ended = max(ended, time.perf_counter()) + step_seconds
        time.sleep(max(0.0, ended - time.perf_counter()))
        channel.send(encoder.encode(StepDone(result_of(command.plan, tokens, step_seconds))))


def result_of(plan: StepPlan, tokens: range, step_seconds: float) -> StepResult:
    """A token for each row that samples: another one in each step and batch slot."""
    sampled = [
        tokens[(plan.step * 31 + row.batch_slot * 7) % len(tokens)]
        for row in plan.rows
        if row.samples
    ]
    return StepResult(plan.epoch, plan.step, sampled, None, step_seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Be the rank at the other end of a file descriptor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("descriptor", type=int)
    parser.add_argument("step_seconds", type=float)
    parser.add_argument("first_token", type=int)
    parser.add_argument("last_token", type=int)
    parsed = parser.parse_args(arguments)
    channel = Channel(socket.socket(fileno=parsed.descriptor))
    answer(channel, parsed.step_seconds, range(parsed.first_token, parsed.last_token))


if __name__ == "__main__":
    main()
