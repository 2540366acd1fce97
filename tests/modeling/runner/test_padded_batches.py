"""The batches of running rows: who lies with whom, from step to step."""

from pathlib import Path

import torch

from configs.wire.plan import RequestJoin
from configs.wire.sampling import Sampling
from modeling.models.causal_lm import CausalLM
from modeling.runner.padded_batches import PaddedBatches, groups_of_like_length
from modeling.runner.padded_loading import load_causal_lm
from tests.modeling.models.tiny_causal import ORIGINAL, write_tiny
from tests.modeling.padded import padded_config


def request(place: int, length: int) -> RequestJoin:
    return RequestJoin(place, [3 + place] * length, length, -1, Sampling())


def load(folder: Path, kind: str, variant: str) -> CausalLM:
    config = padded_config(write_tiny(folder, kind, variant))
    return load_causal_lm(config.model, torch.device("cpu"), spread=False).model


def together(batches: PaddedBatches) -> list[set[int]]:
    """The places of each batch."""
    batches.check()
    return sorted((set(batch.batch_slots) for batch in batches._running), key=min)


def step(batches: PaddedBatches, fresh: list[RequestJoin]) -> list[set[int]]:
    """Everybody goes on, and `fresh` joins."""
    places, logits = batches.compute(batches.batch_slots, fresh)
    assert sorted(places) == sorted({*places})
    batches.advance(logits.argmax(-1))
    return together(batches)


@torch.inference_mode()
def test_rows_move_as_they_pass_a_border(tmp_path: Path) -> None:
    batches = PaddedBatches(load(tmp_path, "olmo2", "longrope"), lambda batch: None)
    requests = [request(0, ORIGINAL - 2), request(1, 3), request(2, ORIGINAL + 5)]
    assert step(batches, requests) == [{0, 1}, {2}]
    assert step(batches, []) == [{0, 1}, {2}], "its second token is the last within"
    assert step(batches, []) == [{0, 2}, {1}]
    batches.keep({0, 1})
    assert step(batches, [request(3, 2)]) == [{0}, {1, 3}]
    assert batches.continuing([(0, ORIGINAL + 2), (1, 8), (9, 4)]) == {0}


@torch.inference_mode()
def test_a_row_is_computed_anew_at_a_border_where_its_family_does(tmp_path: Path) -> None:
    batches = PaddedBatches(load(tmp_path, "phi3", "longrope"), lambda batch: None)
    step(batches, [request(0, ORIGINAL - 1)])
    assert batches.continuing([(0, ORIGINAL)]) == {0}
    step(batches, [])
    assert batches.continuing([(0, ORIGINAL + 1)]) == set()


@torch.inference_mode()
def test_rows_of_one_length_share_where_columns_are_looked_at(tmp_path: Path) -> None:
    batches = PaddedBatches(load(tmp_path, "llama4_text", "plain"), lambda batch: None)
    requests = [request(0, 12), request(1, 10), request(2, 12), request(3, 2), request(4, 3)]
    assert step(batches, requests) == [{0, 2}, {1}, {3, 4}]
    assert step(batches, [request(5, 11)]) == [{0, 2}, {1, 5}, {3, 4}]


def test_prompts_share_a_forward_with_their_like() -> None:
    lengths = [3, 100, 7, 51, 49, 4, 1]
    requests = [RequestJoin(i, [0] * n, n, -1, Sampling()) for i, n in enumerate(lengths)]
    groups = [[len(r.tokens) for r in group] for group in groups_of_like_length(requests)]
    assert groups == [[100, 51], [49], [7, 4], [3], [1]]
    assert groups_of_like_length([]) == []
