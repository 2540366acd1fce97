"""The input and the output of an offline batch, as files of JSON lines."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from deployments.ingress.batches.lines import raw_lines, read_line
from deployments.ingress.batches.records import LineFault

MAX_FAULTS = 20


class CheckedInput(NamedTuple):
    """total: lines of the input. faults: the first of those that are wrong."""

    total: int
    faults: list[LineFault]


class _Written(msgspec.Struct):
    """A line of the output, as far as a later run reads it."""

    custom_id: str


def check_input(source: Path, max_bytes: int) -> CheckedInput:
    """Count the lines, and check each of them."""
    seen: set[str] = set()
    faults: list[LineFault] = []
    total = 0
    with source.open("rb") as stream:
        for number, raw in raw_lines(stream, max_bytes):
            total += 1
            line = read_line(number, raw, max_bytes)
            if not isinstance(line, LineFault) and line.custom_id in seen:
                line = LineFault("duplicate_custom_id", "`custom_id` was used before", number)
            if isinstance(line, LineFault):
                faults.append(line)
                if len(faults) == MAX_FAULTS:
                    break
            else:
                seen.add(line.custom_id)
    return CheckedInput(total, faults)


def done_ids(target: Path) -> frozenset[str]:
    """The custom_ids that an earlier run has answered; cuts an unfinished last line off."""
    if not target.exists():
        return frozenset()
    with target.open("rb+") as stream:
        found, end = set(), 0
        for raw in stream:
            if not raw.endswith(b"\n"):
                break
            found.add(msgspec.json.decode(raw, type=_Written).custom_id)
            end += len(raw)
        stream.truncate(end)
    return frozenset(found)


def custom_id(line: str) -> str:
    """The id of a line that was checked."""
    return msgspec.json.decode(line, type=_Written).custom_id
