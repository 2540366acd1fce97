"""What expensive requests cost a whole server, process by process.

    python -m benchmarks.attack

It serves a small model on 127.0.0.1 (benchmarks.local), and sends one attack after the other. Of
each, a line has the answer's status, the CPU seconds that all of the server's processes took for
it, how many bytes they held at most beyond what they held before, and the longest time that
/health took meanwhile. With --url and --pid it uses a server that runs already; --only takes those
with a word in their names. docs/operations.md says what each may cost at most.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from benchmarks.attack.requests import TEMPLATES, Attack, attacks
from benchmarks.workload import main as write_workload

HOST = "127.0.0.1"
PATIENCE_S = 120.0
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}{{ tools or '' }}"
_LOOK_S = 0.05
_START_S = 300.0


@dataclass
class Bill:
    """What a server's processes used since this was made."""

    processes: Sequence[psutil.Process]
    bytes_before: int = 0
    bytes_most: int = 0
    slowest_health_s: float = 0.0

    def __post_init__(self) -> None:
        """Begin to count."""
        self._began = self._seconds()
        self.bytes_before = self.bytes_most = self._bytes()

    @property
    def cpu_seconds(self) -> float:
        """Of all processes since the beginning, those that have ended included."""
        return self._seconds() - self._began

    def look(self) -> None:
        """Note what they hold now."""
        self.bytes_most = max(self.bytes_most, self._bytes())

    def _seconds(self) -> float:
        times = [process.cpu_times() for process in self._alive()]
        return sum(t.user + t.system + t.children_user + t.children_system for t in times)

    def _bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._alive())

    def _alive(self) -> Iterator[psutil.Process]:
        for process in self.processes:
            for each in (process, *process.children(recursive=True)):
                if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                    yield each


@contextmanager
def served(port: int) -> Iterator[psutil.Process]:
    """A small model with an adapter for each hostile template."""
    with tempfile.TemporaryDirectory() as folder:
        write_workload(
            [folder, "--shape", "tiny", "--json", "--adapters", str(len(TEMPLATES)), "--ranks", "8"]
        )
        (Path(folder) / "chat_template.jinja").write_text(TEMPLATE)
        adapters = sorted(path for path in (Path(folder) / "adapters").iterdir() if path.is_dir())
        for adapter, template in zip(adapters, TEMPLATES.values(), strict=False):
            (adapter / "chat_template.jinja").write_text(template)
        command = [sys.executable, "-m", "benchmarks.local", folder, "--port", str(port)]
        process = subprocess.Popen(command)
        try:
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


async def until_healthy(session: aiohttp.ClientSession) -> None:
    """Wait until the server answers."""
    async with asyncio.timeout(_START_S):
        while True:
            try:
                async with session.get("/health") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)


@asynccontextmanager
async def watched(session: aiohttp.ClientSession, bill: Bill) -> AsyncIterator[None]:
    """Look at the processes, and at how long /health takes."""

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            async with session.get("/health"):
                bill.slowest_health_s = max(bill.slowest_health_s, time.perf_counter() - began)
            bill.look()
            await asyncio.sleep(_LOOK_S)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def send(session: aiohttp.ClientSession, attack: Attack) -> str:
    """The status of the answer, or why there was none."""
    headers = {"content-type": "application/json", **attack.headers}
    try:
        async with asyncio.timeout(PATIENCE_S):
            async with session.post(attack.path, data=attack.body, headers=headers) as reply:
                await reply.read()
                return str(reply.status)
    except (aiohttp.ClientError, TimeoutError) as error:
        return type(error).__name__


async def sweep(url: str, processes: Sequence[psutil.Process], only: str) -> None:
    """Send each attack and print what it cost."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        await until_healthy(session)
        print(f"{'attack':42} {'sent B':>9} {'answer':>7} {'CPU s':>7} {'+MiB':>6} {'health s':>8}")
        for attack in attacks():
            if only not in attack.name:
                continue
            bill = Bill(processes)
            async with watched(session, bill):
                answer = await send(session, attack)
            more = (bill.bytes_most - bill.bytes_before) / 2**20
            line = f"{attack.name:42} {len(attack.body):9} {answer:>7} {bill.cpu_seconds:7.2f}"
            print(f"{line} {more:6.0f} {bill.slowest_health_s:8.2f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep a server of its own, or one that runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", help="of a server that runs, on this machine")
    parser.add_argument("--pid", type=int, action="append", default=[], help="of its processes")
    parser.add_argument("--only", default="")
    parser.add_argument("--port", type=int, default=8017)
    options = parser.parse_args(arguments)
    if options.url:
        asyncio.run(sweep(options.url, [psutil.Process(pid) for pid in options.pid], options.only))
        return
    with served(options.port) as process:
        asyncio.run(sweep(f"http://{HOST}:{options.port}", [process], options.only))


if __name__ == "__main__":
    main()
