"""Destination and format of log lines: Serve's log in a replica, stderr in a rank.

In a replica Serve's own handlers write them, with the id of the request that they belong to.
"""

import json
import logging

from configs.observability import LogFormat

SERVE_LOGGER = "ray.serve"

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def configure_logs(component: str, log_format: LogFormat) -> None:
    """Have this process write to stderr; a second call changes nothing. Not for replicas."""
    handler = logging.StreamHandler()
    as_text = logging.Formatter(f"%(asctime)s %(levelname)s {component} %(message)s")
    handler.setFormatter(JsonLines(component) if log_format is LogFormat.JSON else as_text)
    _use(handler)


def hand_logs_to_serve() -> None:
    """Have Serve write this replica's lines; a second call changes nothing."""
    _use(ServeLogHandler())


def _use(handler: logging.Handler) -> None:
    root = logging.getLogger("loray")
    if root.handlers:
        return
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    root.propagate = False


class ServeLogHandler(logging.Handler):
    """Passes each line to the handlers that Serve has at that time."""

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one line on."""
        logging.getLogger(SERVE_LOGGER).handle(record)


class JsonLines(logging.Formatter):
    """One JSON object a line, with Serve's field names; `extra` adds fields."""

    def __init__(self, component: str) -> None:
        """component: the field component_name."""
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        fields: dict[str, object] = {
            "asctime": self.formatTime(record),
            "levelname": record.levelname,
            "message": record.getMessage(),
            "component_name": self._component,
            "process": record.process,
        }
        if record.exc_info:
            fields["exc_text"] = self.formatException(record.exc_info)
        extra = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        return json.dumps(fields | extra, default=str)
