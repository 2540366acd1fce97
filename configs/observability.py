"""Settings of the logs."""

from enum import StrEnum

from configs.base import Config


class LogFormat(StrEnum):
    """Plain lines, or one JSON object a line."""

    TEXT = "text"
    JSON = "json"


class ObservabilityConfig(Config):
    """Logs; metrics need no setting, and traces are Serve's own `tracing_config`.

    log_format: of the driver, the ingress and the ranks; with JSON, Serve's own lines are JSON too.
    """

    log_format: LogFormat = LogFormat.TEXT
