"""docs/grafana/loray.json asks for nothing that is not exported, and forgets nothing."""

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

from deployments.observability import adapter_metrics, metrics

DASHBOARD = Path("docs/grafana/loray.json")
EVERYWHERE = {"application", "deployment", "replica"}
"""Labels that Serve gives to every metric."""

SUFFIXES = {
    "Gauge": ("",),
    "Counter": ("_total",),
    "Histogram": ("_bucket", "_sum", "_count"),
}
"""What Ray's endpoint makes of a name; each begins with "ray_"."""


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Every series by the name that Prometheus has it under: its labels."""
    known: dict[str, set[str]] = {}

    class Definition:
        """Takes a metric's definition instead of registering it."""

        kind: ClassVar[str]

        def __init__(self, name: str, text: str, **options: Any) -> None:
            own = EVERYWHERE | set(options.get("tag_keys", ()))
            for suffix in SUFFIXES[self.kind]:
                bounded = {"le"} if suffix == "_bucket" else set()
                known[f"ray_{name}{suffix}"] = own | bounded

    with pytest.MonkeyPatch.context() as patch:
        for kind in SUFFIXES:
            for module in (metrics, adapter_metrics):
                patch.setattr(module, kind, type(kind, (Definition,), {"kind": kind}))
        metrics.EngineMetrics()
        adapter_metrics.AdapterMetrics()
    return known


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def queries() -> list[str]:
    targets = [t["expr"] for panel in dashboard()["panels"] for t in panel.get("targets", ())]
    variables = [v["query"]["query"] for v in dashboard()["templating"]["list"] if "refresh" in v]
    return targets + variables


def series(query: str) -> list[tuple[str, set[str]]]:
    """Each metric of a query, with the labels that it is selected by."""
    found = re.findall(r"(ray_\w+)(?:\{([^}]*)\})?", query)
    return [
        (name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selected))) for name, selected in found
    ]


def grouped(query: str) -> set[str]:
    """The labels that a query keeps, and those that it asks a variable's values of."""
    by = re.findall(r"by \(([^)]*)\)", query) + re.findall(r"label_values\([^,]*,([^)]*)\)", query)
    return {label.strip() for labels in by for label in labels.split(",")}


def test_every_query_uses_exported_metrics(exported: dict[str, set[str]]) -> None:
    assert len(queries()) > 30
    for query in queries():
        assert series(query), query
        for name, selected in series(query):
            assert name in exported, query
            assert selected | grouped(query) <= exported[name], query


def test_every_legend_names_a_label_that_is_kept() -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert labels <= grouped(target["expr"]), panel["title"]


def test_every_metric_is_shown(exported: dict[str, set[str]]) -> None:
    shown = {name for query in queries() for name, _ in series(query)}
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    # How many blocks the prefix cache can find says nothing by itself.
    rest = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported} - stems
    assert rest == {"ray_loray_prefix_cache_blocks"}


def test_lora_has_a_row_of_its_own() -> None:
    panels = dashboard()["panels"]
    [begin] = [i for i, panel in enumerate(panels) if panel["title"] == "LoRA"]
    assert panels[begin]["type"] == "row"
    below = [t["expr"] for panel in panels[begin + 1 :] for t in panel["targets"]]
    assert all("ray_loray_adapter" in query for query in below)
    assert sum("by (adapter)" in query or "le, adapter" in query for query in below) >= 6


def test_panels_have_unique_ids_and_positions() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        box = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(box["x"], box["x"] + box["w"])
            for y in range(box["y"], box["y"] + box["h"])
        }
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells), panel["title"]
        taken |= cells
