"""The table as a picture: tokens a second and milliseconds a token, ours, the peer's, the limit."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.table.figures import FIGURES, RATE, TPOT
from benchmarks.table.goals import Sheet, limit_of, number, peer_value, sheet_of
from benchmarks.table.groups import FULL, groups
from benchmarks.table.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEIGHT, GAP = 0.38, 0.2
TITLES = {TPOT: "ms a token (less is better)", RATE: "output tokens/s (more is better)"}


class NothingToDraw(ValueError):
    """No row has a figure that the chart shows."""


def draw(rows: Sequence[Row], file: Path) -> None:
    """Write a PNG; a panel for each of the two units. Needs matplotlib."""
    from matplotlib.figure import Figure

    sheet = sheet_of(rows)
    panels = {metric: found for metric in TITLES if (found := _cases(sheet, metric))}
    if not panels:
        raise NothingToDraw("no case here is measured in tokens/s or milliseconds a token")
    heights = [len(cases) + 1 for cases in panels.values()]
    figure = Figure(figsize=(9, 1 + 0.45 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (metric, cases) in zip(axes, panels.items(), strict=True):
        _panel(panel, sheet, metric, cases)
    figure.savefig(file, dpi=120)


def _cases(sheet: Sheet, metric: str) -> list[tuple[str, str]]:
    return [key for key, figure in FIGURES.items() if figure.metric == metric and sheet.row(*key)]


def _panel(axes: "Axes", sheet: Sheet, metric: str, cases: Sequence[tuple[str, str]]) -> None:
    known = groups(FULL)
    heights = list(range(len(cases)))
    ours = [sheet.value(*key, metric) or 0.0 for key in cases]
    peers = [peer_value(sheet, *key, metric) for key in cases]
    bars = axes.barh([p - GAP for p in heights], ours, HEIGHT, color="tab:blue", label="LoRay")
    labels = [number(metric, value) for value in ours]
    axes.bar_label(bars, labels, padding=3, fontsize="x-small")
    widths = [(peer.low + peer.high) / 2 if peer else 0.0 for peer in peers]
    axes.barh([p + GAP for p in heights], widths, HEIGHT, color="lightgrey", label="peer")
    limits = [
        (height, bound)
        for height, key in zip(heights, cases, strict=True)
        if (row := sheet.row(*key)) and (bound := limit_of(row, known[key[0]], metric))
    ]
    if limits:
        axes.plot([x for _, x in limits], [p for p, _ in limits], "k|", ms=18, label="limit")
    axes.set_yticks(heights, [f"{group}: {case}" for group, case in cases], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel(TITLES[metric])
    axes.legend(fontsize="x-small", markerscale=0.4)
