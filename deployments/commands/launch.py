"""`loray serve`: a config's file, or a model and options."""

from pathlib import Path
from typing import Any

import typer
import yaml

from deployments.commands import plain, serve
from deployments.commands.check_config import find_config, read_config
from deployments.commands.failing import fail

_SUFFIXES = (".yaml", ".yml")
_ADDRESS = frozenset({"host", "port"})


def launch(
    model: str, options: dict[str, Any], print_only: bool, dashboard: bool, drain_seconds: float
) -> None:
    """Serve a model or a yaml until Ctrl-C.

    options: the given fields of `plain.Options`; with a yaml only host and port.
    print_only: print the config instead.
    """
    is_file = Path(model).suffix in _SUFFIXES
    if is_file and not options:
        path = find_config(Path(model))
        if print_only:
            read_config(path)  # typer.Exit for a file that is none.
            typer.echo(path.read_text(encoding="utf-8"), nl=False)
        else:
            serve.serve_file(path, model, dashboard, drain_seconds)
        return
    if is_file:
        config = _moved(find_config(Path(model)), options)
    else:
        config = plain.plain_config(plain.Options(model, **options))
    if print_only:
        typer.echo(yaml.safe_dump(config, sort_keys=False), nl=False)
        return
    if not is_file:
        plain.fetch(config)
    serve.serve_config(config, model, dashboard, drain_seconds)


def _moved(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The yaml's config on another host or port."""
    if options.keys() - _ADDRESS:
        fail("beside --host and --port, options go with a model: write them into the yaml", 2)
    config = read_config(path)
    http = config.get("http_options") or {}
    return {**config, "http_options": {**http, **options} if isinstance(http, dict) else http}
