"""Captured mixed steps: replays of what was recorded between attentions change nothing.

A tape stands in for CUDA graphs: it repeats the recorded operations on the tensors that they were
recorded with, so that whatever a segment took from its first step as a number stays as it was.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.engine import CacheConfig
from configs.wire.sampling import Sampling
from modeling.adapters.bank import AdapterBank
from modeling.adapters.latents import LatentMap
from modeling.adapters.product import AdapterData, OutputSlice
from modeling.attention.kv_layout import allocate_blocks
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from modeling.runner.pieces import CapturedParts
from modeling.runner.piecewise import TOKENS, PiecewiseGraphs, piecewise_sizes
from sharding.group import SingleRank
from tests.modeling.parity.comparison import FAMILIES, World, engine_config, place_all
from tests.modeling.runner.test_cuda_graphs import BLOCK_SIZE, CPU, NUM_BLOCKS, requests
from tests.modeling.stepping import Asked, generate
from tests.sweeps import swept

Operation = tuple[Any, tuple[Any, ...], dict[str, Any], Any]


class Tape(TorchDispatchMode):
    """Every operation with the tensors that it read and made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, made))
        return made

    def replay(self) -> None:
        for func, args, kwargs, made in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Tapes:
    """Records segments on tapes, as PieceRecorder does in graphs."""

    def __init__(self) -> None:
        self._tape: Tape | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        assert self._tape is None
        yield
        assert self._tape is None

    def begin(self) -> None:
        self._tape = Tape()
        self._tape.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> Callable[[], None]:
        tape, self._tape = self._tape, None
        assert tape is not None
        tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return tape.replay

    def alias(self, tensor: Tensor) -> Tensor:
        return tensor


class GatheredAdapters(AdapterData):
    """A plan whose steps look each token's adapter up where the plan says it: in a buffer."""

    def __init__(self, bank: AdapterBank, most: int) -> None:
        self.bank = bank
        self.slots = torch.full((most,), -1)

    def update(self, slots: Sequence[int], lengths: Sequence[int]) -> int:
        of_token = [slot for slot, n in zip(slots, lengths, strict=True) for _ in range(n)]
        self.slots[: len(of_token)].copy_(torch.tensor(of_token))
        return 1

    def batch(
        self, num_tokens: int, num_tiles: int | None = None, has_experts: bool = False
    ) -> "GatheredAdapters":
        return self

    def add(self, y: Tensor, x: Tensor, layer: int, targets: tuple[OutputSlice, ...]) -> None:
        for target in targets:
            a, bt = self._factors(len(x), target.projection, layer)
            delta = torch.einsum("tr,tro->to", torch.einsum("ti,tri->tr", x, a), bt)
            y[:, target.offset : target.offset + bt.shape[-1]] += delta

    def latent_queries(self, y: Tensor, x: Tensor, latents: LatentMap) -> None:
        a, b = self._of_heads(latents, x)
        s = torch.einsum("thi,trhi->thr", x, b[..., : latents.keys])
        y += torch.einsum("thr,tri->thi", s, a)

    def latent_values(self, y: Tensor, x: Tensor, latents: LatentMap) -> None:
        a, b = self._of_heads(latents, x)
        s = torch.einsum("thi,tri->thr", x, a)
        y += torch.einsum("thr,trhi->thi", s, b[..., latents.keys :])

    def _of_heads(self, latents: LatentMap, x: Tensor) -> tuple[Tensor, Tensor]:
        a, bt = self._factors(len(x), latents.position.projection, latents.position.layer)
        return a, bt.view(*bt.shape[:2], x.shape[1], -1)

    def _factors(self, count: int, projection: int, layer: int) -> tuple[Tensor, Tensor]:
        """[tokens, rank rows, in] and [.., out] of the first tokens."""
        of_token = self.slots[:count]
        slots, pool = of_token.clamp(min=0), self.bank.pools[projection]
        pages = self.bank.page_table[slots, projection].clamp(min=0).long()
        a, bt = (side[pages, layer].flatten(1, 2) for side in (pool.a, pool.bt))
        ranks = self.bank.ranks[slots, projection, layer]
        used = torch.arange(a.shape[1]) < torch.where(of_token < 0, 0, ranks)[:, None]
        # What lies beyond the rank is anybody's, and may be no number.
        return torch.where(used[..., None], a, 0.0), torch.where(used[..., None], bt, 0.0)


def record_on_cpu(
    runner: ModelRunner, sizes: Sequence[int], of_experts: GatheredAdapters | None = None
) -> PiecewiseGraphs:
    """Let a CPU runner replay its mixed steps from tapes; of_experts: with adapters of experts."""
    page = runner.report.num_blocks
    runner._forward.cache[:] = allocate_blocks(runner._parts.cache, page + 1, CPU)
    parts = CapturedParts(
        compute=runner._forward.trunk,
        backends=runner._backends,
        dummy_slots=[tables.dummy_slot(page) for tables in runner._input_batch.tables],
        adapters=of_experts or GatheredAdapters(runner._bank, max(sizes)),
        has_experts=of_experts is not None,
    )
    with torch.inference_mode():
        graphs = PiecewiseGraphs(runner._forward, parts, sizes, Tapes())
        while graphs.unrecorded:
            graphs.record_next()
        return graphs


def make_runner(world: World, family: str, kind: str) -> ModelRunner:
    config = engine_config(
        world.model(family, kind),
        cache=CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
    )
    runner = load_paged(config, SingleRank(), CPU).allocate()
    return runner


def test_sizes_hold_every_step_and_waste_little() -> None:
    for most in (1, 64, 100, 2048, 4096):
        sizes = piecewise_sizes(most)
        assert sizes[-1] == most
        assert sorted(set(sizes)) == list(sizes)
    assert piecewise_sizes(8192)[-1] == TOKENS[-1]
    for smaller, size in pairwise(TOKENS):
        assert size - smaller - 1 <= max(128, size // 4)


@pytest.mark.parametrize(
    "sampling",
    swept(
        [Sampling(), Sampling(temperature=0.8, top_p=0.9, logprobs=2)],
        lambda sampling: sampling != Sampling(),
    ),
)
@pytest.mark.parametrize("slots", swept([(-1,), (-1, 0, 1)], lambda slots: len(slots) > 1))
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "gqa"),
        ("relative", "qwen3"),
        ("relative", "mistral"),
        ("gpt2", "by_layer"),
        ("opt", "post_norm"),
        ("gpt_neox", "parallel"),
        ("generic", "diffllama"),
        ("generic", "dory"),
        ("generic", "gemma4_text"),
        pytest.param("generic", "hrm_text", marks=pytest.mark.sweep),
        ("generic", "llama4_text"),
    ],
)
def test_replays_are_steps(
    world: World, family: str, kind: str, slots: tuple[int, ...], sampling: Sampling
) -> None:
    """Prompts in chunks beside decode rows, in steps that fill a size and steps that do not."""
    runner = make_runner(world, family, kind)
    names = list(FAMILIES[family].adapters)[-2:]
    folders = [world.adapter(family, kind, name) for name in names]
    place_all(runner, [folder for folder in folders if folder is not None])
    asked = requests(slots, sampling=sampling)
    expected = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    runner._piecewise_graphs = record_on_cpu(runner, (4, 9, 16, 40))
    runner.num_steps = 0
    found = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    assert runner.num_captured == runner.num_steps > 20
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]


def test_a_step_that_no_size_holds_is_launched(world: World) -> None:
    runner = make_runner(world, "llama", "gqa")
    asked = [Asked(prompt=list(range(3, 33)), num_tokens=4, slot=-1, chunk=40)]
    expected = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    runner._piecewise_graphs = record_on_cpu(runner, (8, 16))
    runner.num_captured = 0
    found = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    assert runner.num_captured == 3
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]


def test_filling_reaches_no_place_and_no_page(world: World) -> None:
    runner = make_runner(world, "llama", "gqa")
    asked = [Asked(prompt=list(range(3, 13)), num_tokens=3, slot=-1, chunk=40)]
    runner._piecewise_graphs = record_on_cpu(runner, (16,))
    generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    used = [bool((page != 0).any()) for page in runner._forward.cache[0].keys[:-1]]
    assert sum(used) == -(-12 // BLOCK_SIZE)
    spare = runner._forward.cache[0].keys[-1]
    assert (spare[0] != 0).any()
    assert (spare[1:] == 0).all()
