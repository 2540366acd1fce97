from pathlib import Path

import pytest

from configs.model import ModelConfig
from sources.model import ModelNotFound, fetch_model


def test_the_demo_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (fetch_model(ModelConfig(id="configs/demo/model")) / "config.json").is_file()


def test_a_model_that_is_nowhere_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFound, match=r"[^.]\. Give a folder's path, or a hub id"):
        fetch_model(ModelConfig(id="not a model at all"))
