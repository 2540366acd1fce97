"""A padded runner against the oracle: tiny models on disk, and a runner for each."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

from configs.adapters import AdaptersConfig
from configs.engine import CacheConfig, Device, EngineConfig, LimitsConfig
from configs.model import ModelConfig
from configs.wire.adapters import AdapterKey, FetchedAdapter
from configs.wire.sampling import Sampling
from modeling.runner.load_padded import load_padded
from modeling.runner.padded import PaddedRunner
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank
from tests.checkpoints import write_adapter
from tests.checkpoints_others import GPT2_ADAPTERS, write_gpt2
from tests.checkpoints_padded import ADAPTERS, write_padded
from tests.modeling.parity.comparison import BASE, Record, Setting, judge
from tests.modeling.stepping import Answer, Asked, generate
from tests.oracle import NUM_TOKENS, Truth, prompt_truth

NUM_BLOCKS = 64
BLOCK_SIZE = 16
NUM_PAGES = 40
CPU = torch.device("cpu")

RECIPES = {**ADAPTERS, "gpt2": GPT2_ADAPTERS}
"""gpt2: has a paged implementation, and Conv1D modules, which no other kind here has."""


class PaddedWorld:
    """Tiny models and adapters on disk, written when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.record = Record()

    def model(self, kind: str) -> Path:
        """The folder of a model."""
        folder = self._root / kind / "model"
        if not folder.exists():
            if kind == "gpt2":
                return write_gpt2(folder)
            write_padded(folder, kind)
        return folder

    def adapter(self, kind: str, name: str) -> Path:
        """The folder of an adapter for that model."""
        folder = self._root / kind / name
        if not folder.exists():
            write_adapter(folder, self.model(kind), RECIPES[kind][name])
        return folder


@cache
def padded_config(model: Path) -> EngineConfig:
    """A small engine on the CPU."""
    return EngineConfig(
        model=ModelConfig(id=str(model)),
        device=Device.CPU,
        cache=CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        limits=LimitsConfig(max_running=10, max_step_tokens=256),
        adapters=AdaptersConfig(
            device_pages=NUM_PAGES, max_device_adapters=10, max_rank=64, host_bytes=2**26
        ),
    )


def padded_runner(
    model: Path,
    folders: Sequence[Path] = (),
    /,
    device: torch.device = CPU,
    spread: bool = False,
    **changes: Any,
) -> PaddedRunner:
    """A loaded runner with the adapters placed at their indices; pools hold NaN elsewhere."""
    fields = padded_config(model).model_dump() | changes
    runner = load_padded(
        EngineConfig.model_validate(fields), SingleRank(), device, spread
    ).allocate()
    return place_padded(runner, folders)


def place_padded(runner: PaddedRunner, folders: Sequence[Path]) -> PaddedRunner:
    """Place adapters at their indices; pools hold NaN elsewhere."""
    for pool in runner._bank.pools:
        pool.a.fill_(float("nan"))
        pool.bt.fill_(float("nan"))
    free = list(range(NUM_PAGES))
    for slot, folder in enumerate(folders):
        key = AdapterKey(slot + 1)
        shape = runner.stage(FetchedAdapter(key, folder.name, str(folder), folder.name))
        taken = [free.pop() for _ in range(max(shape.num_pages))]
        runner.load_adapter(key, slot, [taken[:count] for count in shape.num_pages])
    return runner


def generate_padded(runner: PaddedRunner, requests: Sequence[Asked]) -> list[Answer]:
    """As `generate` does for the paged runner, whose door this is."""
    answers = generate(cast(ModelRunner, runner), requests, NUM_BLOCKS, BLOCK_SIZE)
    runner.check()
    return answers


def compare_padded(padded: PaddedWorld, setting: Setting, *, faulty: bool = False) -> None:
    """As `compare` does; rows join by twos, of unequal lengths, and leave one by one."""
    kind = setting.variant
    model = padded.model(kind)
    seen = padded.record.begin(setting, model, faulty=faulty)
    folders = [None if name == BASE else padded.adapter(kind, name) for name in setting.names]
    adapters = [folder for folder in folders if folder is not None]
    told = [prompt_truth(model, folder, 3 + 5 * i) for i, folder in enumerate(folders)]
    lengths = [NUM_TOKENS - 3 * (i % 3) for i in range(len(told))]
    requests = [
        Asked(
            prompt=prompt,
            num_tokens=length,
            slot=-1 if folder is None else adapters.index(folder),
            sampling=Sampling(logprobs=truth.logits.shape[1]),
            chunk=setting.chunk + i,
            joins_at=3 * (i // 2),
            rejoins_at=None if setting.rejoins_at is None else setting.rejoins_at + i,
        )
        for i, (length, folder, (prompt, truth)) in enumerate(
            zip(lengths, folders, told, strict=True)
        )
    ]
    answers = generate_padded(padded_runner(model, adapters), requests)
    asked = zip(lengths, (truth for _, truth in told), strict=True)
    judge(seen, [answers], [Truth(t.tokens[:length], t.logits[:length]) for length, t in asked])
