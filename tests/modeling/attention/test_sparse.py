"""Attention to chosen positions against the equation of sparse.py, written as a loop."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from configs.engine import AttentionKind
from modeling.attention import sparse
from modeling.attention.base import AttentionSpec
from modeling.attention.kv_cache import FP8, CacheSpec, allocate
from modeling.attention.select import select_attention
from modeling.attention.sparse import SparseAttention, TokenIndex, select
from tests.modeling.attention.test_sdpa import Paged

TOPK, INDEX_HEADS, WIDTH, HEADS, HEAD_DIM = 6, 3, 12, 3, 8

STEPS = {
    "few keys": [(3, 6), (1, 2)],
    "decode": [(1, 7), (1, 300), (1, 600), (1, 20)],
    "a prompt": [(40, 40)],
    "all kinds": [(1, 3), (5, 5), (1, 30), (7, 20), (2, 6), (1, 17), (12, 40)],
}


class Indexed(Paged):
    """Rows whose last head has index keys; weights of an index are positive and negative."""

    def __post_init__(self) -> None:
        super().__post_init__()
        generator = torch.Generator().manual_seed(4)
        tokens = sum(queries for queries, _ in self.lengths)
        self.queries = torch.randn(tokens, INDEX_HEADS, WIDTH, generator=generator)
        self.weights = torch.randn(tokens, INDEX_HEADS, generator=generator)

    def index(self) -> TokenIndex:
        return TokenIndex(self.queries, self.weights, torch.empty(0), TOPK)

    def expected(self) -> Tensor:
        """[tokens, HEADS, HEAD_DIM]."""
        found, at = [], 0
        for q, k, v in self.rows:
            keys = torch.cat((k[:, -1], v[:, -1]), 1)[:, :WIDTH]
            for i, query in enumerate(q):
                seen = len(k) - len(q) + i + 1
                products = (self.queries[at] @ keys[:seen].T).relu()
                scores = self.weights[at] @ products
                own = sorted(range(seen), key=lambda j: (-float(scores[j]), j))[:TOPK]
                logits = torch.einsum("hd,khd->hk", query[:-1], k[own, :-1]) * 0.4
                if self.sinks is not None:
                    logits = torch.cat((logits, self.sinks[:-1, None]), 1)
                weights = logits.softmax(-1)[:, : len(own)]
                found.append(torch.einsum("hk,khd->hd", weights, v[own, :-1]))
                at += 1
        return torch.stack(found)


def sparse_backend(spec: AttentionSpec) -> SparseAttention:
    backend = select_attention(AttentionKind.SDPA, spec).backend
    assert isinstance(backend, SparseAttention)
    return backend


def made(name: str, **options: Any) -> tuple[Indexed, SparseAttention]:
    heads = (HEADS + 1, HEADS + 1)
    rows = Indexed(STEPS[name], 16, heads=heads, head_dim=HEAD_DIM, **options)
    return rows, sparse_backend(replace(rows.spec(), index_topk=TOPK))


def computed(rows: Indexed, backend: SparseAttention, index: TokenIndex) -> Tensor:
    queries, keys = zip(*rows.lengths, strict=True)
    step = backend.prepare(queries, keys, rows.tables)
    q = torch.cat([q for q, _, _ in rows.rows])
    unread = torch.empty(0, dtype=torch.int32)
    found = backend.forward(
        q, rows.cache, unread, rows.tables, replace(step, index=index), sinks=rows.sinks
    )
    return found[:, :-1]


@pytest.mark.parametrize("sinks", [None, torch.randn(HEADS + 1)])
@pytest.mark.parametrize("most", [1, 1000, sparse.MOST])
@pytest.mark.parametrize("name", STEPS)
def test_chosen_positions(
    monkeypatch: pytest.MonkeyPatch, name: str, most: int, sinks: Tensor | None
) -> None:
    """most: numbers that are made at once."""
    monkeypatch.setattr(sparse, "MOST", most)
    rows, backend = made(name, sinks=sinks)
    index = rows.index()
    wanted = rows.expected()
    torch.testing.assert_close(computed(rows, backend, index), wanted)
    # The next layer takes the choice as it is.
    again = TokenIndex(rows.queries * 0, rows.weights, index.keys, TOPK, index.selected)
    if index.selected is not None:
        torch.testing.assert_close(computed(rows, backend, again), wanted)


def test_the_earlier_of_equal_positions() -> None:
    """Whatever the row is padded to; scores of 0 are common, and may be above others."""
    keys = torch.tensor([[0.0], [1.0], [0.0], [-3.0], [2.0], [0.0], [0.0], [5.0]])[None]
    query, weight = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)
    for sign, wanted in ((1.0, [0, 1, 4]), (-1.0, [0, 2, 3])):
        for length in (7, 8):
            found = select(query, weight * sign, keys[:, :length], torch.tensor([[6]]), 3)
            assert found.tolist() == [[wanted]]


def test_fewer_positions_than_are_chosen() -> None:
    keys, query = torch.ones(1, 5, 1), torch.ones(1, 2, 1, 1)
    found = select(query, torch.ones(1, 2, 1), keys, torch.tensor([[0, 3]]), 3)
    assert found.tolist() == [[[0, 1, 2], [0, 1, 2]]]


def test_numbers_that_are_none_choose_positions_that_there_are() -> None:
    keys = torch.full((1, 9, 1), float("nan"))
    found = select(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1), keys, torch.tensor([[8]]), 3)
    assert ((found >= 0) & (found < 9)).all()


def test_index_keys_of_another_type_are_refused() -> None:
    spec = replace(Paged([(1, 1)], 16).spec(), index_topk=TOPK, cache_dtype=FP8)
    with pytest.raises(ValueError, match=r"the model's own type: set cache.dtype to auto"):
        select_attention(AttentionKind.AUTO, spec)


@pytest.mark.parametrize("width", [5, 8, 12, 16])
def test_index_keys_lie_in_one_head_more(width: int) -> None:
    rows = Paged([(1, 1)], 16, heads=(3, 3))
    index = TokenIndex(torch.empty(0), torch.empty(0), torch.randn(2, width), TOPK)
    parts = torch.randn(2, 2, 2, HEAD_DIM)
    rows.cache.store(*index.with_head(*parts), torch.tensor([3, 17]))
    found = sparse._index_keys(rows.cache, torch.tensor([[17, 3]]), width)
    assert torch.equal(found[0], index.keys.flip(0))
    assert torch.equal(rows.cache.read(torch.tensor([3, 17]), torch.float32)[1][:, :2], parts[1])


def test_index_keys_that_are_too_wide_are_refused() -> None:
    index = TokenIndex(torch.empty(0), torch.empty(0), torch.randn(2, 17), TOPK)
    with pytest.raises(ValueError, match="index_head_dim is more than twice a head's 8 numbers"):
        index.with_head(*torch.randn(2, 2, 2, HEAD_DIM))


class Memory(TorchFunctionMode):
    """Counts the bytes of tensors that functions return, and that are there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple) else (found,):
            if isinstance(each, Tensor):
                self._count(each.untyped_storage())
        return found

    def _count(self, storage: Any) -> None:
        if id(storage) not in self._known:
            self._known.add(id(storage))
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, id(storage), storage.nbytes())

    def _forget(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.live -= size


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("lengths", "heads"),
    [([(512, 8192)], 16), ([(2048, 2100)], 128), ([(32, 163840)], 8), ([(1, 65536)] * 64, 16)],
)
def test_memory_of_a_step(lengths: list[tuple[int, int]], heads: int, sinks: bool) -> None:
    """Of shares of DeepSeek-V3.2, without numbers."""
    device, dtype = torch.device("meta"), torch.bfloat16
    heads, tokens = heads + 1, sum(queries for queries, _ in lengths)
    spec = AttentionSpec(heads, heads, 192, 0.1, 64, dtype, device, index_topk=2048, sinks=sinks)
    backend = sparse_backend(spec)
    (cache,) = allocate(CacheSpec(1, 64, heads, 192, dtype), 1, device)
    with device:
        q = torch.empty(tokens, heads, 192, dtype=dtype)
        queries = torch.empty(tokens, 64, 128, dtype=dtype)
        index = TokenIndex(queries, torch.empty(tokens, 64), torch.empty(0), 2048)
        tables = torch.empty(len(lengths), lengths[0][1] // 64 + 1, dtype=torch.int32)
    with Memory() as memory:
        own, keys = zip(*lengths, strict=True)
        step = replace(backend.prepare(own, keys, tables), index=index)
        found = backend.forward(q, cache, tables, tables, step, sinks=q[0, :, 0] if sinks else None)
    assert found.shape == q.shape
    assert 0 < memory.peak < backend.scratch_bytes
