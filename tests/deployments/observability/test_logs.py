"""Log lines as Serve writes them in a replica, and as a rank writes them."""

import io
import json
import logging
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest
import ray.serve.context
from ray.serve._private.common import ServeComponentType
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig

from configs.observability import LogFormat
from deployments.observability.logs import (
    SERVE_LOGGER,
    JsonLines,
    configure_logs,
    hand_logs_to_serve,
)


@pytest.fixture(autouse=True)
def loggers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both loggers as in a fresh process, and back as they were."""
    # In a replica Serve redirects print and both streams; pytest wants its own back.
    for name in ("sys.stdout", "sys.stderr", "builtins.print"):
        module, attribute = name.split(".")
        monkeypatch.setattr(name, getattr(__import__(module), attribute))
    kept = {name: vars(logging.getLogger(name)).copy() for name in ("loray", SERVE_LOGGER)}
    for name in kept:
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    yield
    for name, state in kept.items():
        for handler in logging.getLogger(name).handlers:
            _close(handler)
        vars(logging.getLogger(name)).update(state)


def _close(handler: logging.Handler) -> None:
    if isinstance(handler, MemoryHandler) and handler.target is not None:
        handler.target.close()
    handler.close()


def serve_writes(folder: Path, encoding: str) -> None:
    """Serve's own logging, as a replica has it, into a folder."""
    configure_component_logger(
        component_name="loray_Ingress",
        component_id="r1",
        component_type=ServeComponentType.REPLICA,
        logging_config=LoggingConfig(encoding=encoding, logs_dir=str(folder)),
        max_bytes=2**20,
        backup_count=1,
    )


def lines(folder: Path) -> list[str]:
    for handler in logging.getLogger(SERVE_LOGGER).handlers:
        handler.flush()
    [path] = folder.glob("replica_*.log")
    return path.read_text().splitlines()


@pytest.fixture
def request_context() -> Iterator[None]:
    context = ray.serve.context._RequestContext(request_id="7f-from-the-client", route="/generate")
    token = ray.serve.context._serve_request_context.set(context)
    yield
    ray.serve.context._serve_request_context.reset(token)


@pytest.mark.usefixtures("request_context")
def test_a_replicas_line_is_json_with_the_request_that_it_belongs_to(tmp_path: Path) -> None:
    serve_writes(tmp_path, "JSON")
    hand_logs_to_serve()
    extra = {"adapter": "red", "generated_tokens": 4}
    logging.getLogger("loray.ingress").info("a line\nand another", extra=extra)
    [line] = lines(tmp_path)
    reply = json.loads(line)
    assert reply["request_id"] == "7f-from-the-client"
    assert reply["message"] == "a line\nand another"
    assert (reply["adapter"], reply["generated_tokens"]) == ("red", 4)
    assert (reply["deployment"], reply["replica"]) == ("loray_Ingress", "r1")


@pytest.mark.usefixtures("request_context")
def test_a_replicas_text_line_has_the_request_too(tmp_path: Path) -> None:
    serve_writes(tmp_path, "TEXT")
    hand_logs_to_serve()
    logging.getLogger("loray.driver.loop").warning("slow")
    [line] = lines(tmp_path)
    assert line.startswith("WARNING")
    assert "7f-from-the-client" in line
    assert line.endswith("slow")


def test_lines_go_to_the_handlers_that_serve_has_now(tmp_path: Path) -> None:
    serve_writes(tmp_path / "before", "TEXT")
    hand_logs_to_serve()
    for handler in logging.getLogger(SERVE_LOGGER).handlers:
        _close(handler)
    serve_writes(tmp_path / "after", "JSON")  # as a changed logging_config does
    logging.getLogger("loray.driver").info("hello")
    [line] = lines(tmp_path / "after")
    assert json.loads(line)["message"] == "hello"
    assert "request_id" not in json.loads(line)
    [path] = (tmp_path / "before").iterdir()
    assert path.read_text() == ""


def test_a_rank_writes_its_own_json() -> None:
    configure_logs("rank-1", LogFormat.JSON)
    configure_logs("rank-1", LogFormat.TEXT)  # a second call changes nothing
    [handler] = logging.getLogger("loray").handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(written := io.StringIO())
    try:
        raise ValueError("of a step")
    except ValueError:
        logging.getLogger("loray.rank.worker").exception("a step failed", extra={"step": 3})
    reply = json.loads(written.getvalue())
    assert reply["component_name"] == "rank-1"
    assert (reply["levelname"], reply["message"], reply["step"]) == ("ERROR", "a step failed", 3)
    assert "of a step" in reply["exc_text"]


def test_values_that_json_lacks_are_written_as_text() -> None:
    record = logging.LogRecord("loray", logging.INFO, __file__, 1, "%s", ("x",), None)
    record.path = Path("/a")
    assert json.loads(JsonLines("rank-0").format(record))["path"] == "/a"


def test_a_rank_writes_text_by_default() -> None:
    configure_logs("rank-0", LogFormat.TEXT)
    [handler] = logging.getLogger("loray").handlers
    assert handler.formatter is not None
    record = logging.LogRecord("loray", logging.INFO, __file__, 1, "ready", (), None)
    assert "INFO rank-0 ready" in handler.format(record)
