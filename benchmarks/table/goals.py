"""Whether figures are met: rows gathered by case, against the peer, the limit, and each other."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from benchmarks.serving import Case
from benchmarks.stored import STORED
from benchmarks.table.figures import (
    CHIPS,
    FIGURES,
    IN_TIME,
    PEER,
    QUOTED_SHAPE,
    UNITS,
    Figure,
    Goal,
    is_better_low,
    limit,
)
from benchmarks.table.groups import FULL, RowGroup, groups
from benchmarks.table.rows import OURS, Row, is_good, key_of, medians
from benchmarks.workload import config_of

STANDARD = ("one-gpu", "two-gpus", "seventy-b")
"""Groups with a limit for their cases."""

SHARES = ("captured_share", "device_idle_share", "device_hits", "host_hits", "misses", IN_TIME)


@dataclass(frozen=True)
class Sheet:
    """All rows, one for each case of a side: medians where a case was played more than once."""

    rows: Mapping[tuple[str, str, str], Row]

    def row(self, group: str, case: str, side: str = OURS) -> Row | None:
        """A case's row; None if it was not measured."""
        return self.rows.get((group, side, case))

    def value(self, group: str, case: str, metric: str, side: str = OURS) -> float | None:
        """One figure of a case, None if there is none."""
        row = self.row(group, case, side)
        found = row.get(metric) if row is not None else None
        return float(found) if found is not None else None


@dataclass(frozen=True)
class PeerValue:
    """The peer's figure: measured beside ours, or quoted; low and high where it was twice."""

    low: float
    high: float
    is_quoted: bool


@dataclass(frozen=True)
class GoalVerdict:
    """Whether a goal is met; None: it cannot be judged, and why."""

    case: str
    words: str
    is_met: bool | None
    note: str = ""


def sheet_of(rows: Iterable[Row]) -> Sheet:
    """Gather the good rows of each case."""
    gathered: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if is_good(row) and not row["case"].startswith("("):
            gathered.setdefault(key_of(row), []).append(row)
    return Sheet({key: medians(found) for key, found in gathered.items()})


def why_not(row: Row) -> str:
    """Why a row of ours does not count; empty if it does."""
    server = row.get("server", {})
    if row["device"] != "cuda":
        return "on a CPU"
    if row["case"] == "weights":
        return ""
    if server.get("attention", "").startswith("sdpa"):
        return "attention through SDPA"
    if not server.get("http front", "").startswith("haproxy"):
        return "through the Python proxy"
    if row["case"] not in ("first", "warm") and not row.get("captured_share"):
        return "no captured steps"
    return ""


def peer_value(sheet: Sheet, group: str, case: str, metric: str) -> PeerValue | None:
    """The peer's figure in these rows, else the one that was measured elsewhere."""
    own = sheet.value(group, case, metric, PEER)
    if own is not None:
        return PeerValue(own, own, False)
    figure = FIGURES.get((group, case))
    if figure is None or figure.metric != metric or not figure.quoted:
        return None
    ours = sheet.row(group, case)
    shape = groups(FULL)[group].shape or QUOTED_SHAPE
    if ours is not None and not (_is_standard(ours) and ours["shape"] == shape):
        return None
    return PeerValue(min(figure.quoted), max(figure.quoted), True)


def verdicts_of(sheet: Sheet, group: str) -> list[GoalVerdict]:
    """What is to be said of every goal of a group's measured cases."""
    found = []
    for (of_group, case), figure in FIGURES.items():
        if of_group == group and sheet.row(group, case) is not None:
            found += [_verdict(sheet, (group, case), figure, goal) for goal in figure.goals]
    return found


def _verdict(sheet: Sheet, key: tuple[str, str], figure: Figure, goal: Goal) -> GoalVerdict:
    metric = goal.metric or figure.metric
    row, value = sheet.row(*key), sheet.value(*key, metric)
    sign = "≤" if is_better_low(metric) else "≥"
    label, bound = f"{key[0]}/{key[1]}", _bound(sheet, key[0], key[1], goal, metric)
    words = f"{UNITS[metric]} {sign} {_words(goal)}"
    assert row is not None
    if value is None or bound is None:
        return GoalVerdict(label, words, None, "not measured: " + (goal.of or metric))
    reason = why_not(row)
    if reason:
        return GoalVerdict(label, words, None, reason)
    met = value <= bound if is_better_low(metric) else value >= bound
    shown = f"{number(metric, value)} against {number(metric, bound)}"
    by = "" if met else f", missed by {abs(value / bound - 1):.1%}"
    return GoalVerdict(label, words, met, shown + by)


def _words(goal: Goal) -> str:
    if not goal.of:
        return f"{goal.factor:g}"
    plus = " and one step" if goal.plus else ""
    return f"{goal.factor:g} x {goal.of}{plus}" if goal.factor != 1 else f"{goal.of}{plus}"


def _bound(sheet: Sheet, group: str, case: str, goal: Goal, metric: str) -> float | None:
    if not goal.of:
        return goal.factor
    if goal.of == PEER:
        peer = peer_value(sheet, group, case, metric)
        if peer is None:
            return None
        return goal.factor * (peer.low if is_better_low(metric) else peer.high)
    other = (group, goal.of) if "/" not in goal.of else tuple(goal.of.split("/"))
    value = sheet.value(other[0], other[1], metric)
    plus = sheet.value(other[0], other[1], goal.plus) if goal.plus else 0.0
    return None if value is None or plus is None else goal.factor * value + plus


def _is_standard(row: Row) -> bool:
    """Whether quoted figures and limits are about such a row."""
    names = set(row["machine"]["gpus"])
    is_shape = row["dtype"] == "bfloat16" and row["shape"] != "tiny" and not _is_quantised(row)
    return is_shape and row["device"] == "cuda" and bool(names) and names <= set(CHIPS)


def _is_quantised(row: Row) -> bool:
    words = row["setup"].split(", ")
    return any(word in STORED or word.startswith("engine.model.quantize=") for word in words)


def limit_of(row: Row, group: RowGroup, metric: str) -> float | None:
    """What the machine allows, in the metric's unit; None where that is not known."""
    [what] = [play.what for play in group.plays if play.name == row["case"]]
    if group.name not in STANDARD or not isinstance(what, Case) or not _is_standard(row):
        return None
    if "kv_lora_rank" in config_of(row["shape"]):
        return None  # Latents, and experts beside a dense layer: not counted.
    chip = CHIPS[row["machine"]["gpus"][0]]
    return limit(what, chip, row["shape"], group.gpus).get(metric)


def gain(metric: str, ours: float, other: float) -> float:
    """How much better ours is: above 1 whatever the metric's direction."""
    return other / ours if is_better_low(metric) else ours / other


def number(metric: str, value: float | None) -> str:
    """A figure as people read it; empty for None."""
    if value is None:
        return ""
    if metric in SHARES:
        return f"{value:.1%}"
    if isinstance(value, float) and abs(value) < 100:
        return f"{value:.2f}"
    return f"{value:,.0f}"
