"""`loray check-adapter`: whether a server would serve these files exactly, or why not."""

from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress

from configs.architectures.base import ArchitectureError
from configs.base import faults
from configs.engine import EngineConfig
from configs.serve import ServeConfig
from configs.wire.adapters import AdapterError
from deployments.commands.check_config import engines, find_config, read_config
from deployments.commands.failing import fail
from modeling.runner.adapter_check import (
    AdapterCost,
    AdapterVerdict,
    adaptable,
    as_peft,
    base_tensors,
    judge,
    model_dtype,
)
from sharding.checkpoint import CheckpointError
from sources.model import ModelNotFound

_MOST_CHARS = 400


def check(folder: Path, model: str, settings: dict[str, object]) -> None:
    """Print the verdict; typer.Exit 1 if the adapter would be refused."""
    if not folder.is_dir():
        fail(f"{folder} is not a folder: name one that holds an adapter's files", status=2)
    config = _config(model, settings)
    try:
        with as_peft(folder) as files:
            _print_verdict(folder, _verdict(files, config))
    except AdapterError as error:
        _print_verdict(folder, AdapterVerdict(error.reasons))


def _verdict(folder: Path, config: EngineConfig) -> AdapterVerdict:
    console = Console(stderr=True)
    try:
        with console.status(f"reading {config.model.id}", spinner="line"):
            base = base_tensors(config, folder)
            projections, dtype = adaptable(config, base), model_dtype(config)
    except (ArchitectureError, CheckpointError, ModelNotFound, ValueError) as error:
        fail(f"the model cannot be read: {error}", status=2)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading the adapter", total=None)

        def read(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        return judge(folder, projections, config.adapters, read, base, dtype)


def _config(model: str, settings: dict[str, object]) -> EngineConfig:
    """The server's settings: those of its yaml, or defaults for a model's folder or hub id."""
    try:
        if Path(model).suffix in (".yaml", ".yml"):
            found = list(engines(read_config(find_config(Path(model)))))
            if len(found) != 1:
                fail(
                    f"--model {model} has {len(found)} base models: name one's folder or hub id", 2
                )
            return ServeConfig.model_validate(found[0]).engine
        given = {name: value for name, value in settings.items() if value is not None}
        return EngineConfig.model_validate({"model": {"id": model}, "adapters": given})
    except ValueError as error:
        fail(f"--model {model} cannot be used: {'; '.join(faults(error))}", status=2)


def _print_verdict(folder: Path, verdict: AdapterVerdict) -> None:
    kind = f"{verdict.kind}, " if verdict.kind else ""
    if verdict.cost is not None:
        head = f", classifies by {verdict.num_labels} labels" if verdict.num_labels else ""
        tokens = f", sets {verdict.num_tokens} rows of tokens" if verdict.num_tokens else ""
        norms = f", brings {verdict.num_norms} norms" if verdict.num_norms else ""
        whole = f", brings {verdict.num_whole} whole linear maps" if verdict.num_whole else ""
        shape = f"{kind}{verdict.num_modules} modules, rank {verdict.rank}"
        shape += f"{head}{tokens}{norms}{whole}"
        typer.echo(f"{folder}: served exactly ({shape})")
        _print_cost(verdict.cost)
        if verdict.unread:
            typer.echo(f"  not read, as by PEFT: {', '.join(verdict.unread)[:_MOST_CHARS]}")
        return
    typer.echo(f"{folder}: refused{f' ({verdict.kind})' if verdict.kind else ''}")
    for reason in verdict.reasons:
        typer.echo(f"  - {reason}")
    raise typer.Exit(1)


def _print_cost(cost: AdapterCost) -> None:
    typer.echo(
        f"  on one rank: {cost.pages} pages, {cost.page_bytes / 2**20:.1f} MiB in 16 bits; "
        f"a token: {cost.share:.1%} of the multiplications of the base's adaptable modules"
    )
    if cost.expert_pages:
        typer.echo(
            f"  on experts: {cost.expert_bytes / 2**20:.1f} MiB of it, on the device and again in "
            "adapters.host_bytes, which the ranks of a group share; needs adapters.expert_pages of "
            f"{cost.expert_pages}"
        )
