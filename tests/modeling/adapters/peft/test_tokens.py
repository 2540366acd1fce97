"""Single trained tokens in a PEFT file: what is read, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.wire.adapters import AdapterError
from configs.wire.merging import MergeRule
from modeling.adapters.merge import open_fetched
from modeling.adapters.peft.folder import open_adapter
from modeling.adapters.peft.tokens import digits_of, ids_of, token_projections
from modeling.adapters.projection import BaseRows, Projection
from tests.modeling.adapters.lora_files import UP, factors, write_lora
from tests.modeling.adapters.peft.test_ends import (
    EMBEDDING,
    HEAD,
    HIDDEN,
    ROWS,
    VOCAB,
    embedding_factors,
    ends,
)
from tests.modeling.merges import fetched

IDS = [3, 10, 0]
KEY, HEAD_KEY = (f"{end}.token_adapter.trainable_tokens_delta" for end in (EMBEDDING, HEAD))
TRAINED = torch.arange(3.0 * HIDDEN).view(3, HIDDEN)


def projections(tied: bool = False, copies: bool = False, bias: bool = False) -> Any:
    linear, *own = ends(tied=tied, copies=copies)
    return linear, *own, *token_projections(own[:2], head_has_bias=bias)


def write(folder: Path, saved: dict[str, torch.Tensor], rows: object, **fields: Any) -> Path:
    fields = {"target_modules": ["up"], "trainable_token_indices": rows, **fields}
    return write_lora(folder, {**factors(UP, [4]), **saved}, **fields)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ids_are_exact_in_half_precision(dtype: torch.dtype) -> None:
    ids = torch.tensor([0, 1, 127, 128, 32_000, 262_143, 128**3 - 1])
    assert torch.equal(ids_of(digits_of(ids).t().to(dtype)), ids)


@pytest.mark.parametrize("rows", [IDS, {"embed_tokens": IDS}, {"model.embed_tokens": IDS}])
@pytest.mark.parametrize("tied", [False, True])
def test_rows_come_with_their_ids(tmp_path: Path, rows: object, tied: bool) -> None:
    # PEFT writes a tied head's with save_embedding_layers=True, and does not read them.
    again = {HEAD_KEY: TRAINED + 1} if tied else {}
    found = open_adapter(write(tmp_path, {KEY: TRAINED, **again}, rows), projections(tied), 8)
    stacks = list(found.stacks())[1:]
    assert [stack.projection for stack in stacks] == ([3, 4] if tied else [3])
    for stack in stacks:
        assert torch.equal(stack.a[0], TRAINED)
        assert ids_of(stack.b[0].t()).tolist() == IDS


def test_a_copy_of_the_base_weight_does_no_harm(tmp_path: Path) -> None:
    """PEFT saves one with save_embedding_layers=True."""
    base = {"model.embed_tokens.weight": BaseRows(ROWS, 0, (VOCAB, HIDDEN))}
    key = f"{EMBEDDING}.token_adapter.base_layer.weight"
    folder = write(tmp_path / "same", {KEY: TRAINED, key: ROWS}, IDS)
    list(open_adapter(folder, projections(), 8, base).stacks())
    folder = write(tmp_path / "other", {KEY: TRAINED, key: ROWS + 1}, IDS)
    with pytest.raises(AdapterError, match="is not this model's weight"):
        list(open_adapter(folder, projections(), 8, base).stacks())


OWN = {KEY: TRAINED}
REFUSED: dict[str, tuple[dict[str, torch.Tensor], object, dict[str, Any]]] = {
    "of which the file holds 0": ({}, IDS, {}),
    "has shape": ({KEY: TRAINED[:2]}, IDS, {}),
    "not finite": ({KEY: TRAINED / 0}, IDS, {}),
    "has type I64": ({KEY: TRAINED.long()}, IDS, {}),
    "has 11, this model's vocabulary 11 tokens": (OWN, [3, 11, 0], {}),
    "has -1, this": (OWN, [3, -1, 0], {}),
    "names a token twice": (OWN, [3, 3, 0], {}),
    "names 'up', which is neither": (OWN, {"up": IDS}, {}),
    "names model.embed_tokens twice": (
        OWN, {"embed_tokens": IDS, "model.embed_tokens": IDS}, {},
    ),
    "must be a list of token ids": (OWN, {"": IDS}, {}),
    "must be a list of token": (OWN, "3", {}),
    "names other tokens of the embedding than of the head": (
        OWN, {"embed_tokens": IDS, "lm_head": [1]}, {"ensure_weight_tying": True},
    ),
    "of a module that it adapts or saves": (
        {**OWN, **embedding_factors()}, IDS, {"target_modules": ["up", "embed_tokens"]},
    ),
    "no single tokens of a module that": (
        {**OWN, f"{EMBEDDING}.weight": ROWS}, IDS, {"modules_to_save": ["embed_tokens"]},
    ),
    "changes linear modules inside the layers alone": (
        OWN, IDS, {"alora_invocation_tokens": [5]},
    ),
    "trainable_tokens_delta adapts the vocabulary": (OWN, None, {}),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(tmp_path: Path, words: str) -> None:
    saved, rows, fields = REFUSED[words]
    folder = write(tmp_path, saved, rows, **fields)
    with pytest.raises(AdapterError, match=words):
        list(open_adapter(folder, projections(tied=True, copies=True), 8).stacks())


def test_where_rows_cannot_be_set(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", {HEAD_KEY: TRAINED}, {"lm_head": IDS})
    with pytest.raises(AdapterError, match="head has a bias, which PEFT leaves out"):
        open_adapter(folder, projections(bias=True), 8)
    padded: tuple[Projection, ...] = (replace(UP, can_adapt_ends=False),)
    with pytest.raises(AdapterError, match="transformers' own code"):
        open_adapter(folder, padded, 8)
    with pytest.raises(AdapterError, match="PEFT does not merge rows of single tokens"):
        open_fetched(fetched(1, [folder, folder], MergeRule((1.0, 1.0))), projections(), 8)
