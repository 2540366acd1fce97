"""HAProxy as `loray-haproxy` starts it: what silent and half-sent connections may hold."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from ray.serve._private.haproxy import HAProxyApi, HAProxyConfig
from ray.serve.config import HTTPOptions

from configs.env import FrontLimits, front_limits
from deployments import front
from deployments.ports import Port
from tests.ports import free_port

PATIENCE = 300.0
LIMITS = FrontLimits(0.5, None)
SMALL = """global
    stats socket {folder}/admin.sock mode 666 level admin expose-fd listeners
    maxconn {maxconn}
defaults
    mode http
    timeout connect 5s
    timeout client 300s
    timeout server 300s
frontend prometheus
    bind 127.0.0.1:{metrics}
    http-request use-service prometheus-exporter if {{ path /metrics }}
frontend http_frontend
    bind 127.0.0.1:{port}
    http-request return status 200 content-type text/plain string "well"
"""


@pytest.fixture
def written(tmp_path: Path) -> str:
    """What this version of Serve writes for HAProxy."""
    path = tmp_path / "haproxy.cfg"
    options = HTTPOptions(host="127.0.0.1", port=8123)
    config = HAProxyConfig(http_options=options, socket_path=str(tmp_path / "admin.sock"))
    HAProxyApi(config, config_file_path=str(path))._generate_config_file_internal()
    return path.read_text()


def section(text: str, title: str) -> str:
    return text.split(title + "\n", 1)[1].split("\nfrontend", 1)[0]


def test_serves_configuration_gets_the_limits(written: str) -> None:
    text = front.limited(written, LIMITS)
    added = section(text, "frontend http_frontend")
    assert "timeout http-request 500ms" in added
    assert "maxconn 4032" in added
    assert "sc0_conn_cur gt 3024" in added
    assert "mode 600 level admin" in text
    assert "mode 666" not in text
    assert re.search(r"^ +tune.bufsize 49152\n +tune.http.maxhdr 256$", text, re.MULTILINE)
    assert front.limited(text, LIMITS) == text
    unlimited = front.limited(written, FrontLimits(5, 0))
    assert "timeout http-request 5000ms" in unlimited
    assert "stick-table" not in unlimited


def test_haproxy_accepts_the_configuration(written: str, tmp_path: Path) -> None:
    path = tmp_path / "whole.cfg"
    path.write_text(front.limited(written, LIMITS))
    command = [front.haproxy_binary(), "-c", "-f", str(path)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_requests_may_come_again_while_no_application_is_known(written: str) -> None:
    """As after the front's death: Serve tells the next one of the applications a moment later."""
    assert "return status 404" in written
    text = section(front.limited(written, LIMITS), "backend default_backend")
    assert "return status 503" in text
    assert "hdr retry-after 1" in text
    default = "    default_backend default_backend\n"
    known = written.replace(default, "    use_backend loray if is_loray\n" + default)
    assert "return status 404" in front.limited(known, LIMITS)


def test_the_ports_of_serves_configuration(written: str) -> None:
    assert front.listening(written) == [
        Port("", 9101, "RAY_SERVE_HAPROXY_METRICS_PORT"),
        Port("127.0.0.1", 8123, "http_options.port in the yaml (--port)"),
        Port("", 8404, "RAY_SERVE_HAPROXY_STATS_PORT"),
    ]


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert front_limits() == FrontLimits(5.0, None)
    monkeypatch.setenv("LORAY_FRONT_HEADER_TIMEOUT_S", "2.5")
    monkeypatch.setenv("LORAY_FRONT_CONNECTIONS_PER_ADDRESS", "0")
    assert front_limits() == FrontLimits(2.5, 0)


@contextmanager
def running(folder: Path, maxconn: int = 74) -> Iterator[tuple[int, int]]:
    """`loray-haproxy` over a small configuration: its port, and that of its metrics."""
    port, metrics = free_port(), free_port()
    path = folder / "haproxy.cfg"
    path.write_text(SMALL.format(folder=folder, port=port, metrics=metrics, maxconn=maxconn))
    with started(path):
        connected(port).close()
        yield port, metrics


@contextmanager
def started(path: Path) -> Iterator[None]:
    """`loray-haproxy` over this configuration."""
    environment = {**os.environ, "LORAY_FRONT_HEADER_TIMEOUT_S": "1"}
    command = [sys.executable, "-m", "deployments.front", "-db", "-f", str(path)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    try:
        yield
    finally:
        process.kill()
        process.communicate()


def connected(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        except ConnectionRefusedError:
            time.sleep(0.02)  # it is starting


def said(port: int, words: bytes) -> bytes:
    with connected(port) as client:
        client.sendall(words)
        answer = b""
        while more := client.recv(65536):
            answer += more
        return answer


GET = b"GET %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


def test_silent_connections_are_closed_after_a_while(tmp_path: Path) -> None:
    with running(tmp_path) as (port, metrics):
        silent = [connected(port) for _ in range(60)]
        half_sent = [connected(port) for _ in range(60)]
        for each in half_sent:
            each.sendall(b"GET / HTTP/1.1\r\nX: ")
        # More than all connections, yet statistics and server answer.
        assert b"haproxy_process" in said(metrics, GET % b"/metrics")
        assert said(port, GET % b"/").endswith(b"well")
        first = silent[0].recv(100)
        assert b" 408 " in first
        reply = said(metrics, GET % b"/metrics").decode()
        name = 'haproxy_frontend_request_errors_total{proxy="http_frontend"} '
        assert int(reply.split(name)[1].split()[0]) > 0
        for each in silent + half_sent:
            each.close()
        assert (tmp_path / "admin.sock").stat().st_mode & 0o777 == 0o600


def test_a_client_that_leaves_ends_its_request(tmp_path: Path, written: str) -> None:
    """Its body comes after the head, as from most clients; the answer has not begun."""
    options = re.findall(r"^ +option (?:abort|splice).*$", written, re.MULTILINE)
    assert options
    with socket.create_server(("127.0.0.1", 0)) as backend:
        path, port = tmp_path / "haproxy.cfg", free_port()
        text = SMALL.format(folder=tmp_path, port=port, metrics=free_port(), maxconn=99)
        answer = 'http-request return status 200 content-type text/plain string "well"'
        assert answer in text
        text = text.replace("    mode http\n", "\n".join(["    mode http", *options, ""]), 1)
        target = f"backend b\n    server s 127.0.0.1:{backend.getsockname()[1]}\n"
        path.write_text(text.replace(answer, "default_backend b") + target)
        with started(path), connected(port) as client:
            client.sendall(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2000\r\n\r\n")
            backend.settimeout(PATIENCE)
            request, _ = backend.accept()
            with request:
                request.settimeout(PATIENCE)
                assert request.recv(65536).startswith(b"POST")
                client.sendall(b"x" * 2000)
                received = 0
                while received < 2000:
                    received += len(request.recv(65536))
                client.close()
                with suppress(ConnectionResetError):
                    assert request.recv(1) == b""


def test_a_taken_port_is_named_with_its_owner(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as owner:
        port = owner.getsockname()[1]
        path = tmp_path / "haproxy.cfg"
        path.write_text(SMALL.format(folder=tmp_path, port=port, metrics=free_port(), maxconn=9))
        command = [sys.executable, "-m", "deployments.front", "-db", "-f", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for text in (f"port {port} is in use by process {os.getpid()}", "http_options.port"):
        assert text in done.stderr


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    """Serve's actor may be killed; HAProxy without it would hold the ports."""
    port = free_port()
    path = tmp_path / "haproxy.cfg"
    path.write_text(SMALL.format(folder=tmp_path, port=port, metrics=free_port(), maxconn=99))
    code = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-m', 'deployments.front', '-db', '-f', sys.argv[1]])\n"
        "time.sleep(3600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(path)])
    open_one = connected(port)
    parent.kill()
    parent.wait()
    with suppress(ConnectionResetError):  # it was not accepted yet
        assert open_one.recv(1) == b""
