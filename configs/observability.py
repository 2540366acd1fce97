"""What the server tells of itself."""

from enum import StrEnum

from configs.base import Config


class LogFormat(StrEnum):
    """Lines for people, or one JSON object a line for machines."""

    TEXT = "text"
    JSON = "json"


class ObservabilityConfig(Config):
    """Logs; metrics are always there, and traces are Serve's own `tracing_config`.

    log_format: of the driver, the ingress and the ranks. JSON asks Serve for its JSON too.
    """

    log_format: LogFormat = LogFormat.TEXT
