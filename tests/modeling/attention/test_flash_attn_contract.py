"""Our use of flash-attn against what it documents, on a CPU: every call, and whole models."""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.engine import AttentionKind
from modeling.attention import select
from modeling.attention.base import AttentionBackend, AttentionSpec
from modeling.attention.kv_cache import CacheSpec, allocate
from modeling.attention.sdpa import SdpaAttention
from sharding.group import SingleRank
from tests.checkpoints import load_oracle, oracle_logits, write_llama, write_relative
from tests.checkpoints_others import write_gpt2, write_gpt_neox, write_opt
from tests.modeling.attention import flash_attn_twin as twin
from tests.modeling.models.stepping import Stepper, load

OURS = "modeling.attention.flash_attn"

# (query length, key length) of each row
STEPS: dict[str, list[tuple[int, int]]] = {
    "prefills": [(7, 7), (300, 300), (2, 2)],
    "chunks": [(5, 40), (16, 16), (33, 290)],
    "decode": [(1, 1), (1, 17), (1, 255), (1, 256), (1, 257), (1, 600)],
    "mixed": [(1, 9), (1, 400), (12, 12), (4, 31), (100, 600)],
    "out of order": [(12, 12), (1, 9), (4, 31), (1, 400)],
}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[AttentionBackend]]:
    """The backend over the twin, told to take a CPU and any float type for a GPU's."""
    monkeypatch.setitem(sys.modules, "flash_attn", twin.module())
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    ours: Any = import_module(OURS)

    class OnCpu(ours.FlashAttention):  # type: ignore[misc]
        @classmethod
        def lacks(cls, spec: AttentionSpec) -> str | None:
            gpu = replace(spec, device=torch.device("cuda"), dtype=torch.bfloat16, cache_dtype=None)
            found: str | None = super().lacks(gpu)
            return found

    monkeypatch.setitem(select.BACKENDS, AttentionKind.FLASH_ATTN, lambda: OnCpu)
    monkeypatch.setattr(select, "PACKAGES", {})
    yield OnCpu
    sys.modules.pop(OURS, None)


def make_spec(**fields: Any) -> AttentionSpec:
    values: dict[str, Any] = {
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "scale": 0.3,
        "page_size": 256,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        **fields,
    }
    return AttentionSpec(**values)


class Paged:
    """Random rows in shuffled pages of one layer; NaN wherever nothing was written."""

    def __init__(self, spec: AttentionSpec, rows: list[tuple[int, int]]) -> None:
        generator = torch.Generator().manual_seed(3)
        counts = [-(-keys // spec.page_size) for _, keys in rows]
        cache = CacheSpec(1, spec.page_size, spec.num_kv_heads, spec.head_dim, spec.dtype)
        self.rows = rows
        self.cache = allocate(cache, sum(counts) + 2, spec.device)[0]
        self.cache.keys.fill_(math.nan)
        self.cache.values.fill_(math.nan)
        pages = iter(torch.randperm(sum(counts) + 2, generator=generator).tolist())
        self.tables = torch.full((len(rows), max(counts) + 1), 10**6, dtype=torch.int32)
        for row, ((_, keys), count) in enumerate(zip(rows, counts, strict=True)):
            self.tables[row, :count] = torch.tensor([next(pages) for _ in range(count)])
            at = torch.arange(keys)
            slots = self.tables[row, at // spec.page_size].long() * spec.page_size
            shape = (keys, spec.num_kv_heads, spec.head_dim)
            k, v = (torch.randn(shape, generator=generator).to(spec.dtype) for _ in range(2))
            self.cache.store(k, v, slots + at % spec.page_size)
        # As in a model: q is a part of a wider product.
        heads, tokens = spec.num_heads + 2 * spec.num_kv_heads, sum(each for each, _ in rows)
        wide = torch.randn(tokens, heads, spec.head_dim, generator=generator).to(spec.dtype)
        self.q = wide[:, : spec.num_heads]

    def run(self, backend: AttentionBackend, window: int | None = None) -> Tensor:
        queries, keys = zip(*self.rows, strict=True)
        step = backend.prepare(queries, keys, self.tables)
        starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32)
        return backend.forward(self.q, self.cache, starts, self.tables, step, window)


@pytest.mark.parametrize("page_size", [256, 512])
@pytest.mark.parametrize("window", [None, 1, 40, 500])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_equals_sdpa(
    backend: type[AttentionBackend],
    rows: list[tuple[int, int]],
    window: int | None,
    page_size: int,
) -> None:
    spec = make_spec(windows=(window,), page_size=page_size)
    paged = Paged(spec, rows)
    expected = paged.run(SdpaAttention(spec), window)
    torch.testing.assert_close(paged.run(backend(spec), window), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (28, 4)])
def test_head_counts_in_half_precision(
    backend: type[AttentionBackend], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    spec = make_spec(num_heads=heads[0], num_kv_heads=heads[1], dtype=dtype, head_dim=80)
    paged = Paged(spec, STEPS["mixed"])
    expected = paged.run(SdpaAttention(spec))
    torch.testing.assert_close(paged.run(backend(spec)), expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("window", [None, 40])
def test_capped_scores(backend: type[AttentionBackend], window: int | None) -> None:
    spec = make_spec(windows=(window,), softcap=1.5)
    paged = Paged(spec, STEPS["mixed"])
    expected = paged.run(SdpaAttention(spec), window)
    torch.testing.assert_close(paged.run(backend(spec), window), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 40])
def test_captured_decode(backend: type[AttentionBackend], window: int | None) -> None:
    """One step over static words; each case is written into them and computed anew."""
    spec = make_spec(windows=(window,))
    made, num_rows, max_blocks = backend(spec), 3, 4
    count = made.graph_words(num_rows, max_blocks)
    assert count is not None
    words = torch.zeros(count, dtype=torch.int32)
    captured = made.graph_form(num_rows, words)
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    for case in ([(1, 5), (1, 300), (1, 256)], [(1, 700), (1, 1), (1, 90)]):
        paged = Paged(spec, case)
        host = np.zeros(count, dtype=np.int32)
        keys = np.array([length for _, length in case], dtype=np.int32)
        assert captured.write(host, keys, paged.tables.numpy()) == count
        words.copy_(torch.from_numpy(host))
        captured.plan(0)
        found = made.forward(paged.q, paged.cache, starts, paged.tables, captured.step, window)
        expected = paged.run(SdpaAttention(spec), window)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"page_size": 16}, r"cache\.block_size 16 is not a multiple of 256"),
        ({"head_dim": 20}, "head_dim 20 is not a multiple of 8"),
        ({"head_dim": 264}, "head_dim 264 is not a multiple of 8 up to 256"),
    ],
)
def test_what_it_lacks_is_what_the_package_refuses(
    backend: type[AttentionBackend],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    reason: str,
) -> None:
    spec = make_spec(**changes)
    with pytest.raises(ValueError, match=reason):
        backend(spec)
    monkeypatch.setattr(backend, "lacks", classmethod(lambda cls, spec: None))
    with pytest.raises(twin.Refused):
        Paged(spec, STEPS["mixed"]).run(backend(spec))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"sinks": True}, "has no sinks"), ({"alibi": (0.5,) * 6}, "is not given ALiBi")],
)
def test_other_scores_are_refused(
    backend: type[AttentionBackend], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        backend(make_spec(**changes))


SEQUENCE = [(7 * i + i * i) % 96 for i in range(290)]
LONG: dict[str, Any] = {"max_position_embeddings": 300}
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: write_llama(path, **LONG),
    "mistral": lambda path: write_relative(path, "mistral", **LONG),
    "qwen2_window": lambda path: write_relative(path, "qwen2_window", **LONG),
    "gpt2": lambda path: write_gpt2(path, n_positions=300),
    "opt": lambda path: write_opt(path, **LONG),
    "gpt_neox": lambda path: write_gpt_neox(path, **LONG),
}


@pytest.mark.parametrize("model", MODELS)
def test_whole_models(tmp_path: Path, backend: type[AttentionBackend], model: str) -> None:
    """Over a page's end: whole, in chunks beside a row that decodes, and token by token."""
    folder = MODELS[model](tmp_path)
    stepper = Stepper(load(folder, SingleRank()), page_size=256, num_pages=6)
    stepper.backend = select.select_attention(
        AttentionKind.FLASH_ATTN, stepper.backend.spec
    ).backend
    assert isinstance(stepper.backend, backend)
    found = [stepper.step([(0, SEQUENCE[:250])])[0]]
    beside = [stepper.step([(1, SEQUENCE[:1])])[0]]
    for start, stop in ((250, 254), (254, 261)):
        more = stepper.step(
            [(1, SEQUENCE[len(beside) : len(beside) + 1]), (0, SEQUENCE[start:stop])]
        )
        beside.append(more[0])
        found.append(more[1])
    found += [stepper.step([(0, [token])])[0] for token in SEQUENCE[261:]]
    expected = oracle_logits(load_oracle(folder), SEQUENCE)
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.cat(beside), expected[:3], atol=1e-4, rtol=0)
