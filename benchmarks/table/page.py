"""The results as tables in Markdown: ours beside the peer's, the limit, and what must be met."""

from collections.abc import Mapping, Sequence

from benchmarks.table.figures import FIGURES, PEER, PEER_NAME, RATE, UNITS
from benchmarks.table.goals import (
    GoalVerdict,
    PeerValue,
    Sheet,
    gain,
    limit_of,
    number,
    peer_value,
    sheet_of,
    verdicts_of,
)
from benchmarks.table.groups import FULL, RowGroup, groups
from benchmarks.table.rows import OURS, Row, is_good

QUOTED = "\\*"
STAGES = ("fetch", "stage", "place")
DETAILS: Mapping[str, str] = {
    RATE: "tokens/s",
    "tpot_p50_ms": "TPOT p50 ms",
    "itl_p50_ms": "ITL p50 ms",
    "itl_p99_ms": "ITL p99 ms",
    "ttft_p50_ms": "TTFT p50 ms",
    "ttft_p99_ms": "TTFT p99 ms",
    "cached_prompt_tokens": "cached prompt tokens",
    "captured_share": "steps captured",
    "device_idle_share": "device idle",
    "driver_cores": "driver cores",
    "ingress_cores": "ingress cores",
    "rank_cores": "rank cores",
    "device_hits": "on the device",
    "host_hits": "in host memory",
    "misses": "neither",
    "filled_gb": "GB filled",
    **{f"{stage}_ms": f"a {stage}, ms" for stage in STAGES},
    "ready_s": "s to ready",
    "load_gb_per_s": "load GB/s",
    "read_gb_per_s": "page cache GB/s",
    "free_tokens_per_s": "tokens/s, none held",
    "held_tokens_per_s": "tokens/s, half held",
    "rate_per_s": "requests/s",
    "runs": "runs",
}
"""Columns of a group's second table, where a case has them."""

LINES = ("attention", "adapter kernel", "all-reduce", "http front", "pages", "adapter pages")


def page(rows: Sequence[Row]) -> str:
    """Everything that a results file says; setups that cannot be compared are separate."""
    setups = dict.fromkeys(row["setup"] for row in rows)
    return "\n\n".join(_setup(each, [r for r in rows if r["setup"] == each]) for each in setups)


def _setup(name: str, rows: Sequence[Row]) -> str:
    sheet = sheet_of(rows)
    known = [group for group in groups(FULL).values() if _cases(sheet, group)]
    parts = [f"# {name}", _heading(rows)]
    parts += [_group(sheet, group) for group in known]
    verdicts = [v for group in known for v in verdicts_of(sheet, group.name)]
    parts += [_goals(verdicts), _failures(rows)]
    return "\n\n".join(part for part in parts if part)


def line_of(row: Row) -> str:
    """A case in one line."""
    parts = []
    figure = FIGURES.get((row["group"], row["case"]))
    metrics = dict.fromkeys([*([figure.metric] if figure else []), RATE, *DETAILS])
    row = row | adapter_figures(row)
    for name in metrics:
        value = row.get(name)
        if value is not None:
            parts.append(f"{DETAILS.get(name, UNITS.get(name, name))} {number(name, value)}")
    if row.get("errors"):
        parts.append(f"{row['errors']} errors, the first: {row['first_error']}")
    return f"{row['case']:12} {', '.join(parts)}"


def _cases(sheet: Sheet, group: RowGroup) -> list[str]:
    names = [play.name for play in group.plays]
    return [n for n in names if sheet.row(group.name, n) or sheet.row(group.name, n, PEER)]


def _heading(rows: Sequence[Row]) -> str:
    machines = {row["machine"]["boot"]: row["machine"] for row in rows}
    lines = [f"Rows: {len(sheet_of(rows).rows)}, from {len(machines)} start(s) of a machine."]
    for boot, found in machines.items():
        names = ", ".join(f"{found['gpus'].count(n)} x {n}" for n in dict.fromkeys(found["gpus"]))
        driver = f", driver {found['driver']}" if found["driver"] else ""
        cuda = f", CUDA {found['cuda']}" if found["cuda"] else ""
        versions = ", ".join(f"{name} {at}" for name, at in found["versions"].items())
        own = [row for row in rows if row["machine"]["boot"] == boot]
        lines.append(
            f"{boot}: {names or 'no GPU'}{driver}, {found['cpus']} CPUs; Python "
            f"{found['python']}{cuda}, {versions}; {own[0]['at']} to {own[-1]['at']}."
        )
    if len(machines) > 1:
        lines.append("Ratios between rows of different starts carry a few per cent of doubt.")
    return "\n".join(lines)


def _group(sheet: Sheet, group: RowGroup) -> str:
    cases = _cases(sheet, group)
    parts = [f"## {group.name}: {group.about}"]
    said = _said(sheet, group, cases)
    if said:
        parts.append(said)
    parts.append(_table(_compared(sheet, group, cases)))
    if any(QUOTED in line for line in parts[-1].splitlines()):
        parts.append(f"{QUOTED} {PEER_NAME}, measured on another machine of this kind.")
    parts.append(_table(_detailed(sheet, group, cases)))
    return "\n\n".join(parts)


def _said(sheet: Sheet, group: RowGroup, cases: Sequence[str]) -> str:
    """What the servers said of themselves; several values where they differ."""
    rows = [row for case in cases if (row := sheet.row(group.name, case))]
    servers = [row["server"] for row in rows if row.get("server")]
    lines = []
    for name in LINES:
        values = dict.fromkeys(server[name] for server in servers if name in server)
        lines += [f"{name}: {' / '.join(values)}"] if values else []
    return f"{'; '.join(lines)}." if lines else ""


def _compared(sheet: Sheet, group: RowGroup, cases: Sequence[str]) -> list[list[str]]:
    head = ["case", "figure", "ours", "peer", "ours / peer", "limit", "of the limit", "goals"]
    table = [head]
    for case in cases:
        figure = FIGURES[group.name, case]
        metric = figure.metric
        ours, peer = (
            sheet.value(group.name, case, metric),
            peer_value(sheet, group.name, case, metric),
        )
        row = sheet.row(group.name, case)
        bound = limit_of(row, group, metric) if row is not None else None
        goals = [v for v in verdicts_of(sheet, group.name) if v.case.endswith(f"/{case}")]
        table.append(
            [
                case,
                UNITS[metric],
                number(metric, ours),
                _peer(metric, peer),
                _better(metric, ours, peer),
                number(metric, bound),
                f"{gain(metric, ours, bound):.0%}" if ours and bound else "",
                _outcome(goals),
            ]
        )
    return table


def _detailed(sheet: Sheet, group: RowGroup, cases: Sequence[str]) -> list[list[str]]:
    sides = [(case, side) for case in cases for side in (OURS, PEER)]
    rows = {
        case if side == OURS else f"{case}, peer": row | adapter_figures(row)
        for case, side in sides
        if (row := sheet.row(group.name, case, side))
    }
    known = dict.fromkeys(name for row in rows.values() for name in row)
    names = [name for name in DETAILS if name in known]
    if all(row["runs"] == 1 for row in rows.values()):
        names.remove("runs")
    if not group.weights and "ready_s" in names:
        names.remove("ready_s")
    table = [["case", *(DETAILS[name] for name in names)]]
    for label, row in rows.items():
        table.append([label, *(number(name, row.get(name)) for name in names)])
    return table


def adapter_figures(row: Row) -> Row:
    """What a case's adapters did: hits as shares, GB moved, milliseconds of a load by stage."""
    counts = row.get("adapters") or {}
    found: Row = {}
    kinds = ("device_hits", "host_hits", "misses")
    total = sum(counts.get(kind, 0) for kind in kinds)
    if total != counts.get("device_hits", 0):
        found |= {kind: counts.get(kind, 0) / total for kind in kinds}
        found["filled_gb"] = counts.get("fill_bytes", 0) / 1e9
        found |= {f"{stage}_ms": ms for stage, ms in (row.get("loads") or {}).items()}
    return found


def _outcome(verdicts: Sequence[GoalVerdict]) -> str:
    judged = [v for v in verdicts if v.is_met is not None]
    if not judged:
        return "not judged" if verdicts else ""
    met = sum(v.is_met is True for v in judged)
    words = f"{met} of {len(judged)} met"
    return words if met == len(judged) else f"**{words}**"


def _better(metric: str, ours: float | None, peer: PeerValue | None) -> str:
    if not ours or peer is None:
        return ""
    gains = sorted({round(gain(metric, ours, each), 2) for each in (peer.low, peer.high)})
    return "-".join(f"{gain:.2f}" for gain in gains)


def _peer(metric: str, peer: PeerValue | None) -> str:
    if peer is None:
        return ""
    numbers = dict.fromkeys(number(metric, each) for each in (peer.low, peer.high))
    return "-".join(numbers) + (QUOTED if peer.is_quoted else "")


def _goals(verdicts: Sequence[GoalVerdict]) -> str:
    if not verdicts:
        return ""
    met = [v for v in verdicts if v.is_met]
    lines = [f"## Goals: {len(met)} of {len(verdicts)} met"]
    table = [["case", "goal", "", "figures"]]
    words = {True: "met", False: "**missed**", None: "not judged"}
    table += [[v.case, v.words, words[v.is_met], v.note] for v in verdicts]
    return "\n\n".join([*lines, _table(table)])


def _failures(rows: Sequence[Row]) -> str:
    failed = [row for row in rows if not is_good(row)]
    left = [row for row in rows if row.get("processes_left") or row.get("gpu_mib_left")]
    lines = [f"- {row['group']}/{row['case']} ({row['side']}): {_fault(row)}" for row in failed]
    lines += [
        f"- {row['group']} ({row['side']}) left {row['processes_left']} processes and "
        f"{row['gpu_mib_left']} MiB on the GPUs"
        for row in left
    ]
    return "\n".join(["## What went wrong", "", *lines]) if lines else ""


def _fault(row: Row) -> str:
    if row.get("failure"):
        return str(row["failure"]).strip().splitlines()[-1]
    return f"{row['errors']} requests failed, the first: {row.get('first_error')}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
