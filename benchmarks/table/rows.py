"""The results file: one line of JSON a case, each with all that says how it came about."""

import json
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from configs.env import visible_gpus

Row = dict[str, Any]

OURS, PEER = "ours", "peer"
PACKAGES = ("loray", "torch", "triton", "flashinfer-python", "flash-attn", "ray", "transformers")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_COLUMNS = "index,name,memory.used,memory.total,driver_version"


class ResultsError(ValueError):
    """A results file that is none; the message says where."""


@dataclass(frozen=True)
class Gpu:
    """What nvidia-smi says of one GPU."""

    index: int
    name: str
    used_mib: int
    total_mib: int
    driver: str


def gpus() -> list[Gpu]:
    """The GPUs that processes started here see; none where nvidia-smi is not or finds none."""
    visible = visible_gpus()
    if shutil.which("nvidia-smi") is None or visible == "":
        return []
    command = ["nvidia-smi", f"--query-gpu={_COLUMNS}", "--format=csv,noheader,nounits"]
    if visible is not None:
        command.append(f"--id={visible}")
    reply = subprocess.run(command, capture_output=True, text=True, check=False)
    if reply.returncode:
        return []
    return read_gpus(reply.stdout)


def read_gpus(text: str) -> list[Gpu]:
    """nvidia-smi's lines: index, name, MiB used, MiB in all, driver."""
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line]
    return [Gpu(int(i), name, int(used), int(all_), by) for i, name, used, all_, by in rows]


def machine() -> Row:
    """This machine, its driver and the versions of what is measured.

    boot: changes with each start of the machine, so rows that share it come from one lease.
    """
    found = gpus()
    return {
        "boot": _BOOT.read_text()[:8] if _BOOT.is_file() else platform.node(),
        "gpus": [gpu.name for gpu in found],
        "driver": found[0].driver if found else None,
        "cpus": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: at for name in PACKAGES if (at := _version(name))},
    }


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class Results:
    """A file that is appended to as cases end, so that what was measured stays."""

    def __init__(self, path: Path) -> None:
        """Read what is there; the file is made with its first row."""
        self.path = path
        self.rows = read_rows([path]) if path.exists() else []

    def append(self, row: Row) -> None:
        """Write a row at once."""
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def has(self, key: tuple[str, str, str], setup: str) -> bool:
        """Whether this group's case was measured on this side, in this setup, without an error."""
        good = [row for row in self.rows if row["setup"] == setup and is_good(row)]
        return any(key_of(row) == key for row in good)


def key_of(row: Row) -> tuple[str, str, str]:
    """A row's group, side and case."""
    return row["group"], row["side"], row["case"]


def is_good(row: Row) -> bool:
    """Whether every request of the case was answered."""
    return not row.get("errors") and not row.get("failure")


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """All rows of these files; ResultsError for a line that is no row.

    A last line that was cut off, as when the machine went away, is left out.
    """
    rows = []
    for path in paths:
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                key_of(row)
            except (ValueError, KeyError, TypeError) as fault:
                if number == len(lines):
                    continue
                raise ResultsError(
                    f"{path}, line {number} is no row of this table ({fault}): name a file that "
                    "`python -m benchmarks.table --out FILE` wrote"
                ) from fault
            rows.append(row)
    return rows


def medians(rows: Sequence[Row]) -> Row:
    """One row of several of the same case: the last, with the median of every number.

    runs: how many there are.
    """
    merged = dict(rows[-1])
    for name, value in rows[-1].items():
        values = [row[name] for row in rows if _is_number(row.get(name))]
        if _is_number(value) and values:
            merged[name] = statistics.median(values)
    return merged | {"runs": len(rows)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
