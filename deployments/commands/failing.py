"""How a command ends that cannot do what was asked."""

from typing import NoReturn

import typer


def fail(message: str, status: int = 1) -> NoReturn:
    """Say why on stderr and end with this exit code (2: the command line itself is wrong)."""
    typer.echo(f"loray: {message}", err=True)
    raise typer.Exit(status)
