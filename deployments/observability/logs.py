"""One format for every process: time, level, who, message; request ids in the message."""

import logging


def configure_logs(who: str, level: int = logging.INFO) -> None:
    """Give the loggers one handler that names this process; a second call changes nothing."""
    root = logging.getLogger("loray")
    if root.handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {who} %(message)s"))
    root.addHandler(handler)
    root.setLevel(level)
    root.propagate = False
