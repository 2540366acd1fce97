"""`loray serve`: starts a local Ray cluster, deploys the app, and ends both."""

import asyncio
import io
import json
import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from http import HTTPStatus
from itertools import dropwhile
from pathlib import Path
from threading import Event
from typing import Any

import typer
import yaml
from rich.console import Console

from configs.adapters import PushConfig
from configs.env import export_throughput_mode, front_limits, front_ports, proxy_mode, secret
from configs.serve import ServeConfig
from deployments.commands.check_config import applications, config_faults, engines, read_config
from deployments.commands.cluster import (
    LOGS,
    ClusterLost,
    Leaving,
    end_without,
    exit_if_lost,
    give_up_after,
    ray_servers,
    require_alive,
    start_ray,
)
from deployments.commands.failing import fail
from deployments.commands.resources import demands, lacks
from deployments.commands.start_lines import StartLines
from deployments.ports import Port, conflicts
from sources.pushed import PushedFiles

_POLL_SECONDS = 0.5
_READY_SECONDS = 300.0
"""How long a start may take beside that of the ranks."""

_PORT_SECONDS = 10.0
_FRONT_SECONDS = 300.0
_REPLY_SECONDS = 10.0
_ENDING_SECONDS = 120.0
_TICK_SECONDS = 0.1
_BEGAN = time.monotonic()
_NO_TLS = "serves no TLS: remove it, and put a proxy that does before this server"


def serve_config(config: dict[str, Any], title: str, dashboard: bool, drain_seconds: float) -> None:
    """Write the config to a temporary file and serve that."""
    with tempfile.TemporaryDirectory(prefix="loray-") as folder:
        path = Path(folder) / "serve_config.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        serve_file(path, title, dashboard, drain_seconds)


def serve_file(path: Path, title: str, dashboard: bool, drain_seconds: float) -> None:
    """Start Ray here and serve a Serve config until Ctrl-C or SIGTERM.

    drain_seconds: how long running requests may continue after SIGTERM. typer.Exit 1 if the app
    does not start, or if the cluster ends by itself.
    """
    config = _checked(path, title)
    _free_pushes(config)  # Of a server that was killed.
    leaving = Leaving()

    import ray  # Ray reads the environment when it is imported, so not before the export.
    from ray import serve

    _log("starting Ray")
    try:
        context = start_ray(dashboard)
    except SystemExit:
        return  # By a signal: Ray has its own handlers while it starts, and ends what it began.
    leaving.listen()  # Ray has replaced the handlers by its own, which print a native stack.
    servers = ray_servers()
    address = context.address_info["gcs_address"]
    page = f"http://{context.dashboard_url}" if context.dashboard_url else "off"
    try:
        names = []
        lines = StartLines(Path(context.address_info["session_dir"]) / "logs")
        if not leaving.requested.is_set():
            _log(f"deploying {title}")
            _require_resources(config, ray.cluster_resources())
            _start_ranks_ahead(config)
            _deploy(path, address)
            if _wait_until_running(serve, config, leaving.requested, servers, lines):
                _announce(config, page, address, leaving.requested)
                while not leaving.requested.wait(_POLL_SECONDS):
                    require_alive(servers)
                names = [app.get("name", "default") for app in config["applications"]]
        give_up_after(_ENDING_SECONDS + (0.0 if leaving.hurried.is_set() else drain_seconds))
        ended = exit_if_lost(servers)
        asyncio.run(_leave(serve, names, drain_seconds, leaving.hurried))
        ended.set()
        ray.shutdown()
        _free_pushes(config)
    except ClusterLost as lost:
        typer.echo(f"loray: the Ray cluster of this command has ended: {lost}. {LOGS}", err=True)
        end_without(ray)
    if not leaving.requested.is_set():
        raise typer.Exit(1)


def _checked(path: Path, title: str) -> dict[str, Any]:
    """The file's config, with the environment exported; typer.Exit if it cannot be served."""
    if not path.is_file():
        fail(f"{path} is not a file: name a Serve config, or a model", status=2)
    config = read_config(path)
    export_throughput_mode()
    try:
        front_limits()
        front_ports()  # Serve's import would fail by it.
    except ValueError as error:
        fail(str(error), status=2)
    found = config_faults(config)
    if found:
        fail(f"{title} would be refused:\n  " + "\n  ".join(found), status=2)
    _require_secrets(config)
    http = config.get("http_options") or {}
    encrypted = [key for key in http if key.startswith("ssl_") and http[key]]
    if encrypted and front_ports() is not None:
        fail(f"http_options.{encrypted[0]}: HAProxy, the HTTP front here, {_NO_TLS}", status=2)
    _require_ports(http)
    return config


def _require_secrets(config: Mapping[str, Any]) -> None:
    """Fail if a key's variable is not set, as replicas have this process's environment."""
    if _has_environments(config):
        return
    for arguments in engines(config):
        api = ServeConfig.model_validate(arguments).api
        for key in (*api.keys, *([api.admin_key] if api.admin_key else ())):
            try:
                if key.env is not None:
                    secret(key.env)
            except ValueError as error:
                fail(str(error))


def _has_environments(config: Mapping[str, Any]) -> bool:
    """Whether an application or a deployment has an environment of its own."""
    apps = config["applications"]
    deployments = [one for app in apps for one in app.get("deployments") or ()]
    parts = [*apps, *(one.get("ray_actor_options") or {} for one in deployments)]
    return any(part.get("runtime_env") for part in parts)


def _free_pushes(config: Mapping[str, Any]) -> None:
    """Free the memory of pushed adapters that no process holds."""
    for app in config["applications"]:
        arguments = app.get("args", {})
        for base in arguments.get("models", {"": arguments}).values():
            adapters = base.get("engine", {}).get("adapters") or {}
            push = PushConfig.model_validate(adapters.get("push") or {})
            PushedFiles(push, push.max_bytes).clear()


def _require_resources(config: Mapping[str, Any], available: Mapping[str, float]) -> None:
    """Fail if Ray could never reserve what the replicas need: the app would wait without end."""
    from deployments.bundles import bundles

    apps = [app for _, app in applications(config)]
    try:
        found = list(lacks(demands(apps, bundles), available))
    except ValueError as error:
        fail(str(error))
    if found:
        fail("\n  ".join(found))


def _start_ranks_ahead(config: Mapping[str, Any]) -> None:
    """Have processes of ranks load what they need while Serve starts."""
    from deployments.bundles import bundles
    from deployments.rank.waiting import start_ahead

    if _has_environments(config):
        return  # A replica takes processes of its own environment alone.
    for arguments in engines(config):
        base = ServeConfig.model_validate(arguments)
        start_ahead(base.engine, bundles(base)[1:], base.observability.log_format)


def _deploy(config: Path, address: str) -> None:
    """Deploy as `serve run` does, which needs no dashboard; a process of its own starts later.

    typer.Exit 1 if Serve does not take the config; the reason is printed without a trace.
    """
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException
    from ray.serve.scripts import run

    arguments = ["--non-blocking", "--address", address, str(config)]
    errors = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(errors):
            run.main(arguments, standalone_mode=False)
    except (SystemExit, ValueError, RuntimeError, OSError, RayError, RayServeException) as error:
        # Serve's command prints the trace of an error, and exits while it handles that error.
        cause = error.__context__ if isinstance(error, SystemExit) else error
        reason = last_error(str(cause))
        fail(f"Serve did not take the config: {type(cause).__name__}: {reason}. {LOGS}")
    print(errors.getvalue(), file=sys.stderr, end="")


async def _leave(serve: Any, names: Sequence[str], seconds: float, hurried: Event) -> None:
    """Drain these apps, then end Serve; on one event loop, as Serve's handles need."""
    if names:
        await _drain(serve, names, seconds, hurried)
    _log("shutting down")
    await serve.shutdown_async()


async def _drain(serve: Any, names: Sequence[str], seconds: float, hurried: Event) -> None:
    """Have every ingress replica end its requests, after `seconds` or at once if hurried."""
    if not hurried.is_set():
        _log(f"no new requests; those that run have {seconds:g} s (Ctrl-C: none)")
    seconds = 0.0 if hurried.is_set() else seconds
    drains = [asyncio.ensure_future(_drain_one(serve, name, seconds)) for name in names]
    while not hurried.is_set() and not all(each.done() for each in drains):
        await asyncio.wait(drains, timeout=_TICK_SECONDS)
    if hurried.is_set() and seconds:
        await asyncio.gather(*(_drain_one(serve, name, 0.0) for name in names))


async def _drain_one(serve: Any, name: str, seconds: float) -> None:
    try:
        replies = serve.get_app_handle(name).broadcast("drain", seconds)
        await replies.results_async(timeout_s=seconds + _REPLY_SECONDS)
    except Exception as error:
        # Not fatal: the command ends the app next.
        _log(f"{name} was not drained: {type(error).__name__}")


def _require_ports(http: Mapping[str, Any]) -> None:
    """Fail if a port is in use, before anything is started; typer.Exit 1."""
    host = str(http.get("host") or "")
    ports = [Port(host, int(http.get("port", 8000)), "http_options.port in the yaml (or --port)")]
    front = front_ports()
    if front is not None:
        ports += [
            Port(host, front.fallback, "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"),
            Port("", front.statistics, "RAY_SERVE_HAPROXY_STATS_PORT"),
            Port("", front.metrics, "RAY_SERVE_HAPROXY_METRICS_PORT"),
        ]
    deadline, printed = time.monotonic() + _PORT_SECONDS, False
    while taken := conflicts(ports):
        if time.monotonic() > deadline or not any(" is in use" in fault for fault in taken):
            fail("\n  ".join(taken))
        if not printed:
            _log(
                f"{taken[0]}; waiting {_PORT_SECONDS:g} s, as a server that ended may still hold it"
            )
            printed = True
        time.sleep(_POLL_SECONDS)


def _wait_until_running(
    serve: Any,
    config: Mapping[str, Any],
    leaving: Event,
    servers: Mapping[int, str],
    lines: StartLines,
) -> bool:
    """Print each change of status, and lines; False if an app failed or the user ends it."""
    printed: dict[str, str] = {}
    bases = [ServeConfig.model_validate(each) for each in engines(config)]
    limit = _READY_SECONDS + max(each.engine.recovery.start_timeout_s for each in bases)
    deadline = time.monotonic() + limit
    # A spinner while weights are read; rich shows it on terminals only.
    with Console(stderr=True).status("starting", spinner="line"):
        while not leaving.wait(_POLL_SECONDS) and time.monotonic() < deadline:
            require_alive(servers)
            for line in lines.new():
                _log(line)
            apps = serve.status().applications
            for title, app in apps.items():
                _print_change(title, app, printed)
                if app.status.value in ("DEPLOY_FAILED", "UNHEALTHY"):
                    print(last_error(app.message), file=sys.stderr)
                    for name, part in app.deployments.items():
                        if part.message:
                            print(f"{name}: {last_error(part.message)}", file=sys.stderr)
                    return False
            if apps and all(app.status.value == "RUNNING" for app in apps.values()):
                return True
    if not leaving.is_set():
        typer.echo(
            f"loray: not all applications run after {limit:g} s: if they only need longer, raise "
            f"engine.recovery.start_timeout_s. {LOGS}",
            err=True,
        )
    return False


def last_error(message: str) -> str:
    """The last error in Serve's message of a failed deployment, without its traceback."""
    lines = message.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    if not frames:
        return message
    # A frame's own line is followed by its source, indented further.
    rest = lines[frames[-1] + 1 :]
    return "\n".join(dropwhile(lambda line: line.startswith("    "), rest)) or message


def _print_change(title: str, app: Any, printed: dict[str, str]) -> None:
    parts = [f"{name} {part.status.value}" for name, part in app.deployments.items()]
    line = ", ".join([app.status.value, *parts]).lower()
    if line != printed.get(title):
        printed[title] = line
        _log(line if len(printed) == 1 else f"{title}: {line}")


def _announce(config: dict[str, Any], dashboard: str, address: str, leaving: Event) -> None:
    """Print each app's URL and start-up info, the dashboard and an example request."""
    options = config.get("http_options", {})
    host = options.get("host", "127.0.0.1")
    server = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{options.get('port', 8000)}"
    urls = [f"{server}{app.get('route_prefix', '/')}".rstrip("/") for app in config["applications"]]
    infos = {url: _fetch_info(url, leaving) for url in urls}
    if leaving.is_set():
        return
    for url, info in infos.items():
        print(f"\nLoRay serves {info.get('model_id', 'a model')} on {url}")
        _print_table(info.get("chosen", {"chosen": "see GET /info, with a key"}))
    if len(urls) > 1:
        print("\nall of them")
    _print_table({"http front": proxy_mode(), "ray dashboard": dashboard, "ray address": address})
    body = {"inputs": "What is the capital of France?", "parameters": _example(infos[urls[0]])}
    print(f"\nTry:\n  curl {urls[0]}/generate -H 'content-type: application/json' \\")
    print(f"    -d '{json.dumps(body)}'\n\nCtrl-C ends it.", flush=True)


def _example(info: dict[str, Any]) -> dict[str, str]:
    """Parameters of a request over a known adapter: the demo's pirate, or the first."""
    names = [adapter["id"] for adapter in info.get("adapters", [])]
    name = "pirate" if "pirate" in names else next(iter(names), None)
    return {} if name is None else {"adapter_id": name}


def _print_table(rows: dict[str, str]) -> None:
    for title, value in rows.items():
        print(f"  {title:14} {value}")


def _fetch_info(url: str, leaving: Event) -> dict[str, Any]:
    """GET /info, once the HTTP front is up; {} if the user ends the command."""
    deadline = time.monotonic() + _FRONT_SECONDS
    reason, last = "", "no connection"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/info", timeout=5) as answer:
                info: dict[str, Any] = json.load(answer)
                return info
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.UNAUTHORIZED:
                return {}
            said, last = _refusal(error), f"HTTP {error.code}"
            if said and said != reason:
                reason = said
                _log(f"not ready: {reason}")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        if leaving.wait(_POLL_SECONDS):
            return {}
    fail(f"the app runs, but {url}/info does not answer: {reason or last}")


def _refusal(error: urllib.error.HTTPError) -> str:
    """What LoRay says in an error; "" for one of the HTTP front."""
    try:
        return str(json.load(error)["error"])
    except (ValueError, LookupError, TypeError, OSError):
        return ""


def _log(line: str) -> None:
    """Print a line with the seconds since the command began."""
    print(f"[loray {os.getpid()}] {time.monotonic() - _BEGAN:5.1f} s  {line}", flush=True)
