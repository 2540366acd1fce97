"""The yaml of a served app is edited and deployed again, as an operator does."""

from typing import Any

import yaml

from tests.end_to_end.clients import ask_driver, is_healthy, wait_for
from tests.end_to_end.processes import drivers
from tests.end_to_end.serving import Served

Config = dict[str, Any]


def started_config(served: Served) -> Config:
    """The config that the app was started with; a copy to edit."""
    config: Config = yaml.safe_load(served.config.read_text())
    return config


def driver_options(config: Config) -> Config:
    """The Driver's own options in a config."""
    [options] = [d for d in config["applications"][0]["deployments"] if d["name"] == "Driver"]
    found: Config = options
    return found


def deploy(served: Served, config: Config) -> None:
    """`serve run --non-blocking`: Serve has the config then, and begins to act on it."""
    path = served.config.with_name("edited.yaml")
    path.write_text(yaml.safe_dump(config))
    served.edited = True
    ask_driver(served, f"deploy {path}")


def restore(served: Served) -> None:
    """Deploy the config that the app was started with, if another one is, and wait for it."""
    if not served.edited:
        return
    deploy(served, started_config(served))
    wait_for(lambda: ask_driver(served, "status") == "RUNNING" and len(drivers(served)) == 1)
    wait_for(lambda: is_healthy(served))
    served.edited = False
