"""Padded batches: every row keeps its own tokens, mask, positions and cache, whoever leaves."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from configs.wire.plan import RequestJoin
from configs.wire.sampling import Sampling
from modeling.models.padded.batch import ROOM, CausalLMBatch
from modeling.models.padded.cache import (
    KeyValue,
    Past,
    cache_bytes,
    cached_layers,
    keys_head_dim_last,
)

CPU = torch.device("cpu")
PAD = 95
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 3, 5

LAYOUTS = [
    # legacy tuples, key layout [head_dim, length], rows and heads folded into one dimension
    (False, True, False),
    (True, True, False),
    (True, False, False),
    (True, False, True),
    (True, True, True),
]


def request(place: int, length: int) -> RequestJoin:
    tokens = [100 * place + i for i in range(length)]
    return RequestJoin(place, tokens, length, -1, Sampling())


def batch_of(lengths: dict[int, int], head_dim_last: bool = True) -> CausalLMBatch:
    requests = [request(place, length) for place, length in lengths.items()]
    return CausalLMBatch.from_requests(requests, PAD, CPU, head_dim_last)


def mark(place: int, position: int, layer: int) -> float:
    """What a cache holds for a token, so that it is known wherever it goes."""
    return 1.0 + place + position / 64 + 100 * layer


def prefill(batch: CausalLMBatch, legacy: bool, folded: bool) -> None:
    """Fill the cache as a forward would; padding holds NaN, which nobody may look at."""
    layers = []
    for layer in range(NUM_LAYERS):
        values = torch.full((len(batch), batch.max_input_length), float("nan"))
        for row, (place, length) in enumerate(
            zip(batch.batch_slots, batch.input_lengths, strict=True)
        ):
            own = [mark(place, position, layer) for position in range(length)]
            values[row, batch.max_input_length - length :] = torch.tensor(own)
        layers.append(laid_out(values, batch.keys_head_dim_last, folded))
    batch.past_key_values = tuple(layers) if legacy else DynamicCache(layers)
    batch.advance(torch.zeros(len(batch), dtype=torch.int64))


def laid_out(values: Tensor, head_dim_last: bool, folded: bool) -> KeyValue:
    """[rows, length] as keys and values in the model's layout."""
    whole = values[:, None, :, None].repeat(1, NUM_HEADS, 1, HEAD_DIM)
    keys = -whole if head_dim_last else -whole.transpose(-1, -2)
    if folded:
        return keys.flatten(0, 1), whole.flatten(0, 1)
    return keys, whole


def check_cache(batch: CausalLMBatch) -> None:
    """Every row's tokens lie right-aligned in every head, and nowhere else."""
    past = batch.past_key_values
    assert past is not None
    length = batch.max_input_length - 1
    for layer, (keys, values) in enumerate(cached_layers(past)):
        keys = keys.reshape(len(batch), NUM_HEADS, *keys.shape[-2:])
        values = values.reshape(len(batch), NUM_HEADS, *values.shape[-2:])
        if not batch.keys_head_dim_last:
            keys = keys.transpose(-1, -2)
        assert keys.shape == values.shape == (len(batch), NUM_HEADS, length, HEAD_DIM)
        for row, (place, own) in enumerate(
            zip(batch.batch_slots, batch.input_lengths, strict=True)
        ):
            told = torch.tensor([mark(place, position, layer) for position in range(own - 1)])
            for head in range(NUM_HEADS):
                found = values[row, head, length - own + 1 :, HEAD_DIM - 1]
                assert torch.equal(found, told)
                assert torch.equal(keys[row, head, length - own + 1 :, 0], -told)
    batch.check()


def test_rows_are_padded_on_the_left() -> None:
    batch = batch_of({4: 3, 1: 5, 2: 1})
    assert batch.input_ids.tolist() == [
        [PAD, PAD, 400, 401, 402],
        [100, 101, 102, 103, 104],
        [PAD, PAD, PAD, PAD, 200],
    ]
    assert batch.seen.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]
    assert batch.position_ids.tolist() == [[1, 1, 0, 1, 2], [0, 1, 2, 3, 4], [1, 1, 1, 1, 0]]
    assert batch.attention_mask.shape == (3, 5 + ROOM)
    assert (batch.max_tokens, batch.max_input_length, len(batch)) == (15, 5, 3)
    batch.check()


def test_a_chosen_token_becomes_the_next_input() -> None:
    batch = batch_of({0: 2, 1: 4})
    prefill(batch, legacy=False, folded=False)
    batch.advance(torch.tensor([7, 8]))
    assert batch.input_ids.tolist() == [[7], [8]]
    assert batch.position_ids.tolist() == [[3], [5]]
    assert batch.seen.tolist() == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
    assert batch.padding_right_offset == ROOM - 2
    batch.check()


def test_the_mask_grows_when_its_room_is_used_up() -> None:
    batch = batch_of({0: 2, 1: 4})
    prefill(batch, legacy=False, folded=False)
    for step in range(2 * ROOM):
        batch.advance(torch.tensor([step, step]))
        batch.check()
    assert batch.input_lengths == [2 * ROOM + 3, 2 * ROOM + 5]


def test_several_known_tokens_become_the_next_input() -> None:
    batch = batch_of({0: 2, 1: 4})
    prefill(batch, legacy=False, folded=False)
    known = torch.arange(2 * (ROOM + 1)).view(2, -1)
    batch.advance(known)
    assert torch.equal(batch.input_ids, known)
    assert batch.position_ids[:, [0, -1]].tolist() == [[3, 3 + ROOM], [5, 5 + ROOM]]
    assert batch.input_lengths == [4 + ROOM, 6 + ROOM]
    batch.check()


@pytest.mark.parametrize(("legacy", "head_dim_last", "folded"), LAYOUTS)
def test_rows_part_by_their_lengths(legacy: bool, head_dim_last: bool, folded: bool) -> None:
    batch = batch_of({0: 9, 1: 3, 2: 6, 3: 4}, head_dim_last)
    prefill(batch, legacy, folded)
    parts = batch.split(lambda length: length > 5)
    assert [part.batch_slots for part in parts] == [[0, 2], [1, 3]]
    for part in parts:
        check_cache(part)
    assert parts[1].split(lambda length: True) == [parts[1]]


def test_no_token_follows_before_a_forward() -> None:
    with pytest.raises(AssertionError, match="follows a forward"):
        batch_of({0: 2}).advance(torch.tensor([1]))


@pytest.mark.parametrize(("legacy", "head_dim_last", "folded"), LAYOUTS)
def test_rows_leave_and_columns_with_them(legacy: bool, head_dim_last: bool, folded: bool) -> None:
    batch = batch_of({0: 9, 1: 3, 2: 6, 3: 4}, head_dim_last)
    prefill(batch, legacy, folded)
    kept = batch.filter([2, 1])
    assert (kept.batch_slots, kept.input_lengths) == ([2, 1], [7, 4])
    assert kept.attention_mask.shape[1] == 7 + kept.padding_right_offset
    check_cache(kept)
    alone = kept.filter([1])
    assert alone.seen.tolist() == [[1, 1, 1, 1]]
    check_cache(alone)


def test_rows_may_leave_before_the_prefill() -> None:
    kept = batch_of({0: 9, 1: 3, 2: 2}).filter([2, 1])
    assert kept.input_ids.tolist() == [[PAD, 200, 201], [100, 101, 102]]
    assert kept.position_ids.tolist() == [[1, 0, 1], [0, 1, 2]]
    kept.check()


@pytest.mark.parametrize(("legacy", "head_dim_last", "folded"), LAYOUTS)
def test_batches_of_different_lengths_join(legacy: bool, head_dim_last: bool, folded: bool) -> None:
    batches = [batch_of(lengths, head_dim_last) for lengths in ({0: 2}, {1: 7, 2: 3}, {3: 1, 4: 4})]
    for batch in batches:
        prefill(batch, legacy, folded)
    joined = CausalLMBatch.concatenate(batches)
    assert joined.batch_slots == [0, 1, 2, 3, 4]
    assert joined.input_lengths == [3, 8, 4, 2, 5]
    assert isinstance(joined.past_key_values, tuple if legacy else Cache)
    check_cache(joined)


def test_only_prefilled_batches_join() -> None:
    filled, fresh = batch_of({0: 2}), batch_of({1: 3})
    prefill(filled, legacy=False, folded=False)
    with pytest.raises(ValueError, match="only prefilled"):
        CausalLMBatch.concatenate([filled, fresh])


@pytest.mark.parametrize(("legacy", "head_dim_last", "folded"), LAYOUTS)
def test_any_order_of_joining_and_leaving(legacy: bool, head_dim_last: bool, folded: bool) -> None:
    """A hundred random moves, against what each row must hold."""
    chance = random.Random(3)
    batch: CausalLMBatch | None = None
    for place in range(100):
        fresh = batch_of({place: chance.randint(1, 12)}, head_dim_last)
        prefill(fresh, legacy, folded)
        if batch is not None:
            fresh = CausalLMBatch.concatenate(chance.sample([batch, fresh], 2))
        batch = fresh
        check_cache(batch)
        if len(batch) > 4:
            batch = batch.filter(chance.sample(batch.batch_slots, chance.randint(1, 4)))
            check_cache(batch)


def test_layers_that_share_anothers_keys_stay_empty() -> None:
    batches = [batch_of({0: 2}), batch_of({1: 5})]
    for batch in batches:
        prefill(batch, legacy=False, folded=False)
        assert isinstance(batch.past_key_values, Cache)
        batch.past_key_values.layers.append(DynamicCache([(None, None)]).layers[0])
    joined = CausalLMBatch.concatenate(batches)
    check_cache(joined.filter([1]))


@pytest.mark.parametrize(("legacy", "head_dim_last", "folded"), LAYOUTS)
def test_the_layout_is_seen(legacy: bool, head_dim_last: bool, folded: bool) -> None:
    layer = laid_out(torch.zeros(2, 7), head_dim_last, folded)
    past: Past = (layer, layer) if legacy else DynamicCache([layer, layer])
    assert keys_head_dim_last(past, 2, 7) is head_dim_last
    assert cache_bytes(past) == 2 * 2 * 2 * 7 * NUM_HEADS * HEAD_DIM * 4


@pytest.mark.parametrize(
    "shapes",
    [[(2, 4, 16), (2, 4, 16)], [(2, 7), (2, 7)], [(2, 3, 7, 5), (2, 3, 4, 5)], []],
    ids=["recurrent", "flat", "window", "nothing"],
)
def test_other_states_are_refused(shapes: Sequence[tuple[int, ...]]) -> None:
    tensors = [torch.zeros(shape) for shape in shapes]
    past: Past = ((tensors[0], tensors[1]),) if tensors else ()
    with pytest.raises(ValueError, match="not one key and value for each position"):
        keys_head_dim_last(past, 2, 7)
