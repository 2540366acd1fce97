"""`loray serve`: a local Ray cluster with what LoRay recommends, the app, and a clean end."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from configs.env import export_throughput_mode, proxy_mode

_POLL_SECONDS = 0.5
_READY_SECONDS = 900.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="loray", description="Serve a base model and its LoRAs.")
    commands = parser.add_subparsers(required=True)
    serve = commands.add_parser("serve", help="start Ray here, serve a config until Ctrl-C")
    serve.add_argument("config", nargs="?", default="serve_config.yaml", type=Path)
    serve.add_argument("--no-dashboard", action="store_true", help="start Ray without its page")
    serve.set_defaults(run=_serve)
    parsed = parser.parse_args(arguments)
    status: int = parsed.run(parsed)
    return status


def _serve(parsed: argparse.Namespace) -> int:
    if not parsed.config.is_file():
        print(f"loray: {parsed.config} is not a file: name a Serve config", file=sys.stderr)
        return 2
    config = yaml.safe_load(parsed.config.read_text())
    export_throughput_mode()
    leaving = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: leaving.set())

    import ray  # Ray reads the environment when it is imported, so not before the export.
    from ray import serve

    _say("starting Ray")
    context = ray.init(
        namespace="serve", include_dashboard=not parsed.no_dashboard, logging_level="warning"
    )
    address = context.address_info["gcs_address"]
    dashboard = f"http://{context.dashboard_url}" if context.dashboard_url else "off"
    try:
        _say(f"deploying {parsed.config}")
        _deploy(parsed.config, address)
        if _wait_until_running(serve, leaving):
            _announce(config, dashboard, address)
            leaving.wait()
        status = 0 if leaving.is_set() else 1
    finally:
        _say("shutting down")
        serve.shutdown()
        ray.shutdown()
    return status


def _deploy(config: Path, address: str) -> None:
    """Hand the config to Serve's own command, which needs no dashboard for it."""
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking"]
    arguments = [*command, "--address", address, str(config)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"loray: the config was refused:\n{done.stderr}{done.stdout}")


def _wait_until_running(serve: Any, leaving: threading.Event) -> bool:
    """Print each change of status; False when an app failed or the user left."""
    told: dict[str, str] = {}
    deadline = time.monotonic() + _READY_SECONDS
    while not leaving.wait(_POLL_SECONDS) and time.monotonic() < deadline:
        apps = serve.status().applications
        for title, app in apps.items():
            parts = [f"{name} {part.status.value}" for name, part in app.deployments.items()]
            line = ", ".join([app.status.value, *parts]).lower()
            if line != told.get(title):
                told[title] = line
                _say(line if len(apps) == 1 else f"{title}: {line}")
            if app.status.value in ("DEPLOY_FAILED", "UNHEALTHY"):
                print(app.message, file=sys.stderr)
                return False
        if apps and all(app.status.value == "RUNNING" for app in apps.values()):
            return True
    return False


def _announce(config: dict[str, Any], dashboard: str, address: str) -> None:
    """Each app's URL and what was chosen for it, the dashboard, a line to try."""
    options = config.get("http_options", {})
    server = f"http://{options.get('host', '127.0.0.1')}:{options.get('port', 8000)}"
    urls = [f"{server}{app.get('route_prefix', '/')}".rstrip("/") for app in config["applications"]]
    for url in urls:
        info = _fetch_info(url)
        print(f"\nLoRay serves {info.get('model_id')} on {url}")
        _tell(info.get("chosen", {}))
    if len(urls) > 1:
        print("\nall of them")
    _tell({"http front": proxy_mode(), "ray dashboard": dashboard, "ray address": address})
    body = {"inputs": "What is the capital of France?", "parameters": {"adapter_id": "pirate"}}
    print(f"\nTry:\n  curl {urls[0]}/generate -H 'content-type: application/json' \\")
    print(f"    -d '{json.dumps(body)}'\n\nCtrl-C ends it.", flush=True)


def _tell(choices: dict[str, str]) -> None:
    for what, choice in choices.items():
        print(f"  {what:14} {choice}")


def _fetch_info(url: str) -> dict[str, Any]:
    """Ask the app itself; its front may need a moment longer than the app."""
    for _ in range(60):
        try:
            with urllib.request.urlopen(f"{url}/info", timeout=5) as answer:
                info: dict[str, Any] = json.load(answer)
                return info
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(_POLL_SECONDS)
    raise SystemExit(f"loray: the app runs, but {url}/info does not answer")


def _say(line: str) -> None:
    print(f"[loray {os.getpid()}] {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
