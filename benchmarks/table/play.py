"""Playing the table: which servers are started, in which order, and the row of each case."""

import asyncio
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch

from benchmarks import fairness, open_loop, serving
from benchmarks.serving import Case
from benchmarks.structured import Comparison
from benchmarks.table.groups import BASE, Fair, Loading, Open, Play, RowGroup, Start
from benchmarks.table.rows import OURS, PEER, Results, Row, now
from benchmarks.table.server import (
    Ready,
    ServerError,
    StepReader,
    TableServer,
    answers,
    is_announced,
    peer_version,
)
from benchmarks.table.setup import (
    Setup,
    SetupError,
    claimed,
    measure_loading,
    our_command,
    peer_command,
    write_files,
)

READY_S, START_S = 900.0, 45.0

PEER_OF = {"peer": "one-gpu"} | {
    f"peer-{n}": n for n in ("two-gpus", "churn", "seventy-b", "open-loop")
}
"""Groups of which a peer plays some cases, by the name for --only."""


@dataclass(frozen=True)
class Session:
    """Cases against one start of one server; template: a peer's command."""

    group: RowGroup
    side: str
    plays: tuple[Play, ...]
    template: str = ""


@dataclass(frozen=True)
class Peer:
    """A peer's commands: for the base model alone, and with adapters."""

    base: str
    adapters: str


class Budget:
    """How long cases may still be started."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin now; None: no end."""
        self._clock = clock
        self._seconds = seconds
        self._began = clock()

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds to the end."""
        return float("inf") if self._seconds is None else self._seconds - self.spent


def plan(
    all_groups: Mapping[str, RowGroup],
    names: Sequence[str],
    patterns: Sequence[str],
    peer: Peer | None,
) -> list[Session]:
    """The servers to be started, in order, each with the cases that match a pattern."""
    sessions = []
    for name in names:
        side = PEER if name in PEER_OF else OURS
        group = all_groups[PEER_OF.get(name, name)]
        plays = [play for play in group.plays if _matches(play, patterns)]
        if side == PEER:
            assert peer is not None
            sessions += _of_peer(group, plays, peer)
        elif group.weights:
            sessions += [Session(group, side, (play,)) for play in plays]
        else:
            sessions.append(Session(group, side, tuple(plays)))
    return [session for session in sessions if session.plays]


def unmeasured(sessions: Iterable[Session], results: Results, setup: Setup) -> list[Session]:
    """The same without what the results hold already."""
    found = []
    for session in sessions:
        key, words = (session.group.name, session.side), setup.words(session.group)
        plays = tuple(play for play in session.plays if not results.has((*key, play.name), words))
        if plays:
            found.append(replace(session, plays=plays))
    return found


def _matches(play: Play, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch(play.name, pattern) for pattern in patterns)


def _of_peer(group: RowGroup, plays: Sequence[Play], peer: Peer) -> list[Session]:
    """Base rows, plain adapters and mixed ranks go to servers of their own.

    A peer may pay for adapters in base rows too, and for the largest rank in all of them.
    """
    kinds: dict[str, list[Play]] = {"base": [], "a": [], "s": [], "m": []}
    for play in plays:
        kinds["base" if play.models == (BASE,) else play.models[0][0]].append(play)
    templates = {"base": peer.base}
    return [
        Session(group, PEER, tuple(those), templates.get(kind, peer.adapters))
        for kind, those in kinds.items()
        if those
    ]


def seed_of(play: Play) -> int:
    """The same for a case on every side and server, and another one for each case."""
    return zlib.crc32(play.name.encode()) % 10_000_000


@dataclass(frozen=True)
class LoadTarget:
    """A server that is ready, with the record of its steps; steps: None for a peer."""

    url: str
    vocabulary: int
    steps: StepReader | None = None

    async def read_steps(self) -> Row:
        """The driver's record since the last call."""
        return await asyncio.to_thread(self.steps.ask) if self.steps is not None else {}


async def warm_up(target: LoadTarget, plays: Sequence[Play]) -> None:
    """Send a request for each model that the cases do not load; ServerError if any fails."""
    names = {n for play in plays if not (play.settle or play.cold) for n in play.models}
    models = (BASE, *sorted(names - {BASE}))
    row = await serving.run(target.url, serving.warming(models), target.vocabulary, seed=0)
    if row["errors"]:
        raise ServerError(f"the server fails {row['errors']} requests: {row['first_error'][0]}")


async def measure(play: Play, target: LoadTarget) -> Row:
    """Play one case; returns its figures."""
    if play.settle:
        await serving.settle(target.url, play.models, target.vocabulary)
    await target.read_steps()
    return await _figures(play, target) | await target.read_steps()


async def _figures(play: Play, target: LoadTarget) -> Row:
    seed = seed_of(play)
    match play.what:
        case Case() as case:
            return await serving.run(target.url, case, target.vocabulary, seed)
        case Fair(load=load, terms=terms):
            here = replace(terms, url=target.url, vocabulary=target.vocabulary)
            return await fairness.run(here, load, seed)
        case Open(load=load, search=search):
            play_it = open_loop.search if search else open_loop.run
            return await play_it(target.url, load, target.vocabulary, seed)
        case Comparison() as comparison:
            return await _compared(comparison, target, seed)
        case Start(name=name):
            proof = Case(name, (BASE,), 1, 1, 8, 2)
            row = await serving.run(target.url, proof, target.vocabulary, seed)
            return {"errors": row["errors"], "first_error": row["first_error"]}
        case Loading():
            raise AssertionError("a load needs no server")


async def _compared(comparison: Comparison, target: LoadTarget, seed: int) -> Row:
    rows = [row async for row in comparison.rows(target.url, target.vocabulary, seed)]
    *loops, last = rows
    best = last["output_tokens_per_s"]
    return {
        "concurrency": comparison.case.concurrency,
        "share": last["share"],
        "ratio": last["ratio"],
        "free_tokens_per_s": best["free"],
        "held_tokens_per_s": best["held"],
        "cached_prompt_tokens": sum(row["cached_prompt_tokens"] for row in loops),
        "errors": sum(row["errors"] for row in loops),
        "first_error": [error for row in loops for error in row["first_error"]][:1],
    }


@dataclass(frozen=True)
class Player:
    """Runs sessions and writes rows; log: prints a line."""

    setup: Setup
    results: Results
    budget: Budget
    facts: Row
    log: Callable[[str], None]
    say: Callable[[Row], str]

    def run(self, session: Session) -> None:
        """Start one server, play its cases while there is time, end it."""
        if self.budget.left < START_S:
            self.log(f"no time is left for {session.group.name} ({session.side})")
            return
        names = ", ".join(play.name for play in session.plays)
        self.log(f"\n{session.group.name} ({session.side}): {names}")
        try:
            with claimed(self.setup, f"{session.group.name}-{session.side}"):
                self._play_alone(session)
        except (ServerError, SetupError) as fault:
            self.log(str(fault))
            self._append(session, "(start)", {"failure": str(fault)})

    def _play_alone(self, session: Session) -> None:
        write_files(self.setup, session.group, session.plays)
        if isinstance(session.plays[0].what, Loading):
            row = measure_loading(self.setup, session.group)
            self._record(session, session.plays[0], row, None)
        else:
            self._serve(session)

    def _serve(self, session: Session) -> None:
        """Have a server for as long as its cases run."""
        server = self._start(session)
        try:
            self._measure(session, server)
        finally:
            left = server.stop()
            if any(left.values()):
                self.log(f"the server left behind: {left}")
            self._append(session, "(end)", left)

    def _start(self, session: Session) -> TableServer:
        setup, group = self.setup, session.group
        if session.side == OURS:
            command = our_command(setup, group)
        else:
            command = peer_command(setup, group, session.plays, session.template)
        log = setup.work / "logs" / f"{group.name}-{session.side}-{session.plays[0].name}.log"
        return TableServer(command, log, setup.url)

    def _measure(self, session: Session, server: TableServer) -> None:
        is_ours = session.side == OURS
        timeout = min(READY_S, self.budget.left)
        ready = server.wait(is_announced if is_ours else answers, timeout)
        if not is_ours:
            ready = replace(ready, choices={"version": peer_version(server.url)})
        self.log(f"  ready after {ready.seconds} s")
        for what, choice in ready.choices.items():
            self.log(f"  {what:14} {choice}")
        vocabulary = self.setup.vocabulary_of(session.group)
        has_steps = is_ours and not session.group.weights
        steps = StepReader(ready.choices["ray address"], server.log) if has_steps else None
        try:
            asyncio.run(self._play(session, LoadTarget(server.url, vocabulary, steps), ready))
        finally:
            if steps is not None:
                steps.stop()

    async def _play(self, session: Session, target: LoadTarget, ready: Ready) -> None:
        if not session.group.weights:
            await warm_up(target, session.plays)
        if target.steps is not None:
            await asyncio.to_thread(target.steps.join)
        for play in session.plays:
            needed = play.seconds if self.setup.device == "cuda" else 0.0
            if self.budget.left < needed:
                self.log(f"  no time is left for {play.name}")
                continue
            began = time.monotonic()
            row = await measure(play, target)
            row["seconds"] = round(time.monotonic() - began, 1)
            self._record(session, play, row, ready)

    def _record(self, session: Session, play: Play, row: Row, ready: Ready | None) -> None:
        if ready is not None:
            row = {**row, "ready_s": ready.seconds, "server": dict(ready.choices)}
        whole = self._append(session, play.name, row)
        self.log(f"  {self.say(whole)}  [{self.budget.spent:.0f} s]")

    def _append(self, session: Session, case: str, row: Row) -> Row:
        group, setup = session.group, self.setup
        known = {
            "group": group.name,
            "side": session.side,
            "setup": setup.words(group),
            "gpus": group.gpus,
            "shape": setup.shape_of(group),
            "dtype": setup.dtype,
            "device": setup.device,
            "command": session.template,
        }
        whole = {**known, **row, "case": case, "at": now(), "machine": self.facts}
        self.results.append(whole)
        return whole
