"""The end of a command that fails."""

from typing import NoReturn

import typer


def fail(message: str, status: int = 1) -> NoReturn:
    """Print the reason on stderr and exit with this code (2: the command line itself is wrong)."""
    typer.echo(f"loray: {message}", err=True)
    raise typer.Exit(status)
