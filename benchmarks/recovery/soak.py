"""Random kills under load on two replicas: every answer must be right."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

from benchmarks.recovery.load import Load, Question, summary
from benchmarks.recovery.server import RecoveryServer

# Ranks mostly, as their losses are the most frequent.
TARGETS = ("rank", "rank", "rank", "driver", "driver", "ingress", "front")
LEAST_S, MOST_S = 15.0, 21.0
QUIET_S = 60.0
TRIES = 200


async def soak(
    server: RecoveryServer, questions: Sequence[Question], rate: float, minutes: float
) -> dict[str, Any]:
    """Kill a random process each 15 to 21 s under load; the summary, and the kills by kind.

    Ctrl-C ends it early, with its summary.
    A request is sent again by its client when its ingress or the front was killed with its
    connection; one that fails otherwise counts as `unexpected`.
    """
    load, ended = Load(server.url, questions, rate, TRIES), asyncio.Event()
    running = asyncio.create_task(load.run(ended))
    kills: list[tuple[float, str]] = []
    chooser, began = random.Random(11), time.monotonic()
    with suppress(asyncio.CancelledError):
        while time.monotonic() < began + 60 * minutes:
            await asyncio.sleep(chooser.uniform(LEAST_S, MOST_S))
            kind = chooser.choice(TARGETS)
            if kill_one(server, kind, chooser):
                kills.append((time.monotonic(), kind))
                done = Counter(story.outcome for story in load.stories)
                print(json.dumps({"killed": kind, "number": len(kills), **done}), flush=True)
    minutes = (time.monotonic() - began) / 60
    await asyncio.sleep(min(QUIET_S, 60 * minutes))
    ended.set()
    await running
    return {
        "case": "soak",
        "minutes": round(minutes, 1),
        "kills": dict(Counter(kind for _, kind in kills)),
        **summary(load.stories),
        "unexpected": unexpected(load, kills),
    }


def kill_one(server: RecoveryServer, kind: str, chooser: random.Random) -> bool:
    """SIGKILL a random process of this kind; False if there is none now."""
    victims = server.processes(kind)
    if not victims:
        return False
    with suppress(psutil.NoSuchProcess):
        chooser.choice(victims).kill()
    return True


def unexpected(load: Load, kills: Sequence[tuple[float, str]]) -> list[str]:
    """Faults of requests that ran while no ingress and no front had just been killed."""
    blows = [at for at, kind in kills if kind in ("ingress", "front")]
    found = []
    for story in load.stories:
        # A front or an ingress is back within this time; see docs/operations.md.
        if story.faults and not any(story.born - 45 <= at <= story.sent + 1 for at in blows):
            found.append(f"{story.question.adapter}: {story.faults[0]}")
    return found
