"""`loray`: the commands and their options.

The modules in deployments/commands are imported when their command runs, so that `loray --help` is
fast.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from configs.env import client_setting
from configs.version import VERSION

app = typer.Typer(
    help="One base model and thousands of LoRA adapters, served on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
adapters = typer.Typer(
    help="The adapters of a running server: list, load, unload, pin.", no_args_is_help=True
)
app.add_typer(adapters, name="adapters")

_ADMIN = "LORAY_ADMIN_KEY"
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

Url = Annotated[
    str | None,
    typer.Option(help="URL of the server; default: $LORAY_URL, else http://127.0.0.1:8000"),
]
ApiKey = Annotated[
    str | None, typer.Option(help="If the server needs one; default: $LORAY_API_KEY")
]
AdminKey = Annotated[
    str | None, typer.Option(help="If the server needs one; default: $LORAY_ADMIN_KEY")
]
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="[source:]id[@revision]")]
Adapter = Annotated[str, typer.Option(help="Name of the adapter; default: the base model")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens of an answer")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(VERSION)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print it and end"),
    ] = False,
) -> None:
    """The options before a command; its text is the app's."""


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|CONFIG.yaml", help="a folder, a hub id, or a config")
    ] = "serve_config.yaml",
    adapters: Annotated[
        list[Path] | None, typer.Option(help="Folder whose adapters are served (repeatable)")
    ] = None,
    tp: Annotated[int | None, typer.Option(help="GPUs, or CPU processes, of one replica")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: what is here")] = None,
    host: Annotated[str | None, typer.Option(help="0.0.0.0: listen to other machines too")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; default: 8000")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting (repeatable), as in "
                     "engine.limits.max_running=64"),
    ] = None,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resulting yaml and end")
    ] = False,
    no_dashboard: Annotated[
        bool, typer.Option("--no-dashboard", help="Start Ray without its dashboard")
    ] = False,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests may go on after SIGTERM")
    ] = 20.0,
) -> None:  # fmt: skip
    """Start Ray here and serve a model, or a yaml, until Ctrl-C."""
    from deployments.commands import launch

    options = {
        "adapters": adapters and tuple(adapters),
        "tensor_parallel": tp,
        "device": device,
        "host": host,
        "port": port,
        "settings": set_ and tuple(set_),
    }
    given = {name: value for name, value in options.items() if value is not None}
    launch.launch(model, given, print_config, not no_dashboard, drain_seconds)


@app.command()
def batch(
    source: Annotated[
        Path, typer.Argument(metavar="IN.jsonl", help="Requests, as for /v1/batches")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="Where the results go")],
    model: Annotated[
        str, typer.Argument(metavar="MODEL|CONFIG.yaml", help="a folder, a hub id, or a config")
    ] = "serve_config.yaml",
    adapters: Annotated[
        list[Path] | None, typer.Option(help="Folder whose adapters are served (repeatable)")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Engines that share the lines")] = 1,
    tp: Annotated[int | None, typer.Option(help="GPUs, or CPU processes, of one replica")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: what is here")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting (repeatable)"),
    ] = None,
    address: Annotated[str | None, typer.Option(help="A Ray cluster; default: one here")] = None,
) -> None:
    """Answer a file of requests without a server; run it again to go on."""
    from deployments.commands import batch as command

    options = {
        "adapters": adapters and tuple(adapters),
        "tensor_parallel": tp,
        "device": device,
        "settings": set_ and tuple(set_),
    }
    given = {name: value for name, value in options.items() if value is not None}
    command.run(source, target, model, given, replicas, address)


@app.command()
def warm(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|CONFIG.yaml", help="a folder, a hub id, or a config")
    ] = "serve_config.yaml",
    into: Annotated[Path, typer.Option(help="Folder of kernels; added to")] = Path("kernels"),
    tp: Annotated[int | None, typer.Option(help="GPUs of one replica; here one is enough")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting (repeatable)"),
    ] = None,
) -> None:
    """Compile a server's GPU kernels into a folder that an image can carry."""
    from deployments.commands import warm as command

    options = {"tensor_parallel": tp, "settings": set_ and tuple(set_)}
    given = {name: value for name, value in options.items() if value is not None}
    command.warm(model, given, into)


@app.command()
def generate(
    prompt: str,
    adapter: Adapter = "",
    url: Url = None,
    api_key: ApiKey = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
) -> None:
    """Continue a prompt; print the text as it comes."""
    from deployments.commands import ask

    body = _body(adapter, max_tokens, temperature)
    ask.generate(_server(url, api_key), prompt, body)


@app.command()
def chat(
    adapter: Adapter = "",
    url: Url = None,
    api_key: ApiKey = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with")] = None,
) -> None:
    """Talk to the model; Ctrl-C stops an answer, Ctrl-D ends."""
    from deployments.commands import ask

    body = _body(adapter, max_tokens, temperature)
    ask.ChatSession(_server(url, api_key), body, system).run(input)


@app.command()
def check_adapter(
    path: Annotated[Path, typer.Argument(help="a folder as PEFT saves it")],
    model: Annotated[str, typer.Option(help="The base model's folder or hub id, or a config")],
    max_rank: Annotated[int | None, typer.Option(help="As on the server; default: 128")] = None,
    vocabulary: Annotated[
        bool | None, typer.Option(help="Whether the server adapts embedding and head")
    ] = None,
) -> None:
    """Check whether an adapter would be served exactly; else print every reason (exit code 1)."""
    from deployments.commands import check

    check.check(path, model, {"max_rank": max_rank, "vocabulary": vocabulary})


@app.command()
def check_config(
    path: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="a server's yaml")],
) -> None:
    """Check a yaml without starting anything; print every fault in it (exit code 1)."""
    from deployments.commands import check_config

    check_config.check_config(path)


@app.command(context_settings=_PASSED_ON)
def bench(context: typer.Context, url: Url = None, api_key: ApiKey = None) -> None:
    """Measure a running server; further options are those of `python -m benchmarks.serving`."""
    from deployments.commands import bench

    key = client_setting("LORAY_API_KEY", api_key)
    bench.bench(_url(url), key, context.args)


@adapters.command("list")
def list_adapters(
    url: Url = None,
    admin_key: AdminKey = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="As JSON, as the server sends it")
    ] = False,
) -> None:
    """List every adapter that a replica knows, with its state and requests."""
    from deployments.commands import adapters

    adapters.show(_server(url, admin_key, _ADMIN), as_json)


@adapters.command()
def load(
    names: Names,
    pin: Annotated[bool, typer.Option("--pin", help="Keep them on the device")] = False,
    api_token: Annotated[str | None, typer.Option(help="Token of the hub to fetch with")] = None,
    url: Url = None,
    admin_key: AdminKey = None,
) -> None:
    """Fetch and stage adapters on all replicas, before the first request for them."""
    from deployments.commands import adapters

    adapters.load(_server(url, admin_key, _ADMIN), names, pin, api_token)


@adapters.command()
def unload(names: Names, url: Url = None, admin_key: AdminKey = None) -> None:
    """Unload adapters from all replicas once their requests have ended."""
    from deployments.commands import adapters

    adapters.unload(_server(url, admin_key, _ADMIN), names)


@adapters.command()
def pin(names: Names, url: Url = None, admin_key: AdminKey = None) -> None:
    """Keep adapters on the device."""
    from deployments.commands import adapters

    adapters.pin(_server(url, admin_key, _ADMIN), names, True)


@adapters.command()
def unpin(names: Names, url: Url = None, admin_key: AdminKey = None) -> None:
    """Let adapters leave the device again."""
    from deployments.commands import adapters

    adapters.pin(_server(url, admin_key, _ADMIN), names, False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; SystemExit carries its exit code."""
    app(args=arguments, prog_name="loray")


def _url(given: str | None) -> str:
    return client_setting("LORAY_URL", given) or "http://127.0.0.1:8000"


def _server(url: str | None, key: str | None, setting: str = "LORAY_API_KEY") -> Any:
    from deployments.commands.server import Server

    return Server(_url(url), client_setting(setting, key))


def _body(adapter: str, max_tokens: int | None, temperature: float | None) -> dict[str, Any]:
    """The fields of every request; None leaves a field to the server."""
    options = {"max_tokens": max_tokens, "temperature": temperature}
    given = {name: value for name, value in options.items() if value is not None}
    return {"model": adapter, **given}


if __name__ == "__main__":
    main()
