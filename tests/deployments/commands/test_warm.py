"""`loray warm` where there is no GPU: what it says, and what it refuses."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deployments.cli import app

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would compile")


@CPU_ONLY
def test_there_is_nothing_to_compile_for_a_cpu(tmp_path: Path) -> None:
    into = tmp_path / "kernels"
    done = CliRunner().invoke(app, ["warm", "serve_config.yaml", "--into", str(into)])
    assert done.exit_code == 0
    assert "nothing to compile for a CPU" in done.output
    assert not into.exists()


@CPU_ONLY
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["serve_config.yaml", "--tp", "2"], "write them into the yaml"),
        (["configs/demo/model", "--set", "engine.device=cuda"], "this machine has none"),
        (["configs/demo/model", "--set", "engine.devise=cuda"], "engine.devise"),
    ],
)
def test_faulty_configs_are_refused(arguments: list[str], reason: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["warm", *arguments, "--into", str(tmp_path / "kernels")])
    assert done.exit_code in (1, 2)
    assert reason in done.output
