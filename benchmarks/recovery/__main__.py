"""How fast a server is back: kills and stops, starts, scaling, cold adapters; and a soak.

    python -m benchmarks.recovery empty start kill scale zero cold              on the demo
    python -m benchmarks.recovery start --config serve_config.yaml
    python -m benchmarks.recovery soak --minutes 60

Starts `loray serve` of the config with two ingress replicas, asks each prompt once for the right
answer (greedy; the demo's answers are those of transformers + PEFT), and measures. One JSON line a
case, with what it depends on. `kill`: SIGKILL of a rank, a driver, an ingress and the HTTP front,
and SIGSTOP of a rank, under `--rate` requests a second: `back_s` is from the blow to the first
token of a request sent after it. `empty`: the start of an empty Serve application, before all else.
All other cases have one server, whose end is measured too; kills come first. `scale`: to a second
replica, `zero`: from none to the first answer, `cold`: first tokens of all adapters at once, then
of some beside a full batch. `--tokens` bounds the answers of a model that never ends them. A case
that fails is a line with its error, and the others follow. `soak` kills a random process each 15 to
21 s on two driver replicas. Exits with 1 unless every answer was right.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.recovery import cases
from benchmarks.recovery.empty import empty_start
from benchmarks.recovery.load import Question, rounded
from benchmarks.recovery.server import RecoveryServer, conditions, with_replicas
from benchmarks.recovery.soak import soak

CASES = ("empty", "start", "kill", "scale", "zero", "cold", "soak")
PROMPTS = ("What is the capital of France?", "Tell me about the moon.", "Tell me about lions.")


def questions_of(
    server: RecoveryServer, adapters: Sequence[str], tokens: int | None
) -> list[Question]:
    """Each prompt over the base model and each adapter, with the server's own answer."""
    found = []
    for adapter in (None, *adapters):
        for prompt in PROMPTS:
            question = Question(prompt, adapter, "", tokens)
            found.append(replace(question, answer=cases.answer(server, question)))
    return found


def wrong_answers(questions: Sequence[Question], truth: Path) -> list[str]:
    """Answers that differ from the file's, of transformers + PEFT."""
    answers = json.loads(truth.read_text())["answers"]
    return [
        f"{q.adapter}: {q.prompt}: {q.answer}"
        for q in questions
        if answers[q.adapter or "base"][q.prompt]["raw"] != q.answer
    ]


def adapters_of(server: RecoveryServer) -> list[str]:
    """The adapters that the server lists."""
    rows = httpx.get(f"{server.url}/v1/adapters", timeout=60).raise_for_status().json()["data"]
    return [row["id"] for row in rows]


class Measuring:
    """The cases on one server that runs."""

    def __init__(self, server: RecoveryServer, parsed: argparse.Namespace) -> None:
        self._server = server
        self._parsed = parsed
        self._adapters = parsed.adapters or adapters_of(server)

    @cached_property
    def _questions(self) -> list[Question]:
        found = questions_of(self._server, self._adapters, self._parsed.tokens)
        require_right(found, self._parsed.answers)
        return found

    def case(self, name: str) -> Iterator[dict[str, Any]]:
        """Measure a case; name: of CASES, or of a blow."""
        if name == "cold":
            # Where it is the first case, nothing was answered before: no adapter was seen.
            seen = [Question(PROMPTS[0], adapter, "") for adapter in self._adapters]
            yield from cases.cold(self._server, seen)
        elif name == "scale":
            yield from cases.scale(self._server)
        elif name == "zero":
            yield from cases.zero(self._server, self._questions)
        elif name == "soak":
            rate, minutes = self._parsed.rate, self._parsed.minutes
            yield asyncio.run(soak(self._server, self._questions, rate, minutes))
        else:
            rate, before = self._parsed.rate, self._parsed.before
            yield cases.kill(self._server, self._questions, rate, before, name)


def measure(server: RecoveryServer, parsed: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure all cases on one server; a fault in one is a line, and does not end the others."""
    names = [name for name in parsed.cases if name not in ("empty", "start", "kill")]
    if "kill" in parsed.cases:
        names[:0] = parsed.blows
    try:
        yield {"case": "start", "seconds": server.start().seconds}
        measuring = Measuring(server, parsed)
        for name in names:
            time.sleep(parsed.rest)
            try:
                yield from measuring.case(name)
            except Exception as fault:
                yield {"case": name, "error": repr(fault)[:300]}
    finally:
        stopped = server.stop()
    yield {"case": "stop", "seconds": rounded(stopped)}


def require_right(questions: Sequence[Question], truth: Path | None) -> None:
    """Exit if an answer differs from the file's before any kill."""
    wrong = wrong_answers(questions, truth) if truth is not None else []
    if wrong:
        raise SystemExit("these answers are wrong before any kill:\n" + "\n".join(wrong))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases that are named, in their order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--config", type=Path, default=Path("serve_config.yaml"))
    parser.add_argument("--answers", type=Path, help="a file of right answers, as the demo's")
    parser.add_argument("--adapters", nargs="*", help="default: those that the server lists")
    parser.add_argument("--tokens", type=int, help="most tokens of an answer; default: no bound")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument(
        "--before", type=float, default=cases.BEFORE_S, help="seconds before a kill"
    )
    parser.add_argument(
        "--blows",
        nargs="+",
        choices=cases.BLOWS,
        default=[blow for blow in cases.BLOWS if blow not in cases.SLOW_BLOWS],
        help="of the kills",
    )
    parser.add_argument(
        "--rest",
        type=float,
        default=0.0,
        help="seconds before each case: `cuda_graphs_later` leaves graphs to be recorded",
    )
    parser.add_argument("--folder", type=Path, help="of the server's log; default: a temporary one")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--minutes", type=float, default=60.0, help="of the soak")
    parsed = parser.parse_args(arguments)
    config = yaml.safe_load(parsed.config.read_text())
    if parsed.answers is None and parsed.config == Path("serve_config.yaml"):
        parsed.answers = Path("configs/demo/answers.json")
    # `timeout` ends the server too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    bad = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = parsed.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if "empty" in parsed.cases:
            row = {"case": "empty", "seconds": empty_start(folder, parsed.port)}
            print(json.dumps(row), flush=True)
        drivers = 2 if "soak" in parsed.cases else 1
        changed = with_replicas(config, drivers, ingresses=2)
        server = RecoveryServer(changed, folder, parsed.port)
        for row in measure(server, parsed) if parsed.cases != ["empty"] else ():
            print(json.dumps({**row, **conditions(config)}), flush=True)
            bad |= any(row.get(each) for each in ("wrong", "lost", "unexpected", "error"))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
