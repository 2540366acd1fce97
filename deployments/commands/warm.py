"""`loray warm`: fills a folder with the kernels that a server would compile at its start."""

import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import typer

from configs.architectures.base import ArchitectureError
from configs.architectures.select import load_architecture, padded_reason
from configs.engine import EngineConfig
from configs.env import write_kernels
from configs.serve import ServeConfig
from deployments.commands import plain
from deployments.commands.check_config import config_faults, engines, find_config, read_config
from deployments.commands.failing import fail
from modeling.kernels.cache import finish, keep_libraries
from modeling.runner.loading import pick_device
from modeling.runner.precompile import compile_kernels
from sources.model import ModelNotFound, fetch_model_config

_SUFFIXES = (".yaml", ".yml")


def warm(model: str, options: dict[str, Any], folder: Path) -> None:
    """Compile for all base models of a yaml, or for one model with options.

    options: the given fields of `plain.Options`. typer.Exit 1 or 2 if the config is faulty.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    configs = list(_configs(model, options))
    try:
        devices = [pick_device(config.device) for config in configs]
    except ValueError as error:
        fail(str(error))
    compiling = [c for c, device in zip(configs, devices, strict=True) if device.type == "cuda"]
    if not compiling:
        typer.echo(
            "there is nothing to compile for a CPU. For GPUs, run this where a GPU of the "
            "server's kind is"
        )
        return
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="loray-warm-") as workspace:
        write_kernels(folder.resolve(), Path(workspace))
        for config in compiling:
            _compile(config)
        keep_libraries(folder.resolve())
    found = finish(folder, torch.device("cuda", 0))
    typer.echo(
        f"{folder}: {found.triton} kernels of Triton and {found.libraries} libraries of "
        f"FlashInfer, {found.num_bytes / 1e6:.0f} MB, after {time.monotonic() - began:.0f} s.\n"
        f"Serve with LORAY_KERNEL_CACHE={folder}, or engine.kernel_cache in the yaml"
    )


def _configs(model: str, options: dict[str, Any]) -> Iterator[EngineConfig]:
    """Each base model's settings."""
    if Path(model).suffix not in _SUFFIXES:
        made = plain.plain_config(plain.Options(model, **options))
    elif options:
        fail("options go with a model: write them into the yaml", 2)
    else:
        made = read_config(find_config(Path(model)))
        if found := config_faults(made):
            fail(f"{model} would be refused:\n  " + "\n  ".join(found), status=2)
    for arguments in engines(made):
        yield ServeConfig.model_validate(arguments).engine


def _compile(config: EngineConfig) -> None:
    try:
        files = fetch_model_config(config.model)
        architecture = load_architecture(files)
    except (ModelNotFound, ArchitectureError) as error:
        fail(str(error))
    typer.echo(f"{config.model.id}: compiling for {config.tensor_parallel} ranks")
    reason = padded_reason(architecture)
    if reason is not None:
        typer.echo(f"  it runs in transformers' code, which compiles nothing at start: {reason}")
        return
    own = config.model.model_copy(update={"id": str(files)})
    compile_kernels(config.model_copy(update={"model": own}), torch.device("cuda", 0))
