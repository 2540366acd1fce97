"""What a decode step costs by the kind of its adapters: `python -m benchmarks.adapter_steps`.

One rank's runner is driven directly, with random base weights: `--rows` rows over `--adapters`
adapters of one kind, each step launched while the one before it runs, as a server does. Kinds come
by turns, so that a clock that changes meets all of them. It needs one GPU.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file

from benchmarks.stored import STORED, mark_stored
from benchmarks.workload import SHAPES, write_adapter, write_model
from configs.adapters import AdaptersConfig
from configs.engine import CacheConfig, Device, EngineConfig, LimitsConfig
from configs.model import DType, LoadFormat, ModelConfig, Quantize
from configs.wire.adapters import AdapterKey, FetchedAdapter
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.batch import ForwardBatch, StepOutput
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank

RANK = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
PROMPT, AT_ONCE = 512, 4
"""Tokens of each row before it decodes, and rows of one prefill."""

BLOCKS = 80
"""Cache blocks of each row."""

KINDS = ("base", "plain", "dora", "biased", "ends", "norms", "tokens")
OF_EXPERTS = ("experts", "few")
"""Kinds over mixtures, which name them."""

FEW = 4
"""Experts that an adapter of the kind "few" adapts."""


def write_kind(folder: Path, shape: str, kind: str, targets: Sequence[str] = TARGETS) -> None:
    """Write an adapter of a kind: plain LoRA, and what comes on top of it.

    ends: of embedding and head. norms: with all norms of its own. tokens: with trained tokens.
    experts: of all routed experts. few: of some.
    """
    write_adapter(folder, shape, RANK, 1, targets, "experts" if kind == "experts" else "")
    sizes = SHAPES[shape]
    vocab, hidden = sizes["vocab_size"], sizes["hidden_size"]
    file, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors, fields = load_file(file), json.loads(config.read_text())
    for name, b in list(tensors.items()):
        if name.endswith("lora_B.weight"):
            module, rows = name.removesuffix(".lora_B.weight"), len(b)
            if kind == "dora":
                tensors[f"{module}.lora_magnitude_vector"] = torch.rand(rows) + 0.5
            elif kind == "biased":
                tensors[f"{module}.lora_B.bias"] = torch.randn(rows) / 8
    if kind == "ends":
        module = "base_model.model.model.embed_tokens.lora_embedding"
        tensors[f"{module}_A"] = torch.randn(RANK, vocab)
        tensors[f"{module}_B"] = torch.randn(hidden, RANK) / 50
        tensors["base_model.model.lm_head.lora_A.weight"] = torch.randn(RANK, hidden) / 64
        tensors["base_model.model.lm_head.lora_B.weight"] = torch.randn(vocab, RANK) / 50
        fields["target_modules"] += ["embed_tokens", "lm_head"]
    if kind == "few":
        fields["target_modules"] += ["gate_proj", "up_proj", "down_proj"]
        inner = sizes["moe_intermediate_size"]
        widths = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner)}
        widths["down_proj"] = inner, hidden
        for layer, expert in product(range(sizes["num_hidden_layers"]), range(FEW)):
            path = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}"
            for name, (inputs, outputs) in widths.items():
                tensors[f"{path}.{name}.lora_A.weight"] = torch.randn(RANK, inputs) / inputs**0.5
                tensors[f"{path}.{name}.lora_B.weight"] = torch.randn(outputs, RANK) / 50
    if kind == "norms":
        fields["modules_to_save"] = ["norm"]
        layers = [f"layers.{i}." for i in range(sizes["num_hidden_layers"])]
        names = [f"{at}{n}_layernorm" for at in layers for n in ("input", "post_attention")]
        for name in (*names, "norm"):
            tensors[f"base_model.model.model.{name}.weight"] = torch.rand(hidden) + 0.5
    if kind == "tokens":
        ends = ("model.embed_tokens", "lm_head")
        fields["trainable_token_indices"] = {end: [*range(RANK)] for end in ends}
        for end in ends:
            name = f"base_model.model.{end}.token_adapter.trainable_tokens_delta"
            tensors[name] = torch.randn(RANK, hidden) / 64
    save_file(tensors, file)
    fields |= {"use_dora": kind == "dora", "lora_bias": kind == "biased"}
    config.write_text(json.dumps(fields))


def make_runner(
    folder: Path,
    shape: str,
    rows: int,
    adapters: int,
    vocabulary: bool,
    weights: str = "bfloat16",
    expert_pages: int = 0,
) -> ModelRunner:
    """Return a runner with random weights, and with room for so many rows and adapters."""
    write_model(folder, shape)
    if weights in STORED:
        mark_stored(folder, weights)
    quantize = Quantize.FP8 if weights == "fp8" else Quantize.NONE
    pages = -(-(RANK + 2) // 8)
    config = EngineConfig(
        model=ModelConfig(
            id=str(folder),
            load_format=LoadFormat.DUMMY,
            dtype=DType.BFLOAT16,
            quantize=quantize,
        ),
        device=Device.CUDA,
        limits=LimitsConfig(max_running=rows, max_step_tokens=2048, max_total_tokens=1024),
        cache=CacheConfig(num_blocks=rows * BLOCKS),
        adapters=AdaptersConfig(
            device_pages=adapters * pages,
            max_device_adapters=adapters,
            max_rank=RANK,
            vocabulary=vocabulary,
            expert_pages=expert_pages,
        ),
    )
    return load_paged(config, SingleRank(), pick_device(Device.CUDA)).allocate()


class Decoding:
    """Rows that decode, of adapters in all slots."""

    def __init__(self, runner: ModelRunner, rows: int, adapters: int) -> None:
        self._runner = runner
        self._rows = rows
        self._adapters = adapters
        self._position = PROMPT

    def load(self, folder: Path, key: AdapterKey) -> None:
        """Load one adapter into every slot, on pages of its own; print what one load takes."""
        start = time.perf_counter()
        shape = self._runner.stage(FetchedAdapter(key, folder.name, str(folder), folder.name))
        staged, began = time.perf_counter() - start, list[float]()
        start = time.perf_counter()
        for slot in range(self._adapters):
            pages = [list(range(slot * n, (slot + 1) * n)) for n in shape.num_pages]
            before = time.perf_counter()
            event = self._runner.load_adapter(key, slot, pages)
            began.append(time.perf_counter() - before)
            event.wait()
        loaded = (time.perf_counter() - start) / self._adapters
        print(
            f"{folder.name}: {shape.host_bytes / 2**20:.0f} MiB staged in {staged:.2f} s, a load "
            f"{loaded * 1e3:.1f} ms, {max(began) * 1e3:.1f} of the thread that launches steps"
        )

    def start(self, adapted: bool) -> None:
        """Compute every row's prompt."""
        self._position = PROMPT
        for first in range(0, self._rows, AT_ONCE):
            own = range(first, min(first + AT_ONCE, self._rows))
            joins = [
                RequestJoin(
                    i, [5] * PROMPT, PROMPT, i % self._adapters if adapted else -1, Sampling()
                )
                for i in own
            ]
            rows = [StepRow(i, 0, PROMPT, self._blocks(i, 0, PROMPT), True) for i in own]
            self._runner.step(ForwardBatch(joins, rows)).wait()

    def step(self) -> StepOutput:
        """Launch one decode step of all rows."""
        start = self._position
        self._position += 1
        rows = [
            StepRow(i, start, 1, self._blocks(i, start, start + 1), True) for i in range(self._rows)
        ]
        return self._runner.step(ForwardBatch([], rows))

    def _blocks(self, row: int, start: int, end: int) -> list[int]:
        """Return the blocks in which none of a row's tokens before `start` are."""
        size = self._runner.report.block_size
        return [row * BLOCKS + block for block in range(-(-start // size), -(-end // size))]

    def milliseconds(self, steps: int) -> float:
        """Return the mean time of so many steps, one launched ahead."""
        last = self.step()
        last.wait()
        start = time.perf_counter()
        for _ in range(steps):
            ahead = self.step()
            last.wait()
            last = ahead
        last.wait()
        return (time.perf_counter() - start) / steps * 1e3


def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """Print each kind's milliseconds a step: the median over its turns, and all of them."""
    sizes = arguments.shape, arguments.rows, arguments.adapters
    pages = arguments.adapters * -(-RANK // 8) * (not {*OF_EXPERTS}.isdisjoint(arguments.kinds))
    kinds = arguments.vocabulary, arguments.weights, pages
    runner = make_runner(folder / "model", *sizes, *kinds)
    print(f"{arguments.weights}: {runner.report.weight_bytes_resident / 1e9:.2f} GB of weights")
    decoding = Decoding(runner, arguments.rows, arguments.adapters)
    found: dict[str, list[float]] = {kind: [] for kind in arguments.kinds}
    for kind in arguments.kinds:
        if kind != "base":
            write_kind(folder / kind, arguments.shape, kind, arguments.targets)
    for turn in range(arguments.turns):
        for number, kind in enumerate(arguments.kinds, 1):
            if kind != "base":
                decoding.load(folder / kind, AdapterKey(number))
            decoding.start(kind != "base")
            runner.num_steps = runner.num_captured = 0
            found[kind].append(decoding.milliseconds(arguments.steps))
            if turn == 0:
                print(f"{kind}: {runner.num_captured} of {runner.num_steps} steps captured")
    for kind, times in found.items():
        each = " ".join(f"{ms:.3f}" for ms in times)
        print(f"{kind:8} {statistics.median(times):7.3f} ms a step   ({each})")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on the GPU that is here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--kinds", nargs="+", choices=(*KINDS, *OF_EXPERTS), default=KINDS)
    parser.add_argument("--targets", nargs="+", default=TARGETS, help="modules of the adapters")
    parser.add_argument("--weights", choices=("bfloat16", "fp8", *STORED), default="bfloat16")
    parser.add_argument("--vocabulary", action="store_true", help="let adapters change the ends")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    parsed = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    with TemporaryDirectory() as folder:
        measure(parsed, Path(folder))


if __name__ == "__main__":
    main()
