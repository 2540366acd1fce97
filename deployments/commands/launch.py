"""`loray serve`: a config's file, or a model and options."""

from pathlib import Path
from typing import Any

import typer
import yaml

from deployments.commands import plain, serve
from deployments.commands.failing import fail

_SUFFIXES = (".yaml", ".yml")


def launch(
    model: str, options: dict[str, Any], print_only: bool, dashboard: bool, drain_seconds: float
) -> None:
    """Serve a model or a yaml until Ctrl-C.

    options: the given fields of `plain.Options`; none with a yaml.
    print_only: print the config instead.
    """
    if Path(model).suffix in _SUFFIXES:
        if options:
            fail("options go with a model; with a config, write them into the yaml", status=2)
        if print_only:
            typer.echo(Path(model).read_text(encoding="utf-8"), nl=False)
        else:
            serve.serve_file(Path(model), model, dashboard, drain_seconds)
        return
    config = plain.plain_config(plain.Options(model, **options))
    if print_only:
        typer.echo(yaml.safe_dump(config, sort_keys=False), nl=False)
        return
    plain.fetch(config)
    serve.serve_config(config, model, dashboard, drain_seconds)
