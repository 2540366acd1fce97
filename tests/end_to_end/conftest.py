"""One served demo for the whole session."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.end_to_end.deploys import restore
from tests.end_to_end.serving import ROOT, Served, demo_config, start, stop
from tests.ports import free_port


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo of serve_config.yaml: two ranks, four adapters; with files and batches."""
    port = free_port()
    folder = tmp_path_factory.mktemp("serve")
    path, config = folder / "config.yaml", demo_config(port)
    config["applications"][0]["args"]["batches"] = {"storage": str(folder / "batches")}
    path.write_text(yaml.safe_dump(config))
    running = start(path, port)
    yield running
    if running.process.poll() is None:
        stop(running)


@pytest.fixture
def served(demo: Served) -> Served:
    """The demo with its first config, which is deployed again if a test has changed it."""
    restore(demo)
    return demo


@pytest.fixture(scope="session")
def answers() -> dict[str, dict[str, dict[str, str]]]:
    """What transformers + PEFT answer: model, question, "raw" or "chat"."""
    content: dict[str, Any] = json.loads((ROOT / "configs/demo/answers.json").read_text())
    reply: dict[str, dict[str, dict[str, str]]] = content["answers"]
    return reply
