"""What `loray serve` does while the app's front is not there yet."""

import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import typer
import yaml
from ray.exceptions import RayActorError

from deployments.commands.serve import _deploy, _fetch_info, _require_ports, last_error, serve_file


class Front(BaseHTTPRequestHandler):
    """Refuses with each status, then answers."""

    statuses: list[int]
    body: dict[str, str] = {"model_id": "tiny"}  # noqa: RUF012

    def do_GET(self) -> None:
        status = self.statuses.pop(0) if self.statuses else 200
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(self.body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("statuses", "reply"), [([503, 404], "tiny"), ([503, 401], None)])
def test_info_is_fetched_until_the_front_answers(
    monkeypatch: pytest.MonkeyPatch, statuses: list[int], reply: str | None
) -> None:
    monkeypatch.setattr("deployments.commands.serve._POLL_SECONDS", 0.001)
    with HTTPServer(("127.0.0.1", 0), type("Mine", (Front,), {"statuses": statuses})) as front:
        thread = threading.Thread(target=front.serve_forever, args=(0.05,))
        thread.start()
        info = _fetch_info(f"http://127.0.0.1:{front.server_port}", threading.Event())
        front.shutdown()
        thread.join()
    assert info.get("model_id") == reply
    assert statuses == []


def test_what_keeps_the_app_from_answering_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deployments.commands.serve._POLL_SECONDS", 0.001)
    statuses = [503] * 3
    kind = {"statuses": statuses, "body": {"error": "no tokenizer.json"}}
    with HTTPServer(("127.0.0.1", 0), type("Mine", (Front,), kind)) as front:
        thread = threading.Thread(target=front.serve_forever, args=(0.05,))
        thread.start()
        url = f"http://127.0.0.1:{front.server_port}"
        _fetch_info(url, threading.Event())
        assert capsys.readouterr().out.count("not ready: no tokenizer.json") == 1
        statuses += [503] * 10_000
        monkeypatch.setattr("deployments.commands.serve._FRONT_SECONDS", 0.2)
        with pytest.raises(typer.Exit):
            _fetch_info(url, threading.Event())
        assert "/info does not answer: no tokenizer.json" in capsys.readouterr().err
        front.shutdown()
        thread.join()


def test_ports_of_a_server_that_ends_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deployments.commands.serve._POLL_SECONDS", 0.001)
    monkeypatch.setattr("deployments.commands.serve.front_ports", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = {"host": "127.0.0.1", "port": listener.getsockname()[1]}

        def end(_: float) -> None:
            listener.close()

        monkeypatch.setattr("time.sleep", end)
        _require_ports(http)
    assert capsys.readouterr().out.count("s, as a server that ended may still hold it") == 1
    monkeypatch.setattr("deployments.commands.serve._PORT_SECONDS", 0.0)
    with socket.create_server(("127.0.0.1", http["port"])), pytest.raises(typer.Exit):
        _require_ports(http)
    assert f"port {http['port']} is in use by process" in capsys.readouterr().err


def test_a_start_frees_the_pushes_of_a_server_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pushed"
    (folder / "entries" / "version").mkdir(parents=True)
    config = yaml.safe_load(Path("serve_config.yaml").read_text())
    engine = config["applications"][0]["args"]["engine"]
    engine["adapters"]["push"] = {"folder": str(folder)}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr("deployments.commands.serve.export_throughput_mode", lambda: None)
    monkeypatch.setattr("deployments.commands.serve._require_ports", lambda http: None)

    def leave() -> None:
        raise typer.Exit(3)

    monkeypatch.setattr("deployments.commands.serve.Leaving", leave)
    with pytest.raises(typer.Exit):
        serve_file(tmp_path / "config.yaml", "", False, 0.0)
    assert not folder.exists()


def test_certificates_that_the_front_would_not_use_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load(Path("serve_config.yaml").read_text())
    config["http_options"] |= {"ssl_keyfile": "key.pem", "ssl_certfile": "certificate.pem"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr("deployments.commands.serve.export_throughput_mode", lambda: None)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    with pytest.raises(typer.Exit):
        serve_file(tmp_path / "config.yaml", "", False, 0.0)
    assert "http_options.ssl_" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["soon", "-1", "inf"])
@pytest.mark.parametrize(
    "name",
    [
        "LORAY_FRONT_HEADER_TIMEOUT_S",
        "LORAY_FRONT_CONNECTIONS_PER_ADDRESS",
        "RAY_SERVE_HAPROXY_STATS_PORT",
    ],
)
def test_variables_that_are_no_number_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    monkeypatch.setattr("deployments.commands.serve.export_throughput_mode", lambda: None)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    monkeypatch.setenv(name, value)
    with pytest.raises(typer.Exit):
        serve_file(Path("serve_config.yaml"), "", False, 0.0)
    said = capsys.readouterr().err
    assert f"the environment variable {name} must be" in said
    assert said.endswith(f"Given: {value}\n")


@pytest.mark.parametrize("environment", [False, True])
def test_a_key_in_a_variable_that_is_not_set_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: bool,
) -> None:
    config = yaml.safe_load(Path("serve_config.yaml").read_text())
    [application] = config["applications"]
    application["args"]["api"] = {"admin_key": {"env": "NO_SUCH_VARIABLE"}}
    if environment:  # It may have the variable.
        application["runtime_env"] = {"env_vars": {"NO_SUCH_VARIABLE": "key"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr("deployments.commands.serve.export_throughput_mode", lambda: None)

    def leave(http: object) -> None:
        raise typer.Exit(3)

    monkeypatch.setattr("deployments.commands.serve._require_ports", leave)
    with pytest.raises(typer.Exit) as ended:
        serve_file(tmp_path / "config.yaml", "", False, 0.0)
    assert ended.value.exit_code == (3 if environment else 1)
    assert ("NO_SUCH_VARIABLE, which is not set" in capsys.readouterr().err) is not environment


def test_ending_the_command_ends_the_wait_for_the_front() -> None:
    leaving = threading.Event()
    leaving.set()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        assert _fetch_info(f"http://127.0.0.1:{silent.getsockname()[1]}", leaving) == {}


@pytest.mark.parametrize(
    "error", ["ValueError: no such folder", "ModelError: lacks\n  a.weight\n\n  b.weight"]
)
def test_a_failed_deployment_prints_its_last_error(error: str) -> None:
    calls = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g(1)\n    ^^^\n'
    first = f"The deployment failed to start 2 times in a row. Error:\n{calls}"
    assert last_error(f"{first}RuntimeError: {calls}{error}") == error


def test_a_failure_without_a_traceback_is_printed_whole() -> None:
    assert last_error("no node has 8 GPUs") == "no node has 8 GPUs"


class Client:
    """Serve's client, whose controller refuses every config."""

    def deploy_apps(self, *_: object, **__: object) -> None:
        raise ValueError("two applications have\n  one name")


def no_client(**_: object) -> None:
    raise RayActorError(error_msg="the controller died")


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (lambda **_: Client(), "ValueError: two applications have\n  one name. See"),
        (no_client, "RayActorError: the controller died. See"),
    ],
)
def test_a_config_that_serve_does_not_take_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    start: Callable[..., Client | None],
    reason: str,
) -> None:
    """Serve's command prints the trace of some errors and raises others."""
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.serve.scripts._private_api.serve_start", start)
    monkeypatch.setattr("ray.serve.shutdown", lambda: None)
    with pytest.raises(typer.Exit):
        _deploy(Path("serve_config.yaml"), "auto")
    printed = capsys.readouterr().err
    assert printed.startswith(f"loray: Serve did not take the config: {reason}")
    assert "Traceback" not in printed
