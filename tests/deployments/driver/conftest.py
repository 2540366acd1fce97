"""A model folder with adapters, for every test of a driver."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A model folder, and adapter folders whose content is their name."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000, "eos_token_id": 7}))
    for name in ("red", "blue", "broken", "crash", "slow1", "slow2", *(f"a{i}" for i in range(8))):
        folder = tmp_path / "adapters" / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps({"name": name}))
    return tmp_path
