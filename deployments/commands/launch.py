"""`loray serve`: a config's file, or a model and options."""

from pathlib import Path
from typing import Any

import typer
import yaml

from deployments.commands import plain, serve
from deployments.commands.failing import fail

_SUFFIXES = (".yaml", ".yml")


def launch(
    what: str, options: dict[str, Any], print_only: bool, dashboard: bool, drain_seconds: float
) -> None:
    """Serve it until Ctrl-C; print_only: print the config instead.

    options: fields of plain.Options that were given; a yaml says all of that itself.
    """
    if Path(what).suffix in _SUFFIXES:
        if options:
            fail("options go with a model; with a config, write them into the yaml", status=2)
        if print_only:
            typer.echo(Path(what).read_text(encoding="utf-8"), nl=False)
        else:
            serve.serve_file(Path(what), what, dashboard, drain_seconds)
        return
    config = plain.plain_config(plain.Options(what, **options))
    if print_only:
        typer.echo(yaml.safe_dump(config, sort_keys=False), nl=False)
        return
    plain.fetch(config)
    serve.serve_config(config, what, dashboard, drain_seconds)
