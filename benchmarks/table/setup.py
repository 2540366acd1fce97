"""What a group's servers need: the files on disk, our yaml, a peer's command."""

import argparse
import fcntl
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.loading import has_weights
from benchmarks.stored import mark_stored
from benchmarks.table.groups import BASE, PAGE_ROWS, Play, RowGroup, rank_rows, written
from benchmarks.workload import (
    SHAPES,
    WorkloadRecipe,
    adapter_parameters,
    expert_parameters,
    is_model,
    is_written,
    projection_sizes,
)

HOST = "127.0.0.1"
KIND_OPTIONS = {
    "a": "--adapters",
    "m": "--mixed-adapters",
    "s": "--small-adapters",
    "d": "--dora-adapters",
    "v": "--activated-adapters",
    "e": "--expert-adapters",
}
"""Of benchmarks.workload: how many adapters, by the first letter of their names."""
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
HOST_SHARE, HOST_SPARE = 1.15, 2**28
"""Of the host tier: what chunks lose at their ends, and room besides."""

INGRESS_REPLICAS, MAX_STEP_TOKENS, MAX_RUNNING = 2, 2048, 256
CPUS = 0.1
"""Of each actor, so that they fit whatever machine there is."""

WORDS, JSON_PIECES, SPECIAL = 120_000, 1400, 256
"""Tokens that prompts are made of; what a tokenizer that spells JSON keeps; the last tokens."""


class SetupError(ValueError):
    """Something that cannot be measured here; the message says what to do."""


VLLM = (
    "{python} -m vllm.entrypoints.openai.api_server --model {model} --served-model-name base"
    " --load-format dummy --dtype {dtype} --host {host} --port {port} --max-model-len 4096"
    " --gpu-memory-utilization 0.85 --tensor-parallel-size {gpus} --no-enable-log-requests"
)
PEERS: Mapping[str, tuple[str, str]] = {
    "vllm": (
        VLLM,
        VLLM + " --enable-lora --max-loras {slots} --max-lora-rank {max_rank}"
        " --max-cpu-loras {adapters} --lora-modules {lora_modules}",
    )
}
"""Commands by name: for the base model alone, and with adapters."""


@dataclass(frozen=True)
class Setup:
    """What the command line says about all groups.

    work: where models and adapters are written. layers: of the checkpoint that starts load.
    settings: "dotted.key=value" over the application's args.
    stored: how checkpoints with random weights say that they are quantised; None: they are not.
    """

    work: Path
    shape: str = "llama3-8b"
    device: str = "cuda"
    dtype: str = "bfloat16"
    layers: int | None = None
    port: int = 8000
    settings: tuple[str, ...] = ()
    stored: str | None = None

    @property
    def url(self) -> str:
        """Where servers answer."""
        return f"http://{HOST}:{self.port}"

    def shape_of(self, group: RowGroup) -> str:
        """The group's shape, or a tiny one for tests."""
        return self.shape if self.shape == "tiny" else group.shape or self.shape

    def model_of(self, group: RowGroup) -> Path:
        """The folder of a group's model."""
        if self.stored and not group.weights:
            return self.work / f"{self.numbers_of(group).name}-{self.stored}"
        return self.numbers_of(group)

    def numbers_of(self, group: RowGroup) -> Path:
        """The folder of a group's model as it is before it is quantised."""
        shape = self.shape_of(group)
        if group.weights:
            return self.work / f"{shape}-weights{f'-{self.layers}' if self.layers else ''}"
        return self.work / (f"{shape}-json" if group.json else shape)

    def adapters_of(self, group: RowGroup) -> Path:
        """The folder of adapters, shared by all models of a shape."""
        return self.work / self.shape_of(group) / "adapters"

    def words(self, group: RowGroup) -> str:
        """What rows must share to be compared."""
        layers = [f"{self.layers} layers"] if group.weights and self.layers else []
        stored = [self.stored] if self.stored and not group.weights else []
        return ", ".join([self.shape, self.dtype, self.device, *layers, *stored, *self.settings])

    def vocabulary_of(self, group: RowGroup) -> int:
        """Words that every prompt's tokens are drawn from."""
        size: int = SHAPES[self.shape_of(group)]["vocab_size"]
        return min(WORDS, size - (JSON_PIECES if group.json else 0) - SPECIAL)


def write_files(setup: Setup, group: RowGroup, plays: Sequence[Play]) -> None:
    """Write what is missing of model, weights and adapters, in processes of their own.

    They may use the GPU for it and leave nothing on it. SetupError when the disk is too small.
    """
    wanted = written(plays)
    shape, folder = setup.shape_of(group), setup.numbers_of(group)
    # A server wants its root of adapters to be there, for base rows too.
    setup.adapters_of(group).mkdir(parents=True, exist_ok=True)
    missing = missing_of(setup, group, wanted)
    check_space(setup, group, missing)
    if group.weights:
        if not is_loadable(setup, group):
            _run(["benchmarks.loading", *_weights(setup, group), "--write-only"])
    elif not is_model(folder, shape):
        spelled = ["--json"] if group.json else []
        _run(["benchmarks.workload", str(folder), "--shape", shape, "--adapters", "0", *spelled])
    if setup.stored and folder != setup.model_of(group):
        beside = shutil.ignore_patterns("adapters")
        shutil.copytree(folder, setup.model_of(group), ignore=beside, dirs_exist_ok=True)
        mark_stored(setup.model_of(group), setup.stored)
    if missing:
        made = [str(setup.work / shape), "--shape", shape]
        for letter, option in KIND_OPTIONS.items():
            made += [option, str(sum(each.name[0] == letter for each in wanted))]
        _run(["benchmarks.workload", *made])


def missing_of(
    setup: Setup, group: RowGroup, wanted: Sequence[WorkloadRecipe]
) -> list[WorkloadRecipe]:
    """The adapters that are still to be written."""
    shape, folder = setup.shape_of(group), setup.adapters_of(group)
    return [each for each in wanted if not is_written(folder / each.name, shape, each.rank)]


def is_loadable(setup: Setup, group: RowGroup) -> bool:
    """Whether the group's weights are there."""
    shape = setup.shape_of(group)
    return has_weights(setup.model_of(group), shape, setup.layers, setup.dtype)


def _run(module: Sequence[str]) -> str:
    """Run one of our modules to its end; returns what it printed."""
    command = [sys.executable, "-m", *module]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SetupError(f"{module[0]} failed:\n{done.stderr[-2000:]}")
    return done.stdout


@contextmanager
def claimed(setup: Setup, name: str) -> Iterator[None]:
    """Hold a group's files under `work` alone; SetupError while another table has them."""
    path = setup.work / f"{name}.lock"
    setup.work.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = (
                f"another table plays {name} in {setup.work}: give this one a --work of its own"
            )
            raise SetupError(message) from None
        yield


def check_space(setup: Setup, group: RowGroup, missing: Sequence[WorkloadRecipe]) -> None:
    """SetupError when what is missing does not fit the disk."""
    shape = setup.shape_of(group)
    need = sum(_bytes_on_disk(shape, each) for each in missing)
    if group.weights and not is_loadable(setup, group):
        need += _weight_bytes(shape, setup)
    setup.work.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(setup.work).free
    if need > free:
        raise SetupError(
            f"{group.name} needs {need / 1e9:.0f} GB under {setup.work}, {free / 1e9:.0f} GB are "
            "free: name another disk with --work, or choose fewer cases"
        )


def _bytes_on_disk(shape: str, recipe: WorkloadRecipe) -> int:
    per_row = adapter_parameters(shape, 1)
    if recipe.targets:
        sizes = projection_sizes(shape).items()
        aimed = sum(i + o for name, (i, o) in sizes if name.split(".")[-1] in recipe.targets)
        per_row = aimed * int(SHAPES[shape]["num_hidden_layers"])
    if recipe.kind == "experts":
        per_row += expert_parameters(shape, 1)
    return 2 * recipe.rank * per_row


def _weight_bytes(shape: str, setup: Setup) -> int:
    config = SHAPES[shape]
    layers = setup.layers or config["num_hidden_layers"]
    matrices = layers * sum(i * o for i, o in projection_sizes(shape).values())
    ends = 2 * config["vocab_size"] * config["hidden_size"]
    return int((matrices + ends) * ITEM_BYTES[setup.dtype])


def host_bytes(setup: Setup, group: RowGroup, plays: Iterable[Play]) -> int:
    """A host tier for all the group's adapters, on each rank; small ones find room if they can."""
    shape, item = setup.shape_of(group), ITEM_BYTES[setup.dtype]
    ranks = [rank_rows(recipe) for recipe in written(plays) if not recipe.targets]
    rows = [-(-rank // PAGE_ROWS) * PAGE_ROWS for rank in ranks]
    held = sum(adapter_parameters(shape, row, group.gpus) for row in rows)
    if group.expert_pages:
        held += expert_parameters(shape, group.expert_pages * PAGE_ROWS)
    return int(held * item * HOST_SHARE) + HOST_SPARE


def server_config(setup: Setup, group: RowGroup) -> dict[str, Any]:
    """The Serve config of one group, the same for any of its cases."""
    model = {"id": str(setup.model_of(group)), "name": BASE, "dtype": setup.dtype}
    adapters = {
        "default_source": "local",
        "local_roots": [str(setup.adapters_of(group))],
        "device_pages": group.pages,
        "max_device_adapters": group.slots,
        "max_rank": group.max_rank,
        "host_bytes": host_bytes(setup, group, group.plays),
    }
    if group.expert_pages is not None:
        adapters["expert_pages"] = group.expert_pages
    args: dict[str, Any] = {
        "engine": {
            "model": {**model, "load_format": "safetensors" if group.weights else "dummy"},
            "tensor_parallel": group.gpus,
            "device": setup.device,
            "limits": {"max_step_tokens": MAX_STEP_TOKENS, "max_running": MAX_RUNNING},
            "adapters": adapters,
        },
        "driver_cpus": CPUS,
        "rank_cpus": CPUS,
        "ingress_cpus": CPUS,
    }
    for setting in setup.settings:
        change(args, setting)
    return {
        "http_options": {"host": HOST, "port": setup.port},
        "applications": [
            {
                "name": "loray",
                "route_prefix": "/",
                "import_path": "deployments.app:build",
                "args": args,
                "deployments": [{"name": "Ingress", "num_replicas": INGRESS_REPLICAS}],
            }
        ],
    }


def change(args: dict[str, Any], setting: str) -> None:
    """Apply "engine.limits.max_running=64"; SetupError if it is not of that form."""
    path, equals, value = setting.partition("=")
    if not equals or not path:
        raise SetupError(f"--set {setting}: write KEY=VALUE, as in engine.limits.max_running=64")
    *above, last = path.split(".")
    for name in above:
        args = args.setdefault(name, {})
        if not isinstance(args, dict):
            raise SetupError(f"--set {setting}: {name} has no settings below it")
    args[last] = yaml.safe_load(value)


def our_command(setup: Setup, group: RowGroup) -> list[str]:
    """`loray serve` over a yaml that is written for this group."""
    path = setup.work / f"{group.name}.yaml"
    path.write_text(yaml.safe_dump(server_config(setup, group), sort_keys=False))
    return [sys.executable, "-m", "deployments.cli", "serve", str(path), "--no-dashboard"]


def peer_command(setup: Setup, group: RowGroup, plays: Sequence[Play], template: str) -> list[str]:
    """A peer's command with this group's values instead of {names}; SetupError for others."""
    wanted, folder = written(plays), setup.adapters_of(group)
    values = {
        "python": sys.executable,
        "model": str(setup.model_of(group)),
        "dtype": setup.dtype,
        "host": HOST,
        "port": str(setup.port),
        "gpus": str(group.gpus),
        "slots": str(min(group.slots, max(1, len(wanted)))),
        "max_rank": str(max((each.rank for each in wanted), default=0)),
        "adapters": str(len(wanted)),
        "lora_modules": " ".join(f"{each.name}={folder / each.name}" for each in wanted),
        "work": str(setup.work),
    }
    try:
        return shlex.split(template.format_map(values))
    except (KeyError, IndexError, ValueError) as fault:
        raise SetupError(
            f"--peer: {fault} is not known; a peer's command may hold "
            + ", ".join(f"{{{name}}}" for name in values)
        ) from fault


def measure_loading(setup: Setup, group: RowGroup) -> dict[str, Any]:
    """benchmarks.loading over the group's weights, in a process of its own; returns its row."""
    said = _run(["benchmarks.loading", *_weights(setup, group), "--device", setup.device])
    row: dict[str, Any] = json.loads(said.splitlines()[-1])
    return row


def _weights(setup: Setup, group: RowGroup) -> list[str]:
    """Which checkpoint, for benchmarks.loading."""
    arguments = [
        str(setup.model_of(group)),
        "--shape",
        setup.shape_of(group),
        "--dtype",
        setup.dtype,
    ]
    return arguments + (["--layers", str(setup.layers)] if setup.layers else [])


def setup_of(parsed: argparse.Namespace) -> Setup:
    """What the command line says."""
    return Setup(
        work=parsed.work,
        shape=parsed.shape,
        device=parsed.device,
        dtype=parsed.dtype,
        layers=parsed.layers,
        port=parsed.port,
        settings=tuple(parsed.set or ()),
        stored=parsed.stored,
    )
