"""Kernels that one process compiled, carried to another path: the next process compiles none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

RANKS = """
import sys
import torch
from configs.engine import EngineConfig
from modeling.runner.precompile import compile_kernels
compile_kernels(EngineConfig.model_validate_json(sys.argv[1]), torch.device("cuda", 0))
"""
SERVER = """
import sys
from configs.engine import EngineConfig
from deployments.rank.host import RankHost
from sharding.group import memory_store
host = RankHost(EngineConfig.model_validate_json(sys.argv[1]), sys.argv[2], 0)
host.allocate(host.measure(memory_store(), 60.0).num_blocks)
"""


def run(code: str, *arguments: str, **env: str) -> None:
    subprocess.run([sys.executable, "-c", code, *arguments], env={**os.environ, **env}, check=True)


def compiled(folder: Path) -> int:
    return len(list(folder.rglob("*.cubin")))


def test_a_start_with_carried_kernels_compiles_none(tmp_path: Path) -> None:
    config = json.dumps(
        {
            "model": {"id": "configs/demo/model", "dtype": "bfloat16"},
            "attention": "triton",
            "limits": {"max_total_tokens": 256, "max_running": 4, "max_step_tokens": 64},
        }
    )
    filled, carried, own = tmp_path / "filled", tmp_path / "carried", tmp_path / "own"
    run(RANKS, config, TRITON_CACHE_DIR=str(filled / "triton"))
    assert compiled(filled) > 5
    filled.rename(carried)
    env = {"LORAY_KERNEL_CACHE": str(carried), "TRITON_CACHE_DIR": str(own)}
    run(SERVER, config, "configs/demo/model", **env)
    assert compiled(own) == 0
