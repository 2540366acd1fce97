"""What drafts gain, and what wrong ones cost: `python -m benchmarks.speculation`.

One rank's runner under the real scheduler, in one process: random base weights with a head of
zeros, so that each answer is token 0 and repeats itself: the easiest text to look up. Of the
drafts found so, a share is made wrong on purpose. With `--heads`, Medusa heads of zeros guess it
instead, at their full cost, with `--eagle3` EAGLE-3 heads, with `--mtp` the layer behind the
shape's last one, and as many of their guesses are made wrong. As all tokens are alike, they choose
the same experts of a mixture. Each case is run with and without drafts, by turns. It needs one GPU,
or `--device cpu` with `--layers 1` (`--layers 4` for EAGLE-3).
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.workload import SHAPES, write_model
from configs.adapters import AdaptersConfig
from configs.engine import (
    AttentionKind,
    CacheConfig,
    CudaGraphs,
    Device,
    EngineConfig,
    LimitsConfig,
    SpeculationConfig,
    SpeculationKind,
)
from configs.model import LoadFormat, ModelConfig
from configs.wire.plan import StepPlan
from configs.wire.sampling import Sampling, Stopping
from deployments.rank.host import capacity_of
from deployments.rank.worker import step_result
from modeling.batch import ForwardBatch, StepOutput
from modeling.runner.guesses import GuessedRows
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from modeling.runner.paged import ModelRunner
from scheduler.admission.limits import Limits
from scheduler.drafts import Drafter
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from sharding.group import SingleRank

PROMPT = 512
"""Tokens of each prompt."""

DRAFT_VOCAB = 32000
"""Tokens that EAGLE-3 heads guess, as most that are published."""

PROMPTS_AT_ONCE = 16
"""Prompts of one step, so that most of an answer comes when all have begun."""


class GuessingDrafter(Drafter):
    """Drafts that end after a right token with a given chance: the next one is wrong."""

    def __init__(self, right: float, seed: int) -> None:
        super().__init__()
        self._share = right
        self._random = random.Random(seed)

    def find(
        self, tokens: Sequence[int], length: int, guessed: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return the draft, each token of it right with the same chance."""
        found = super().find(tokens, length, [0] * len(guessed))
        return tuple(t if self._random.random() < self._share else t + 1 for t in found)


class KnownText(Drafter):
    """Drafts of a text that is known, every sixth token wrong."""

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__()
        self._text = text

    def find(
        self, tokens: Sequence[int], length: int, guessed: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return what follows in the text."""
        known = len(tokens) + len(guessed)
        found = enumerate(self._text[known : known + length], known)
        return tuple(token ^ (position % 6 == 0) for position, token in found)


class Serving:
    """A runner under a scheduler, two plans in flight, as a driver and its rank have it."""

    def __init__(
        self, runner: ModelRunner, limits: Limits, right: float = 1.0, seed: int = 1
    ) -> None:
        """right: the share of heads' guesses that stay right; seed: which ones."""
        self._runner = runner
        spoil_guesses(runner, right, seed)
        self._scheduler = Scheduler(limits, capacity_of(runner.report))
        self._flying: deque[tuple[StepPlan, StepOutput]] = deque()
        self.num_steps = 0
        self.requests: list[Request] = []
        self._seconds: defaultdict[int, list[float]] = defaultdict(list)
        self._landed = time.perf_counter()

    def answer(self, tokens: int, drafters: Sequence[Drafter]) -> float:
        """Return the seconds from the first generated token of all rows to the last."""
        rows, requests = len(drafters), self.requests
        for index, drafter in enumerate(drafters):
            prompt = [5 + index, *range(5, 4 + PROMPT)]
            request = Request(("r", index), prompt, Sampling(), Stopping(tokens))
            request.drafter = drafter
            self._scheduler.add(request, 0.0)
            requests.append(request)
        self._run(lambda: all(each.num_generated for each in requests))
        start, known = time.perf_counter(), sum(each.num_generated for each in requests)
        self.num_steps = 0
        self._run(lambda: not self._scheduler.has_work)
        assert known < rows * tokens / 4
        return time.perf_counter() - start

    def step_seconds(self) -> dict[int, float]:
        """Return what the last steps took, by the length of their drafts: medians."""
        return {length: statistics.median(each) for length, each in sorted(self._seconds.items())}

    def _run(self, done: Callable[[], bool]) -> None:
        self._seconds.clear()
        while not done():
            plan = self._scheduler.schedule(time.monotonic())
            if not plan.empty:
                output = self._runner.step(ForwardBatch(plan.joins, plan.rows, plan.guesses))
                self._flying.append((plan, output))
                self.num_steps += 1
            if self._flying and (plan.empty or len(self._flying) == 2):
                oldest, launched = self._flying.popleft()
                result = step_result(oldest, launched.wait(), 0.0)
                rows = self._scheduler._flights[0].rows
                self._scheduler.apply(oldest, result, time.monotonic())
                length = max((len(row.drafts) for row in rows), default=0)
                self._seconds[length].append(time.perf_counter() - self._landed)
                self._landed = time.perf_counter()


def spoil_guesses(runner: ModelRunner, right: float, seed: int) -> None:
    """Make some of heads' guesses wrong, before rows follow them: this share stays right."""
    noise = torch.Generator(runner._device).manual_seed(seed)

    def spoiled(found: GuessedRows | None) -> GuessedRows | None:
        if found is None:
            return None
        shape, device = found.tokens.shape, found.tokens.device
        wrong = torch.rand(shape, generator=noise, device=device) >= right
        return replace(found, tokens=found.tokens + wrong)

    guess, drafts = type(runner)._guess, runner._drafts
    runner._guess = lambda *given: spoiled(guess(runner, *given))  # type: ignore[method-assign]
    if drafts is not None:
        follow = type(drafts).follow
        drafts.follow = lambda *given: spoiled(follow(drafts, *given))  # type: ignore[method-assign]


def write_heads(folder: Path, width: int, count: int) -> Path:
    """Write Medusa heads of version 2, all zeros, and return their folder."""
    folder.mkdir()
    tensors = {}
    for k in range(count):
        tensors[f"{k}.0.linear.weight"] = torch.zeros(width, width, dtype=torch.bfloat16)
        tensors[f"{k}.0.linear.bias"] = torch.zeros(width, dtype=torch.bfloat16)
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": count, "medusa_num_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_eagle3(folder: Path, model: dict[str, int]) -> Path:
    """Write EAGLE-3 heads of a model's shape, all zeros, and return their folder."""
    folder.mkdir()
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    size, inner, heads, kv_heads = (model[key] for key in keys)
    head_dim = model.get("head_dim") or size // heads
    vocab = min(DRAFT_VOCAB, model["vocab_size"])
    shapes = {
        **{f"self_attn.{name}_proj": (kv_heads * head_dim, 2 * size) for name in ("k", "v")},
        "self_attn.q_proj": (heads * head_dim, 2 * size),
        "self_attn.o_proj": (size, heads * head_dim),
        **{f"mlp.{name}_proj": (inner, size) for name in ("gate", "up")},
        "mlp.down_proj": (size, inner),
        **{name: (size,) for name in ("hidden_norm", "input_layernorm")},
        "post_attention_layernorm": (size,),
    }
    named = {f"midlayer.{name}.weight": shape for name, shape in shapes.items()}
    named |= {
        "fc.weight": (size, 3 * size),
        "norm.weight": (size,),
        "lm_head.weight": (vocab, size),
    }
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in named.items()}
    save_file(
        {**tensors, "d2t": torch.zeros(vocab, dtype=torch.int64)}, folder / "model.safetensors"
    )
    config = {key: model[key] for key in keys} | {"head_dim": head_dim, "draft_vocab_size": vocab}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_runner(
    folder: Path, options: argparse.Namespace
) -> tuple[ModelRunner, Callable[[], None]]:
    """Return a runner with a head of zeros, and what gives it the head's weights."""
    write_model(folder, options.shape, layers=options.layers)
    rows = max(options.rows)
    guessing: dict[str, object] = {"kind": SpeculationKind.PROMPT_LOOKUP}
    if options.heads:
        width = json.loads((folder / "config.json").read_text())["hidden_size"]
        named = str(write_heads(folder / "heads", width, options.heads))
        guessing = {"kind": SpeculationKind.MEDUSA, "model": named}
    if options.eagle3:
        shape = json.loads((folder / "config.json").read_text())
        named = str(write_eagle3(folder / "heads", shape))
        guessing = {"kind": SpeculationKind.EAGLE3, "model": named}
    if options.mtp:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "num_nextn_predict_layers": 1}))
        guessing = {"kind": SpeculationKind.MTP}
    total, step = PROMPT + options.tokens, min(rows, PROMPTS_AT_ONCE) * PROMPT
    config = EngineConfig(
        model=ModelConfig(id=str(folder), load_format=LoadFormat.DUMMY),
        device=Device(options.device),
        attention=AttentionKind(options.attention),
        # All rows are the base model's: half as many graphs, and the library's products.
        adapters=AdaptersConfig(enabled=False),
        # Prompts are not timed.
        cuda_graphs=CudaGraphs.DECODE,
        limits=LimitsConfig(max_running=rows, max_step_tokens=step, max_total_tokens=total),
        speculation=SpeculationConfig.model_validate(
            {**guessing, "max_tokens": options.drafts, "max_running": rows}
        ),
        cache=CacheConfig(num_blocks=rows * (total // 16 + 2), prefix_caching=False),
    )
    loading = load_paged(config, SingleRank(), pick_device(config.device))
    model = cast(nn.Module, loading.parts.weights.model)
    heads = [weight for name, weight in model.named_parameters() if "lm_head" in name]
    assert heads, "a model without a head of its own"
    kept = [weight.data.clone() for weight in heads]

    def restore() -> None:
        for weight, own in zip(heads, kept, strict=True):
            weight.data.copy_(own)

    for weight in heads:
        weight.data.zero_()
    return loading.allocate(), restore


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Print each case's tokens a second with drafts and without: medians over turns."""
    runner, restore_head = make_runner(folder, options)
    most = max(options.rows)
    step = min(most, PROMPTS_AT_ONCE) * PROMPT
    limits = Limits(max_step_tokens=step, max_running=most, prefix_caching=False)
    drafting = replace(limits, max_draft_tokens=options.drafts, max_drafting=most)
    for rows in options.rows:
        for right in options.right:
            rates: dict[str, list[float]] = {"without": [], "with": []}
            steps, lengths = {}, {}
            for turn in range(options.turns):
                for name, used in (("without", limits), ("with", drafting)):
                    serving = Serving(runner, used, right, turn)
                    drafters = [GuessingDrafter(right, turn * rows + i) for i in range(rows)]
                    seconds = serving.answer(options.tokens, drafters)
                    rates[name].append(rows * options.tokens / seconds)
                    steps[name] = serving.num_steps
                    lengths = serving.step_seconds()
            plain, speculated = (statistics.median(each) for each in rates.values())
            print(
                f"{rows:3} rows, {right:4.0%} right: {plain:7.1f} tokens/s without drafts, "
                f"{speculated:7.1f} with: {speculated / plain:.2f} x, "
                f"{steps['without']} and {steps['with']} steps",
                flush=True,
            )
            costs = ", ".join(f"{n}: {s * 1e3:.2f}" for n, s in lengths.items())
            print(f"{'':9} ms of a step, by the length of its drafts: {costs}", flush=True)

    restore_head()
    if options.heads or options.eagle3 or options.mtp:
        return
    compare(runner, limits, drafting, options.tokens)


def compare(runner: ModelRunner, limits: Limits, drafting: Limits, tokens: int) -> None:
    """Print how many answers drafts change by rounding, and other rows beside them without drafts.

    The weights are random, so the best two logits are nearer than a trained model's.
    """

    def answers(used: Limits, drafters: Sequence[Drafter]) -> list[list[int]]:
        serving = Serving(runner, used)
        serving.answer(tokens, drafters)
        return [request.tokens for request in serving.requests]

    rows = limits.max_running
    plain = answers(limits, [Drafter() for _ in range(rows)])
    fewer = answers(limits, [Drafter() for _ in range(-(-rows // 2))])
    drafted = answers(drafting, [KnownText(text) for text in plain])
    for name, found in (("drafts", drafted), ("half of the rows", fewer)):
        pairs = list(zip(found, plain, strict=False))
        same = sum(one == other for one, other in pairs)
        firsts = [
            next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0]))
            for pair in pairs
        ]
        mean = statistics.mean(firsts) - PROMPT
        print(f"{name}: {same} of {len(pairs)} answers are the same, on average {mean:.0f} tokens")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on the device that is here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--attention", choices=[str(a) for a in AttentionKind], default="auto")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--right", type=float, nargs="+", default=[1.0, 0.7, 0.0])
    parser.add_argument("--heads", type=int, default=0, help="Medusa heads that guess; 0: none")
    parser.add_argument("--eagle3", action="store_true", help="EAGLE-3 heads guess")
    parser.add_argument("--mtp", action="store_true", help="the layer behind the last one guesses")
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--turns", type=int, default=3)
    parsed = parser.parse_args(arguments)
    if parsed.device == "cuda" and not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, or --device cpu")
    with TemporaryDirectory() as folder:
        measure(parsed, Path(folder))


if __name__ == "__main__":
    main()
