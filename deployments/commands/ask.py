"""`loray generate` and `loray chat`: stream answers to the terminal."""

from collections.abc import Callable, Generator
from contextlib import closing

import typer

from deployments.commands.server import Json, Server

_HELP = "/adapter NAME changes the adapter (no name: the base model), /clear forgets, /exit ends"


def generate(server: Server, prompt: str, body: Json) -> None:
    """Print the continuation of a prompt; Ctrl-C ends it early."""
    events = server.stream("/v1/completions", {**body, "prompt": prompt})
    _print_all(events, lambda choice: choice["text"])


class ChatSession:
    """A conversation: the messages so far, and the model."""

    def __init__(self, server: Server, body: Json, system: str | None = None) -> None:
        """body: the fields of every request, the model and its parameters."""
        self._server = server
        self._body = body
        self._opening: list[Json] = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def run(self, read: Callable[[str], str]) -> None:
        """Read and answer messages; Ctrl-C ends an answer, and at the prompt the chat."""
        typer.echo(_HELP, err=True)
        while True:
            try:
                line = read(f"{self._body['model'] or 'base'}> ").strip()
            except (EOFError, KeyboardInterrupt):
                typer.echo("", err=True)
                return
            if line == "/exit":
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        """Send a message and print the answer; after a refusal the conversation is unchanged."""
        messages = [*self.messages, {"role": "user", "content": line}]
        events = self._server.stream("/v1/chat/completions", {**self._body, "messages": messages})
        try:
            answer = _print_all(events, lambda choice: choice["delta"].get("content") or "")
        except typer.Exit:
            return
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _command(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if command == "/clear":
            self.messages = list(self._opening)
        elif command == "/adapter":
            self._body = {**self._body, "model": rest.strip()}
        else:
            typer.echo(_HELP, err=True)


def _print_all(events: Generator[Json, None, None], text: Callable[[Json], str]) -> str:
    """Print an answer as it comes and return it; after Ctrl-C, return the part that came."""
    texts: list[str] = []
    # Closing ends the request, so that the server stops generating.
    with closing(events):
        try:
            for event in events:
                for choice in event["choices"]:
                    texts.append(text(choice))
                    typer.echo(texts[-1], nl=False)
        except KeyboardInterrupt:
            typer.echo(" [stopped]", nl=False, err=True)
    typer.echo("")
    return "".join(texts)
