"""`loray batch`: answers a file of requests offline, over engines that Ray Data calls."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from configs.serve import ServeConfig
from deployments.commands import plain
from deployments.commands.check_config import config_faults, find_config, read_config
from deployments.commands.failing import fail
from deployments.commands.resources import Demand, lacks, summed
from deployments.offline.lines import check_input, custom_id, done_ids

# Few lines at a time: a call of a replica ends with its slowest line, and two calls overlap.
_LINES_OF_A_CALL = 32
_SUFFIXES = (".yaml", ".yml")


def run(
    source: Path,
    target: Path,
    model: str,
    options: dict[str, Any],
    replicas: int,
    address: str | None,
) -> None:
    """Answer the lines of `source` into `target`; those that it has already are not sent again.

    options: the given fields of `plain.Options`, for a model. address: of a Ray cluster; None
    starts one here. typer.Exit 2 for wrong input.
    """
    config = _config(model, options)
    if not source.is_file():
        fail(f"{source} is not a file", status=2)
    checked = check_input(source, config.api.max_body_bytes)
    if checked.faults:
        wrong = (f"line {fault.line}: {fault.message}" for fault in checked.faults)
        fail(f"{source} cannot be answered:\n  " + "\n  ".join(wrong), status=2)
    try:
        done = done_ids(target)
        target.open("ab").close()
    except OSError as error:
        fail(f"{target} cannot be written: {error.strerror}", status=2)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TextColumn("lines"), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=checked.total, completed=len(done))
        with target.open("a", encoding="utf-8") as output:
            for result in _results(config, source, done, checked.total, replicas, address):
                output.write(result)
                output.flush()
                progress.update(task, advance=1, description="answering")
        progress.update(task, description="answered")


def _config(model: str, options: dict[str, Any]) -> ServeConfig:
    """The settings of a yaml with one application, or of a model and options."""
    if Path(model).suffix not in _SUFFIXES:
        config = plain.plain_config(plain.Options(model, **options))
        plain.fetch(config)
    else:
        if options:
            fail("options go with a model: write them into the yaml", status=2)
        config = read_config(find_config(Path(model)))
        found = config_faults(config)
        if found:
            fail(f"{model} would be refused:\n  " + "\n  ".join(found), status=2)
    args = config["applications"][0]["args"]
    if "models" in args:
        fail("a batch has one base model: name a yaml of one", status=2)
    return ServeConfig.model_validate(args)


def _results(
    config: ServeConfig,
    source: Path,
    done: frozenset[str],
    total: int,
    replicas: int,
    address: str | None,
) -> Iterable[str]:
    """The results as they come, in any order."""
    import ray
    import ray.data

    from deployments.bundles import bundles
    from deployments.offline.replica import OfflineReplica

    ray.init(address or "local", logging_level="warning", include_dashboard=False)
    try:
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        own, *rank_bundles = bundles(config)
        if address is None:
            demand = Demand("engines", summed([own, *rank_bundles]), replicas)
            if found := list(lacks([demand], ray.cluster_resources())):
                fail("\n  ".join(found))
        calls = max(replicas, -(-total // _LINES_OF_A_CALL))
        lines = ray.data.read_text(str(source.resolve()), override_num_blocks=calls)
        missing = lines.filter(lambda row: custom_id(row["text"]) not in done) if done else lines
        answered = missing.map_batches(
            OfflineReplica,
            fn_constructor_args=(config, rank_bundles),
            batch_size=_LINES_OF_A_CALL,
            compute=ray.data.ActorPoolStrategy(size=replicas, max_tasks_in_flight_per_actor=4),
            num_cpus=config.driver_cpus,
            ray_remote_args_fn=lambda: {"max_concurrency": 2},
        )
        for row in answered.iter_rows():
            yield row["result"]
    finally:
        ray.shutdown()
