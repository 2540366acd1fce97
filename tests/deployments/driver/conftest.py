"""A model folder with adapters, for every test of a driver."""

import json
from pathlib import Path

import pytest

from tests.clocks import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the engine and its loop go by, instead of real time."""
    clock = Clock()
    for module in ("engine", "loop"):
        monkeypatch.setattr(f"deployments.driver.{module}.time", clock)
    return clock


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A model folder, and adapter folders whose content is their name."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000, "eos_token_id": 7}))
    for name in ("red", "blue", "broken", "crash", "slow1", "slow2", *(f"a{i}" for i in range(8))):
        folder = tmp_path / "adapters" / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps({"name": name}))
    return tmp_path
