"""A folder of compiled kernels: FlashInfer's libraries in it, and kernels made for other GPUs."""

import json
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from modeling.kernels import cache

GPU = torch.device("cuda", 0)


@pytest.fixture
def flashinfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """FlashInfer's own paths, as in its `jit/env.py`."""
    base = tmp_path / "workspace" / ".cache" / "flashinfer"
    env = SimpleNamespace(
        FLASHINFER_CACHE_DIR=base,
        FLASHINFER_JIT_DIR=base / "0.6.13" / "90a" / "cached_ops",
        FLASHINFER_AOT_DIR=tmp_path / "package" / "aot",
    )
    package, jit = ModuleType("flashinfer"), ModuleType("flashinfer.jit")
    jit.env = env  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.jit", jit)
    return env


def test_libraries_are_kept_without_their_workspace_and_found_again(
    flashinfer: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels"
    monkeypatch.setenv("LORAY_KERNEL_CACHE", str(folder))
    cache.read_libraries()
    assert tmp_path / "package" / "aot" == flashinfer.FLASHINFER_AOT_DIR
    made = flashinfer.FLASHINFER_JIT_DIR / "decode"
    made.mkdir(parents=True)
    (made / "decode.so").write_bytes(b"library")
    (made / "build.ninja").write_text("rules")
    cache.keep_libraries(folder)
    cache.read_libraries()
    # Where FlashInfer looks: FLASHINFER_AOT_DIR / name / name.so.
    found = flashinfer.FLASHINFER_AOT_DIR / "decode" / "decode.so"
    assert found.is_relative_to(folder)
    assert found.read_bytes() == b"library"
    assert cache.count(folder) == (0, 1, 7)


def test_libraries_of_a_package_go_first(
    flashinfer: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, package = tmp_path / "kernels", flashinfer.FLASHINFER_AOT_DIR
    package.mkdir(parents=True)
    (folder / "flashinfer" / "0.6.13" / "90a" / "cached_ops").mkdir(parents=True)
    monkeypatch.setenv("LORAY_KERNEL_CACHE", str(folder))
    cache.read_libraries()
    assert package == flashinfer.FLASHINFER_AOT_DIR


def test_kernels_for_another_gpu_are_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def capability(device: torch.device) -> tuple[int, int]:
        return (9, 0)

    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setenv("LORAY_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(logging.getLogger("loray"), "propagate", True)
    cache.warn_of_other_kernels(GPU)
    assert "holds no kernels" in caplog.text
    assert cache.finish(tmp_path, GPU).triton == 0
    caplog.clear()
    cache.warn_of_other_kernels(GPU)
    assert caplog.text == ""
    made = json.loads((tmp_path / "kernels.json").read_text())
    (tmp_path / "kernels.json").write_text(json.dumps({**made, "gpu": "sm_80"}))
    cache.warn_of_other_kernels(GPU)
    assert "for gpu sm_80, here is sm_90" in caplog.text
