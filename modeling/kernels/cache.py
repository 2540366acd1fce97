"""A folder of compiled kernels that a machine, or an image, can carry to others.

    triton/KEY/FILE                         as in Triton's own cache
    flashinfer/VERSION/ARCH/cached_ops/...  FlashInfer's libraries
    kernels.json                            what they were compiled for and with

`loray warm` fills it; ranks read it (`modeling/kernels/carried.py`) and never write to it. What it
lacks they compile into the caches of their user.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from configs.env import kernel_folder

MADE = "kernels.json"
PACKAGES = ("torch", "triton", "flashinfer-python")

logger = logging.getLogger("loray.modeling")


class KernelCount(NamedTuple):
    """What a folder holds: Triton's kernels, FlashInfer's libraries, bytes of both."""

    triton: int
    libraries: int
    num_bytes: int


def conditions(device: torch.device) -> dict[str, str]:
    """Return what compiled kernels depend on: the GPU's architecture, and who compiled them."""
    major, minor = torch.cuda.get_device_capability(device)
    return {"gpu": f"sm_{major}{minor}"} | {name: _version(name) for name in PACKAGES}


def warn_of_other_kernels(device: torch.device) -> None:
    """Log what differs here from where the folder was filled: then its kernels are not used."""
    folder = kernel_folder()
    if folder is None or device.type != "cuda":
        return
    try:
        made: Mapping[str, str] = json.loads((folder / MADE).read_text("utf-8"))
    except (OSError, ValueError) as error:
        logger.warning("%s holds no kernels of `loray warm`: %s", folder, error)
        return
    for name, here in conditions(device).items():
        if made.get(name) != here:
            there = made.get(name, "none")
            logger.warning("the kernels in %s are for %s %s, here is %s: what is needed is "
                           "compiled anew", folder, name, there, here)  # fmt: skip


def read_libraries() -> None:
    """Have FlashInfer load the folder's libraries, unless a package brings them."""
    from flashinfer.jit import env

    folder = kernel_folder()
    if folder is not None and not env.FLASHINFER_AOT_DIR.is_dir():
        libraries = _libraries(folder, env)
        if libraries.is_dir():
            env.FLASHINFER_AOT_DIR = libraries


def keep_libraries(folder: Path) -> None:
    """Move what FlashInfer compiled in this process's workspace into the folder."""
    try:
        from flashinfer.jit import env
    except ImportError:
        return
    for library in env.FLASHINFER_JIT_DIR.glob("*/*.so"):
        target = _libraries(folder, env) / library.parent.name / library.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(library, target)


def finish(folder: Path, device: torch.device) -> KernelCount:
    """Write what the kernels were made for, and return what the folder holds."""
    (folder / MADE).write_text(json.dumps(conditions(device), indent=2) + "\n", "utf-8")
    return count(folder)


def count(folder: Path) -> KernelCount:
    """Return what a folder holds."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return KernelCount(
        sum(path.suffix == ".cubin" for path in files),
        sum(path.suffix == ".so" and "cached_ops" in path.parts for path in files),
        sum(path.stat().st_size for path in files),
    )


def _libraries(folder: Path, env: Any) -> Path:
    """Where the libraries for this version and GPU are; env: FlashInfer's paths."""
    own: Path = env.FLASHINFER_JIT_DIR.relative_to(env.FLASHINFER_CACHE_DIR)
    return folder / "flashinfer" / own


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
