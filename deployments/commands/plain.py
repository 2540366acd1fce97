"""Makes a Serve config from a model's name and a few options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.base import faults
from configs.serve import ServeConfig
from configs.strict_yaml import load_yaml
from deployments.commands.failing import fail
from sources.model import ModelNotFound, fetch_model

# CPUs that Ray reserves for each process. Nothing else runs in the cluster that `loray serve`
# starts, and a small machine must have enough of them.
_CPUS = 0.1


@dataclass(frozen=True)
class Options:
    """The options of `loray serve MODEL`; None leaves a setting at its default.

    adapters: folders that hold adapters, which are served by name.
    settings: "dotted.key=value" under `args`.
    """

    model: str
    adapters: tuple[Path, ...] = ()
    tensor_parallel: int | None = None
    device: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    settings: tuple[str, ...] = ()


def plain_config(options: Options) -> dict[str, Any]:
    """The config, as a yaml would have it; typer.Exit 2 with every faulty setting."""
    args = _args(options)
    for setting in options.settings:
        _set(args, setting)
    try:
        ServeConfig.model_validate(args)
    except ValidationError as error:
        fail(
            "these settings cannot be served:\n  " + "\n  ".join(faults(error, ServeConfig)),
            status=2,
        )
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": options.host, "port": options.port},
        "applications": [
            {
                "name": "loray",
                "route_prefix": "/",
                "import_path": "deployments.app:build",
                "args": args,
                "deployments": [
                    {"name": "Ingress", "num_replicas": 1},
                    {"name": "Driver", "num_replicas": 1},
                ],
            }
        ],
    }


def fetch(config: dict[str, Any]) -> None:
    """Download the model before Ray starts, so that its progress is shown."""
    args = ServeConfig.model_validate(config["applications"][0]["args"])
    try:
        fetch_model(args.engine.model)
    except ModelNotFound as error:
        fail(str(error), status=2)


def _args(options: Options) -> dict[str, Any]:
    folder = Path(options.model)
    model = {"id": str(folder.resolve()) if folder.is_dir() else options.model}
    engine: dict[str, Any] = {"model": model, "adapters": _adapters(options.adapters)}
    if options.tensor_parallel is not None:
        engine["tensor_parallel"] = options.tensor_parallel
    if options.device is not None:
        engine["device"] = options.device
    args: dict[str, Any] = {"engine": engine}
    args |= dict.fromkeys(("driver_cpus", "rank_cpus", "ingress_cpus"), _CPUS)
    return args


def _adapters(folders: tuple[Path, ...]) -> dict[str, Any]:
    """The settings of adapters: from these folders, or from the hub if there are none."""
    for folder in folders:
        if not folder.is_dir():
            fail(f"--adapters {folder} is not a folder", status=2)
    if not folders:
        return {}
    return {"default_source": "local", "local_roots": [str(folder.resolve()) for folder in folders]}


def _set(args: dict[str, Any], setting: str) -> None:
    """Set "engine.limits.max_running=64" in `args`; values are read as yaml."""
    path, equals, value = setting.partition("=")
    *outer, last = path.split(".")
    if not equals or not last:
        fail(f"--set {setting}: write it as a.dotted.key=value", status=2)
    inner = args
    for name in outer:
        inner = inner.setdefault(name, {})
        if not isinstance(inner, dict):
            fail(f"--set {setting}: {name} holds a value, not settings", status=2)
    try:
        inner[last] = load_yaml(value)
    except ValueError as error:
        fail(f"--set {setting}: {error}", status=2)
