from pathlib import Path

import pytest

from configs.model import ModelConfig
from sources.model import ModelNotFound, fetch_model


def test_the_demo_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (fetch_model(ModelConfig(id="configs/demo/model")) / "config.json").is_file()


def test_a_folder_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert fetch_model(ModelConfig(id="~/model")) == (tmp_path / "model").resolve()


def test_a_model_that_is_nowhere_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("the hub is away.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelNotFound, match=r"is away\. Give a folder's path, or a hub id"):
        fetch_model(ModelConfig(id="acme/model"))


@pytest.mark.parametrize("name", ["/no/such/folder", "./model", "a/b/c", "my model", ""])
def test_what_can_be_no_hub_id_is_not_asked_of_the_hub(name: str) -> None:
    with pytest.raises(ModelNotFound) as missing:
        fetch_model(ModelConfig(id=name))
    assert f"model {name!r} is neither a folder with a config.json" in str(missing.value)
    assert "Repo id" not in str(missing.value)
