"""Random models, adapters and loads as they are served, beside transformers + PEFT.

    python -m tests.modeling.models.fuzz [--seconds N] [--seed S] [--kind KIND] [--verbose]

Each number from S on is a case: a config of a random kind with settings that published models
vary, files as people write them, one or two adapters that PEFT made, and a batch of unequal
requests, preempted or in little memory, by hand or under the real scheduler, on 1, 2 or 4 ranks. An
outcome is equal, refused with its sentence, wrong, or "no truth" where transformers has none. The
command prints all but equal ones, and fails when anything is wrong; --seed S --seconds 0 runs one
case again.
"""

import argparse
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from configs.adapters import AdaptersConfig
from configs.architectures.base import ArchitectureError, ModelArchitecture
from configs.architectures.generic import PAGED_TYPES
from configs.architectures.select import MODEL_TYPES, load_architecture, padded_reason
from configs.engine import CacheConfig, Device, EngineConfig, LimitsConfig
from configs.model import DType, ModelConfig
from configs.wire.adapters import AdapterError, AdapterKey, FetchedAdapter
from configs.wire.sampling import Sampling
from modeling.runner.adapter_check import adaptable, base_tensors, judge
from modeling.runner.load_padded import load_padded
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from sharding.checkpoint import CheckpointError
from sharding.group import SingleRank
from tests.checkpoints_stacks import STACKS
from tests.modeling.models.fuzz_adapters import write_random
from tests.modeling.models.fuzz_configs import draw_config
from tests.modeling.models.fuzz_files import write_model
from tests.modeling.models.sweep import TOLERANCE, error_of, quiet
from tests.modeling.models.sweep_truth import NUM_TOKENS, NoTruthError, Oracle
from tests.modeling.models.tiny_causal import kinds
from tests.modeling.padded import generate_padded, place_padded
from tests.modeling.parity.comparison import Setting, answers_by_hand, answers_scheduled
from tests.modeling.stepping import Answer, Asked
from tests.ranks import run_in_memory

PADDED = ("bert", "doge", "electra", "moshi", "roberta")

OFTEN = (
    "deepseek_v3", "gemma2", "gemma3_text", "gemma4_text", "gpt2", "gpt_neox", "gpt_oss", "granite",
    "llama", "mistral", "mixtral", "opt", "phi3", "qwen2", "qwen3", "qwen3_5_text", "qwen3_moe",
)  # fmt: skip
"""What most people have."""

UNUSUAL = ("_flat", "_whole", "_turned", "_published")
"""Ends of the names of larger models that are other files of one kind, or large."""

BOLDNESS = (0.22, 0.18, 0.15, 0.1, 0.05, 0.0)
"""How much of a config is drawn, and less where transformers does not run that."""

REFUSALS = (ArchitectureError, CheckpointError, ValueError)

PROMPT = 33
"""Tokens of the longest prompt."""


@dataclass
class Case:
    """One case: what it is, for people, and its folders."""

    seed: int
    root: Path
    kind: str
    said: dict[str, object] = field(default_factory=dict)
    adapters: list[Path] = field(default_factory=list)

    @property
    def model(self) -> Path:
        """The folder of its model."""
        return self.root / "model"


def run_case(seed: int, root: Path, kind: str | None = None) -> tuple[Case, str, str]:
    """Judge one case; the case, its outcome in a word, and why."""
    rng = random.Random(seed)
    drawn = _kind(rng)
    case = Case(seed, root, kind or drawn)
    try:
        _write(case, rng)
        return (case, *_judge(case, rng))
    except NoTruthError as error:
        return case, "no truth", str(error)
    except Exception:
        return case, "wrong", f"it ends: {traceback.format_exc(limit=-4)}"


def _kind(rng: random.Random) -> str:
    larger = [name for name in sorted(STACKS) if not name.endswith(UNUSUAL)]
    paged = sorted(PAGED_TYPES & set(kinds()))
    own = sorted({*MODEL_TYPES.values()} & set(kinds()))
    return rng.choice(rng.choices((OFTEN, paged, own, larger, PADDED), (35, 40, 10, 10, 5))[0])


def _write(case: Case, rng: random.Random) -> None:
    """Write a model that transformers runs; NoTruthError for none."""
    fault = ""
    for attempt, boldness in enumerate(BOLDNESS):
        case_rng = random.Random(f"{case.seed} {attempt}")
        folder = case.root / f"model{attempt}"
        try:
            config, changes = draw_config(case_rng, case.kind, boldness)
            files = write_model(case_rng, folder, config, larger=case.kind in STACKS)
            Oracle(folder, exact=False).told(None, [3, 4, 5])
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"[:200]
            continue
        folder.rename(case.model)
        case.said |= {"config": changes, "files": files}
        return
    raise NoTruthError(fault)


def _judge(case: Case, rng: random.Random) -> tuple[str, str]:
    try:
        architecture = load_architecture(case.model)
        paged = padded_reason(architecture) is None
        config = _config(case, rng.choice((4, 8, 16, 32)))
        runner = (load_paged if paged else load_padded)(
            config, SingleRank(), pick_device(Device.CPU)
        ).allocate()
    except REFUSALS as error:
        return "refused", f"{type(error).__name__}: {error}"
    _write_adapters(case, rng)
    if paged:
        config = _opened(case, config)
        runner = load_paged(config, SingleRank(), pick_device(Device.CPU)).allocate()
    if fault := _stage_all(case, rng, config, runner):
        return "wrong", fault
    return _compare(case, rng, config, architecture, None if paged else runner)


def _config(case: Case, block_size: int, **adapters: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(id=str(case.model), dtype=DType.FLOAT32, allow_pickle=True),
        device=Device.CPU,
        cache=CacheConfig(num_blocks=2048 // block_size, block_size=block_size),
        limits=LimitsConfig(max_running=16, max_step_tokens=256),
        adapters=AdaptersConfig(
            device_pages=60, max_device_adapters=4, max_rank=64, host_bytes=2**26, **adapters
        ),
    )


def _opened(case: Case, config: EngineConfig) -> EngineConfig:
    """Set what the adapters' whole modules need, where the model has that."""
    saved = {name for each in case.said.values() if isinstance(each, dict)
             for name in each.get("modules_to_save", ())}  # fmt: skip
    for whole in (dict.fromkeys(sorted(saved), 2), {}) if saved else ():
        changes = {"vocabulary_copies": 2, "whole_linears": whole}
        opened = _config(case, config.cache.block_size, **changes)
        try:
            load_paged(opened, SingleRank(), pick_device(Device.CPU))
        except ValueError:
            continue  # One of them is no linear map.
        return opened
    return config


def _write_adapters(case: Case, rng: random.Random) -> None:
    """Write one or two adapters that PEFT reads."""
    for name in ("one", "two")[: rng.choice((1, 2, 2))]:
        folder = case.root / name
        try:
            fields = write_random(rng, folder, case.model)
            if fields:
                Oracle(case.model, exact=False).told(folder, [3, 4])
                case.adapters.append(folder)
            case.said[name] = fields
        except Exception as error:
            case.said[name] = f"PEFT: {type(error).__name__}: {error}"[:200]


def _stage_all(case: Case, rng: random.Random, config: EngineConfig, runner: Any) -> str:
    """Keep the adapters that the server takes; what check-adapter says of another kind, or ""."""
    for number, folder in enumerate(list(case.adapters), start=1):
        reasons: tuple[str, ...] = ()
        try:
            runner.stage(FetchedAdapter(AdapterKey(number), folder.name, str(folder), folder.name))
        except AdapterError as error:
            reasons = error.reasons
            case.adapters.remove(folder)
            case.said[f"{folder.name} is refused"] = reasons
        if rng.random() < 0.4:
            base = base_tensors(config, folder)
            found = judge(folder, adaptable(config, base), config.adapters, lambda *_: None, base)
            if found.reasons != reasons:
                return f"{folder.name}: the server says {reasons}, the check {found.reasons}"
    return ""


def _compare(
    case: Case,
    rng: random.Random,
    config: EngineConfig,
    architecture: ModelArchitecture,
    padded: Any,
) -> tuple[str, str]:
    """Serve a batch and compare every answer; padded: the runner of a padded model."""
    longest = PROMPT if architecture.stretches else architecture.max_total_tokens - NUM_TOKENS
    if padded is not None:
        longest = padded.report.max_total_tokens - NUM_TOKENS
    if longest < 1:
        raise NoTruthError("the longest sequence is no longer than an answer")
    prompts = [
        (folder, [rng.randrange(3, 96) for _ in range(min(length, longest))])
        for folder in (None, *case.adapters)
        for length in (rng.choice((1, 2, 3, 7)), rng.choice((14, 20, PROMPT)))
    ]
    chunk, preempted = rng.choice((1, 3, 5, 16, 100)), rng.random() < 0.6
    asked = [
        Asked(
            prompt, NUM_TOKENS, slot=-1 if folder is None else case.adapters.index(folder),
            sampling=Sampling(logprobs=architecture.vocab_size), chunk=chunk + index,
            joins_at=2 * (index % 3), rejoins_at=3 if preempted and index % 3 == 0 else None,
        )
        for index, (folder, prompt) in enumerate(prompts)
    ]  # fmt: skip
    try:
        answers = (
            [generate_padded(place_padded(padded, case.adapters), asked)]
            if padded is not None
            else _paged_answers(case, rng, config, architecture, asked, chunk)
        )
    except REFUSALS as error:
        if case.said.get("ranks", 1) == 1:
            raise
        return "refused", f"on {case.said['ranks']} ranks: {error}"
    oracle = Oracle(case.model, exact=padded is None)
    worst = 0.0
    for each in answers:
        for answer, one in zip(each, [*asked, *asked], strict=False):
            folder = None if one.slot < 0 else case.adapters[one.slot]
            worst = max(worst, error_of(answer, oracle.told(folder, one.prompt)))
    return "equal" if worst <= TOLERANCE else "wrong", f"{worst:.2g}"


def _paged_answers(
    case: Case,
    rng: random.Random,
    config: EngineConfig,
    architecture: ModelArchitecture,
    asked: list[Asked],
    chunk: int,
) -> list[list[Answer]]:
    """Answers of each rank; under the scheduler all come twice, to meet the prefix cache."""
    ranks = rng.choice((1, 1, 2, 2, 4))
    # Hand-made rows know nothing of tables that change with a sequence's length.
    by_hand = architecture.rope_sets is None and rng.random() < 0.5
    lost_at, room = rng.choice((None, None, 9)), rng.choice((160, 400, 2048))
    case.said |= {"ranks": ranks, "by hand": by_hand, "lost at": lost_at, "room": room}
    answer: Callable[..., list[Answer]] = answers_by_hand
    if not by_hand:
        setting = Setting("", "", ranks, [], chunk=chunk, lost_at=lost_at)
        answer = partial(answers_scheduled, setting)
        asked = [*asked, *(replace(each, joins_at=80) for each in asked)]
        cache = CacheConfig(
            num_blocks=room // config.cache.block_size, block_size=config.cache.block_size
        )
        config = config.model_copy(update={"cache": cache})
    return run_in_memory(ranks, partial(answer, config, case.adapters, asked))


def main(arguments: Sequence[str], say: Callable[[str], None] = print) -> int:
    """Run cases until the time is over; the number of wrong ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120, help="when no other case begins")
    parser.add_argument("--seed", type=int, default=0, help="the first case")
    parser.add_argument("--kind", choices=sorted({*kinds(), *STACKS}), metavar="KIND")
    parser.add_argument("--verbose", action="store_true", help="print equal cases too")
    options = parser.parse_args(arguments)
    end, seed, counts = time.monotonic() + options.seconds, options.seed, dict[str, int]()
    while seed == options.seed or time.monotonic() < end:
        with tempfile.TemporaryDirectory() as folder:
            case, word, why = run_case(seed, Path(folder), options.kind)
        refused = any("refused" in key for key in case.said)
        if word != "equal" or refused or options.verbose:
            say(f"{word:9} --seed {seed} {case.kind}: {why}\n          {case.said}")
        counts[word] = counts.get(word, 0) + 1
        seed += 1
    say(f"cases {options.seed} to {seed - 1}: {counts}")
    return counts.get("wrong", 0)


if __name__ == "__main__":
    quiet()
    sys.exit(min(main(sys.argv[1:]), 1))
