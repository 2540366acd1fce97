"""`loray serve`: a local Ray cluster with what LoRay recommends, the app, and a clean end."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from itertools import dropwhile
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console

from configs.env import export_throughput_mode, proxy_mode
from deployments.commands.failing import fail

_POLL_SECONDS = 0.5
_READY_SECONDS = 900.0
_FRONT_SECONDS = 300.0


def serve_config(config: dict[str, Any], title: str, dashboard: bool) -> None:
    """Serve a config that no file holds, as `serve_file` does one that has a file."""
    with tempfile.TemporaryDirectory(prefix="loray-") as folder:
        path = Path(folder) / "serve_config.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        serve_file(path, title, dashboard)


def serve_file(path: Path, title: str, dashboard: bool) -> None:
    """Start Ray here and serve a Serve config until Ctrl-C; typer.Exit 1 if it does not come up."""
    if not path.is_file():
        fail(f"{path} is not a file: name a Serve config, or a model", status=2)
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    export_throughput_mode()
    leaving = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: leaving.set())

    import ray  # Ray reads the environment when it is imported, so not before the export.
    from ray import serve

    _say("starting Ray")
    # A cluster of its own: another that runs here belongs to somebody, and is not ours to end.
    context = ray.init(
        "local", namespace="serve", include_dashboard=dashboard, logging_level="warning"
    )
    address = context.address_info["gcs_address"]
    page = f"http://{context.dashboard_url}" if context.dashboard_url else "off"
    try:
        _say(f"deploying {title}")
        _deploy(path, address)
        if _wait_until_running(serve, leaving):
            _announce(config, page, address, leaving)
            leaving.wait()
    finally:
        _say("shutting down")
        serve.shutdown()
        ray.shutdown()
    if not leaving.is_set():
        raise typer.Exit(1)


def _deploy(config: Path, address: str) -> None:
    """Hand the config to Serve's own command, which needs no dashboard for it."""
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking"]
    arguments = [*command, "--address", address, str(config)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"the config was refused:\n{done.stderr}{done.stdout}")


def _wait_until_running(serve: Any, leaving: threading.Event) -> bool:
    """Print each change of status; False when an app failed or the user left."""
    told: dict[str, str] = {}
    deadline = time.monotonic() + _READY_SECONDS
    # On a terminal alone: it turns while weights are read.
    with Console(stderr=True).status("starting", spinner="line"):
        while not leaving.wait(_POLL_SECONDS) and time.monotonic() < deadline:
            apps = serve.status().applications
            for title, app in apps.items():
                _tell_change(title, app, told)
                if app.status.value in ("DEPLOY_FAILED", "UNHEALTHY"):
                    print(app.message, file=sys.stderr)
                    for name, part in app.deployments.items():
                        if part.message:
                            print(f"{name}: {last_error(part.message)}", file=sys.stderr)
                    return False
            if apps and all(app.status.value == "RUNNING" for app in apps.values()):
                return True
    return False


def last_error(message: str) -> str:
    """What Serve tells of a failed deployment, less the calls that led to the last error."""
    lines = message.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    if not frames:
        return message
    # A frame's own line is followed by its source, indented further.
    rest = lines[frames[-1] + 1 :]
    return "\n".join(dropwhile(lambda line: line.startswith("    "), rest)) or message


def _tell_change(title: str, app: Any, told: dict[str, str]) -> None:
    parts = [f"{name} {part.status.value}" for name, part in app.deployments.items()]
    line = ", ".join([app.status.value, *parts]).lower()
    if line != told.get(title):
        told[title] = line
        _say(line if len(told) == 1 else f"{title}: {line}")


def _announce(
    config: dict[str, Any], dashboard: str, address: str, leaving: threading.Event
) -> None:
    """Each app's URL and what was chosen for it, the dashboard, a line to try."""
    options = config.get("http_options", {})
    host = options.get("host", "127.0.0.1")
    server = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{options.get('port', 8000)}"
    urls = [f"{server}{app.get('route_prefix', '/')}".rstrip("/") for app in config["applications"]]
    infos = {url: _fetch_info(url, leaving) for url in urls}
    for url, info in infos.items():
        print(f"\nLoRay serves {info.get('model_id', 'a model')} on {url}")
        _tell(info.get("chosen", {"chosen": "GET /info says it to those who have a key"}))
    if len(urls) > 1:
        print("\nall of them")
    _tell({"http front": proxy_mode(), "ray dashboard": dashboard, "ray address": address})
    body = {"inputs": "What is the capital of France?", "parameters": _example(infos[urls[0]])}
    print(f"\nTry:\n  curl {urls[0]}/generate -H 'content-type: application/json' \\")
    print(f"    -d '{json.dumps(body)}'\n\nCtrl-C ends it.", flush=True)


def _example(info: dict[str, Any]) -> dict[str, str]:
    """Parameters of a request over an adapter that is there: the demo's pirate, or the first."""
    names = [adapter["id"] for adapter in info.get("adapters", [])]
    chosen = "pirate" if "pirate" in names else next(iter(names), None)
    return {} if chosen is None else {"adapter_id": chosen}


def _tell(choices: dict[str, str]) -> None:
    for what, choice in choices.items():
        print(f"  {what:14} {choice}")


def _fetch_info(url: str, leaving: threading.Event) -> dict[str, Any]:
    """Ask the app itself, whose front may need longer than it; nothing when the user leaves."""
    deadline = time.monotonic() + _FRONT_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/info", timeout=5) as answer:
                info: dict[str, Any] = json.load(answer)
                return info
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.UNAUTHORIZED:
                return {}
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        if leaving.wait(_POLL_SECONDS):
            return {}
    fail(f"the app runs, but {url}/info does not answer")


def _say(line: str) -> None:
    print(f"[loray {os.getpid()}] {line}", flush=True)
