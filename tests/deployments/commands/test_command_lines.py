"""Wrong command lines end in one sentence and exit code 2, before anything starts."""

from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from deployments.cli import app

PIRATE = "configs/demo/adapters/pirate"
REQUEST = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}'


def loray(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "nowhere.yaml", "--print-config"), "nowhere.yaml cannot be read"),
        (("serve", PIRATE), "pirate' is an adapter: give the base model"),
        (("serve", "configs/demo/model", "--port", "99999"), "configs/demo/model would be refused"),
        (("check-adapter", PIRATE, "--model", "x", "--max-rank", "0"),
         "adapters.max_rank: Input should be greater than 0"),
    ],
)  # fmt: skip
def test_the_sentence_says_what_is_wrong(arguments: tuple[str, ...], words: str) -> None:
    refused = loray(*arguments)
    assert refused.exit_code == 2, refused.output
    assert words in refused.stderr


@pytest.mark.parametrize("target", ["no/such/folder/out.jsonl", "."])
def test_results_that_cannot_be_written_are_not_computed(tmp_path: Path, target: str) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text(REQUEST)
    refused = loray("batch", str(lines), target)
    assert refused.exit_code == 2, refused.output
    assert f"{target} cannot be written: " in refused.stderr


def test_an_adapter_is_checked_against_a_yaml_of_one_base_model(tmp_path: Path) -> None:
    config = yaml.safe_load(Path("serve_config.yaml").read_text())
    manifest = {"kind": "RayService", "spec": {"serveConfigV2": yaml.safe_dump(config)}}
    several = deepcopy(config)
    args = several["applications"][0]["args"]
    several["applications"][0] |= {
        "import_path": "deployments.app:build_bases", "args": {"models": {"a": args, "b": args}}
    }  # fmt: skip
    paths = [tmp_path / "manifest.yaml", tmp_path / "several.yaml"]
    for path, content in zip(paths, (manifest, several), strict=True):
        path.write_text(yaml.safe_dump(content))
    done = loray("check-adapter", PIRATE, "--model", str(paths[0]))
    assert done.exit_code == 0, done.output
    refused = loray("check-adapter", PIRATE, "--model", str(paths[1]))
    assert refused.exit_code == 2
    assert "has 2 base models: name one's folder or hub id" in refused.stderr
