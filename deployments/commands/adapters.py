"""`loray adapters`: list, load, unload and pin adapters on every replica."""

import json
from collections.abc import Callable, Iterable, Sequence

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from deployments.commands.failing import fail
from deployments.commands.server import Json, Server, ServerRefused, adapter_path

_COLUMNS = ("id", "state", "rank", "MiB", "pinned", "running", "waiting", "requests")


def show(server: Server, as_json: bool) -> None:
    """Print all adapters that any replica knows."""
    listing = server.request("GET", "/v1/adapters")
    if as_json:
        typer.echo(json.dumps(listing, indent=2))
        return
    table = Table(*_COLUMNS, box=None, header_style="bold")
    for row in listing["data"]:
        table.add_row(*_cells(row))
    # Lines are not cut, so that users can copy them whole.
    Console(width=max(80, Console().width)).print(table)


def load(server: Server, names: Sequence[str], pin: bool, api_token: str | None) -> None:
    """Fetch and stage adapters on all replicas, one after the other."""

    def request(name: str) -> Json:
        return server.request(
            "POST", "/v1/adapters", {"id": name, "pin": pin, "api_token": api_token}
        )

    _each(names, "loading", request)


def unload(server: Server, names: Sequence[str]) -> None:
    """Unload adapters from all replicas when their requests have ended."""
    _each(names, "unloading", lambda name: server.request("DELETE", adapter_path(name)))


def pin(server: Server, names: Sequence[str], pinned: bool) -> None:
    """Pin adapters to the device, or unpin them."""
    doing = "pinning" if pinned else "unpinning"
    _each(
        names, doing, lambda name: server.request("PATCH", adapter_path(name), {"pinned": pinned})
    )


def _each(names: Sequence[str], doing: str, request: Callable[[str], Json]) -> None:
    """Send a request for each name and print its result; typer.Exit 1 if any was refused."""
    refused = []
    for name in _progress(names, doing):
        try:
            _print_row(request(name))
        except ServerRefused:  # The server's message is on stderr already.
            refused.append(name)
    if refused:
        fail(f"{len(refused)} of {len(names)} were refused: {', '.join(refused)}")


def _progress(names: Sequence[str], doing: str) -> Iterable[str]:
    """A progress bar on a terminal; on stderr, for stdout has the results."""
    console = Console(stderr=True)
    return track(names, doing, console=console, transient=True, disable=not console.is_terminal)


def _print_row(row: Json) -> None:
    replicas = row["replicas"].values()
    draining = " (until its requests end)" if any(one["draining"] for one in replicas) else ""
    pinned = ", pinned" if row["pinned"] else ""
    where = "1 replica" if len(replicas) == 1 else f"{len(replicas)} replicas"
    typer.echo(f"{row['id']}: {row['state']}{pinned} on {where}{draining}")


def _cells(row: Json) -> list[str]:
    replicas = row["replicas"].values()
    running, waiting = (sum(one[field] for one in replicas) for field in ("running", "waiting"))
    return [
        row["id"],
        row["state"],
        "" if row["rank"] is None else str(row["rank"]),
        f"{row['bytes'] / 2**20:.1f}",
        "yes" if row["pinned"] else "",
        str(running),
        str(waiting),
        str(row["num_requests"]),
    ]
