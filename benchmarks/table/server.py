"""The servers that the table measures: ours and a peer's, each a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks.table.rows import gpus
from configs.env import environment_with, joining_environment

ANNOUNCED = "Ctrl-C ends it"
_CHOICE = re.compile(r"^  (\S.{13}) (\S.*)$")
"""`loray serve` prints names in columns of 14."""

_POLL_S, _STOP_S, _KILL_S = 0.25, 90.0, 10.0
_FREE_S, _TOLERATED_MIB = 30.0, 512
_TAIL_LINES = 30


class ServerError(RuntimeError):
    """A server that did not come up; the message holds the end of what it said."""


@dataclass(frozen=True)
class Ready:
    """A server that answers: how long its start took, and what it said of itself."""

    seconds: float
    choices: Mapping[str, str]


class TableServer:
    """One server's process, its output in a file, and what it leaves behind."""

    def __init__(self, command: Sequence[str], log: Path, url: str) -> None:
        """Start it; `url` is where it will answer."""
        self.url = url
        self.log = log
        self._before = used_mib()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        with log.open("w") as file:
            self._process = start(command, file)

    def wait(self, is_ready: Callable[["TableServer"], bool], timeout_s: float) -> Ready:
        """Wait until it answers; ServerError when it ends first, or takes too long."""
        while not is_ready(self):
            if self._process.poll() is not None:
                raise ServerError(f"the server ended by itself ({self.log}):\n{self._tail()}")
            if time.monotonic() - self._began > timeout_s:
                raise ServerError(
                    f"the server was not ready after {timeout_s:.0f} s:\n{self._tail()}"
                )
            time.sleep(_POLL_S)
        return Ready(round(time.monotonic() - self._began, 1), read_choices(self.said()))

    def said(self) -> str:
        """All of its output."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    def stop(self) -> dict[str, int]:
        """End it; returns what it left: processes, and MiB of GPU memory."""
        family = descendants(self._process.pid)
        if self._process.poll() is None:
            # Not by Ctrl-C's signal: what was started in the background ignores it.
            self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        left = end(family)
        return {"processes_left": left, "gpu_mib_left": wait_until_free(self._before)}

    def _tail(self) -> str:
        return "\n".join(self.said().splitlines()[-_TAIL_LINES:])


def start(command: Sequence[str], output: IO[str]) -> "subprocess.Popen[str]":
    """Run a command in a session of its own, so that a Ctrl-C here does not reach it.

    Ray starts anew for it, even where it runs already: nothing else may have part in a figure.
    """
    try:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=environment_with("RAY_ADDRESS", "local"),
        )
    except OSError as fault:
        raise ServerError(f"{command[0]} cannot be run: {fault.strerror}") from fault


def descendants(pid: int) -> list[psutil.Process]:
    """All processes under this one."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end(family: Sequence[psutil.Process]) -> int:
    """Kill those that are still there after a while; returns how many."""
    _, alive = psutil.wait_procs(family, timeout=_KILL_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=_KILL_S)
    return len(alive)


def used_mib() -> int:
    """GPU memory in use on this machine."""
    return sum(gpu.used_mib for gpu in gpus())


def wait_until_free(before: int) -> int:
    """MiB of GPU memory still taken beyond what was before; 0 as soon as it is free."""
    deadline = time.monotonic() + _FREE_S
    while (left := used_mib() - before) > _TOLERATED_MIB and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left if left > _TOLERATED_MIB else 0


def is_announced(server: TableServer) -> bool:
    """Whether a server of ours has said that it serves."""
    return ANNOUNCED in server.said()


def answers(server: TableServer) -> bool:
    """Whether any OpenAI-compatible server lists its models."""
    try:
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def read_choices(said: str) -> dict[str, str]:
    """What a server of ours announced: backend, kernels, pages, HTTP front, Ray's address."""
    _, _, announcement = said.partition("LoRay serves ")
    lines = announcement.partition("\nTry:")[0].splitlines()
    found = [match for line in lines if (match := _CHOICE.match(line))]
    return {match[1].rstrip(): match[2] for match in found}


def peer_version(url: str) -> str:
    """What a peer says of its version; empty if nothing."""
    try:
        with urllib.request.urlopen(f"{url}/version", timeout=60) as reply:
            return str(json.load(reply).get("version", ""))
    except (urllib.error.URLError, ConnectionError, TimeoutError, ValueError, AttributeError):
        return ""


class StepReader:
    """benchmarks.steps in a process of its own: the driver's record of its steps."""

    def __init__(self, address: str, log: Path) -> None:
        """Begin to join the cluster at `address`, which takes seconds."""
        command = [sys.executable, "-m", "benchmarks.steps", "--address", address]
        self._log = log
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
                env=joining_environment(),
            )

    def join(self) -> None:
        """Wait until it has joined; ServerError if it cannot."""
        if self._read() is None:
            raise ServerError(f"the driver does not report its steps; why: {self._log}")

    def ask(self) -> dict[str, Any]:
        """The record since the last call; empty when the driver does not reply."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {}
        return self._read() or {}

    def stop(self) -> None:
        """Leave the cluster."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _read(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        return None
