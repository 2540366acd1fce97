"""How much each caller may have downloaded, on a clock that goes on by hand."""

from pathlib import Path

import pytest

from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal, AdapterSource
from sources.adapters import AdapterSources
from sources.budget import DownloadBudget
from tests.clocks import Clock
from tests.hub_server import HubServer
from tests.sources.adapter_files import adapter_files, left_over, sources

HOUR_S = 3600.0


def test_an_hours_worth_at_once_and_then_as_it_refills() -> None:
    clock = Clock()
    budget = DownloadBudget(3600, clock)
    assert budget.charge("a", 3000) == 0
    assert budget.charge("a", 1600) == 0, "begun while any are left: 1000 bytes of debt"
    assert budget.charge("a", 1) == pytest.approx(1000)
    assert budget.charge("b", 3600) == 0, "another's are its own"
    clock.now += 999
    assert budget.charge("a", 1) == 1
    clock.now += 2
    assert budget.charge("a", 1) == 0
    clock.now += 100 * HOUR_S
    assert budget.charge("a", 3601) == 0
    assert budget.charge("a", 1) > 0, "no more than an hour's worth is kept"


def hub_adapter(name: str) -> AdapterReference:
    return AdapterReference(AdapterSource.HUB, f"acme/{name}")


def bring(store: AdapterSources, name: str, payer: str | None) -> None:
    """Look and bring, and hold nothing."""
    found = store.resolve(hub_adapter(name), False)
    store.release(store.fetch(found, False, payer))


def test_downloads_are_charged_to_their_caller(tmp_path: Path) -> None:
    with HubServer() as hub:
        for value, name in enumerate(("sql", "code", "more")):
            hub.add(f"acme/{name}", adapter_files(float(value)))
        store = sources(tmp_path, {"download_bytes_per_hour": 1}, hub_endpoint=hub.url)
        bring(store, "sql", "team-a")
        with pytest.raises(AdapterError, match=r"bytes an hour .* are used up: try") as raised:
            bring(store, "code", "team-a")
        assert raised.value.refusal is AdapterRefusal.QUOTA
        assert len(hub.downloads()) == 2, "both files of the first, none of the second"
        bring(store, "sql", "team-a")
        bring(store, "code", "")
        bring(store, "code", "team-a")
        bring(store, "more", None)
        assert len(hub.downloads()) == 6, "cached files are not downloaded"
        assert not left_over(tmp_path)


def test_a_hub_that_clients_may_not_download_from(tmp_path: Path) -> None:
    with HubServer() as hub:
        hub.add("acme/sql", adapter_files())
        store = sources(tmp_path, {"hub_on_demand": False}, hub_endpoint=hub.url)
        with pytest.raises(AdapterError, match=r"hub_on_demand\): ask its operator") as raised:
            bring(store, "sql", "")
        assert raised.value.refusal is AdapterRefusal.DENIED
        assert not hub.downloads()
        bring(store, "sql", None)
        bring(store, "sql", "")
