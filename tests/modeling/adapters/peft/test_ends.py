"""What a PEFT file may hold of a vocabulary's ends, tensor by tensor."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.wire.adapters import AdapterError, AdapterRefusal
from modeling.adapters.peft.adapter import PeftAdapter
from modeling.adapters.peft.folder import open_adapter
from modeling.adapters.projection import ModulePosition, Projection, ProjectionKind
from tests.modeling.adapters.lora_files import UP, factors, write_lora

VOCAB, HIDDEN, RANK = 11, 6, 4
EMBEDDING = "base_model.model.model.embed_tokens"
HEAD = "base_model.model.lm_head"
ROWS = torch.arange(VOCAB * HIDDEN, dtype=torch.float32).view(VOCAB, HIDDEN)
OTHER_ROWS = ROWS.flip(0)


def ends(
    first: int = 0, last: int = VOCAB, copies: bool = True, tied: bool = False
) -> tuple[Projection, ...]:
    """A linear map and the ends of the rank that holds the token ids from first to last."""
    base = ROWS[first:last]
    cut, every = ((first, last),), ((0, HIDDEN),)
    tokens = Projection(
        "embed_tokens",
        "model.embed_tokens",
        VOCAB,
        HIDDEN,
        cut,
        every,
        1,
        ProjectionKind.EMBEDDING,
        base,
    )
    head = Projection(
        "lm_head",
        "lm_head",
        HIDDEN,
        VOCAB,
        every,
        cut,
        1,
        ProjectionKind.HEAD,
        base if tied else OTHER_ROWS[first:last],
        aliases=("embed_out",),
    )
    whole = [
        Projection(f"{end.name}.whole", end.module, HIDDEN, 0, every, (), 2, kind)
        for end, kind in (
            (tokens, ProjectionKind.WHOLE_EMBEDDING),
            (head, ProjectionKind.WHOLE_HEAD),
        )
    ]
    return (UP, tokens, head, *(whole if copies else []))


def embedding_factors() -> dict[str, Tensor]:
    a, b = torch.randn(RANK, VOCAB), torch.randn(HIDDEN, RANK)
    return {f"{EMBEDDING}.lora_embedding_A": a, f"{EMBEDDING}.lora_embedding_B": b}


def head_factors(module: str = HEAD) -> dict[str, Tensor]:
    a, b = torch.randn(RANK, HIDDEN), torch.randn(VOCAB, RANK)
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def as_one() -> dict[str, Tensor]:
    """The factors of both ends as PEFT's ensure_weight_tying saves them."""
    tokens = embedding_factors()
    a, b = tokens.values()
    head = {f"{HEAD}.lora_A.weight": b.t(), f"{HEAD}.lora_B.weight": a.t()}
    return tokens | {key: value.contiguous() for key, value in head.items()}


def opened(
    folder: Path,
    tensors: dict[str, Tensor],
    projections: tuple[Projection, ...] | None = None,
    **fields: Any,
) -> PeftAdapter:
    """Judge and read a file with these tensors beside a linear map's."""
    path = write_lora(folder, {**factors(UP, [4]), **tensors}, **fields)
    adapter = open_adapter(path, ends() if projections is None else projections, 64)
    list(adapter.read())
    return adapter


def refusal(
    folder: Path,
    tensors: dict[str, Tensor],
    projections: tuple[Projection, ...] | None = None,
    **fields: Any,
) -> str:
    with pytest.raises(AdapterError) as caught:
        list(opened(folder, tensors, projections, **fields).read_matrices())
    assert caught.value.refusal is AdapterRefusal.UNSUPPORTED
    return caught.value.message


@pytest.mark.parametrize(("first", "last"), [(0, VOCAB), (3, 8), (5, 5)])
def test_each_rank_reads_its_own_rows_of_a_whole_matrix(
    tmp_path: Path, first: int, last: int
) -> None:
    whole = {f"{HEAD}.weight": torch.randn(VOCAB, HIDDEN).bfloat16()}
    fields = {"modules_to_save": ["lm_head"]}
    adapter = opened(tmp_path, whole, ends(first, last), **fields)
    assert adapter.ranks == {ModulePosition(0, 0): 4, ModulePosition(4, 0): 1}
    found = list(adapter.read_matrices())
    assert [matrix.position for matrix in found] == [ModulePosition(4, 0)] * (last > first)
    for matrix in found:
        assert torch.equal(matrix.rows, whole[f"{HEAD}.weight"][first:last])


@pytest.mark.parametrize("entry", ["model.embed_tokens", "embed_tokens", "tokens"])
def test_an_entry_means_the_end_of_a_path_as_in_peft(tmp_path: Path, entry: str) -> None:
    whole = {f"{EMBEDDING}.weight": ROWS + 1}
    adapter = opened(tmp_path, whole, modules_to_save=[entry])
    (matrix,) = adapter.read_matrices()
    assert matrix.position == ModulePosition(3, 0)


def test_a_file_may_hold_whole_matrices_alone(tmp_path: Path) -> None:
    path = write_lora(tmp_path, {f"{HEAD}.weight": ROWS}, modules_to_save=["lm_head"])
    assert open_adapter(path, ends(), 64).ranks == {ModulePosition(4, 0): 1}


def test_a_server_without_copies_says_how(tmp_path: Path) -> None:
    whole = {f"{HEAD}.weight": ROWS}
    message = refusal(tmp_path, whole, ends(copies=False), modules_to_save=["lm_head"])
    assert message.startswith("modules_to_save=['lm_head'] is not served here")
    assert "adapters.vocabulary_copies above 0" in message
    message = refusal(tmp_path, whole, (UP,), modules_to_save=["lm_head"])
    assert "adapters.vocabulary true and adapters.vocabulary_copies above 0" in message


def test_other_modules_are_refused_by_name(tmp_path: Path) -> None:
    whole = {f"{HEAD}.weight": ROWS, "base_model.model.model.norm.weight": torch.ones(HIDDEN)}
    message = refusal(tmp_path, whole, modules_to_save=["lm_head", "norm"])
    assert "'norm' is none of what adapters may bring whole here" in message
    assert "norms where this server lets adapters bring them" in message


def test_a_requested_matrix_must_be_there(tmp_path: Path) -> None:
    message = refusal(tmp_path, {}, modules_to_save=["lm_head"])
    assert f"modules_to_save requires {HEAD}.weight, of which the file holds 0" in message


def test_matrices_of_another_shape_or_type_are_refused(tmp_path: Path) -> None:
    saved = {"modules_to_save": ["lm_head"]}
    message = refusal(tmp_path, {f"{HEAD}.weight": torch.zeros(12, HIDDEN)}, None, **saved)
    assert f"{HEAD}.weight has shape [12, 6], this model's is [11, 6]" in message
    message = refusal(tmp_path, {f"{HEAD}.weight": ROWS.to(torch.int32)}, None, **saved)
    assert "has type I32" in message
    broken = ROWS.clone()
    broken[2, 2] = float("nan")
    assert "not finite" in refusal(tmp_path, {f"{HEAD}.weight": broken}, None, **saved)


@pytest.mark.parametrize("end", [".weight", ".base_layer.weight"])
def test_a_copy_of_the_base_weight_must_be_one(tmp_path: Path, end: str) -> None:
    """What modules_to_save does not name is written by save_embedding_layers."""
    copy = {f"{EMBEDDING}{end}": ROWS, **embedding_factors()}
    assert not opened(tmp_path, copy, ends(3, 8)).ends.matrices
    copy[f"{EMBEDDING}{end}"] = ROWS + torch.eye(VOCAB, HIDDEN) * (torch.arange(HIDDEN) == 5)
    opened(tmp_path, copy, ends(6, 8))  # The other ranks see to their own rows.
    message = refusal(tmp_path, copy, ends(3, 8))
    assert f"{EMBEDDING}{end} is not this model's weight" in message


def test_an_end_adapted_twice_is_refused(tmp_path: Path) -> None:
    twice = {f"{HEAD}.weight": ROWS, **head_factors()}
    assert "lm_head is adapted twice" in refusal(tmp_path, twice, modules_to_save=["lm_head"])
    names = {**head_factors(), **head_factors("base_model.model.embed_out")}
    assert "embed_out is adapted twice" in refusal(tmp_path, names)


def test_an_end_may_have_an_older_name(tmp_path: Path) -> None:
    older = "base_model.model.embed_out"
    assert opened(tmp_path, head_factors(older)).ranks[ModulePosition(2, 0)] == RANK
    adapter = opened(tmp_path, {f"{older}.weight": ROWS}, modules_to_save=["embed_out"])
    assert adapter.ranks == {ModulePosition(0, 0): 4, ModulePosition(4, 0): 1}


def test_factors_that_were_trained_as_one(tmp_path: Path) -> None:
    tying = {"ensure_weight_tying": True}
    adapter = opened(tmp_path, as_one(), ends(tied=True), **tying)
    assert adapter.ranks == {
        ModulePosition(0, 0): 4,
        ModulePosition(1, 0): RANK,
        ModulePosition(2, 0): RANK,
    }
    two = {**embedding_factors(), **head_factors()}
    message = refusal(tmp_path, two, ends(tied=True), **tying)
    assert "were not trained as one" in message
    opened(tmp_path, two, ends(tied=False), **tying)  # PEFT finds nothing to tie.
    opened(tmp_path, two, ends(tied=True))


def test_one_of_two_tied_ends_is_refused(tmp_path: Path) -> None:
    tying = {"ensure_weight_tying": True}
    for half in (embedding_factors(), head_factors()):
        message = refusal(tmp_path, half, ends(tied=True), **tying)
        assert "of the tied ends the file adapts" in message
    whole = {f"{EMBEDDING}.weight": ROWS + 1}
    fields = {**tying, "modules_to_save": ["embed_tokens"]}
    assert f"requires {HEAD}.weight" in refusal(tmp_path, whole, ends(tied=True), **fields)
    opened(tmp_path, whole, ends(tied=False), **fields)


def test_an_embedding_that_peft_does_not_know_is_tied_to_nothing(tmp_path: Path) -> None:
    """PEFT looks for the names embed_tokens and lm_head; GPT-2's wte is adapted alone."""
    up, tokens, *rest = ends(tied=True)
    wte = replace(tokens, name="wte", module="transformer.wte")
    renamed = {
        key.replace("model.model.embed_tokens", "model.transformer.wte"): value
        for key, value in embedding_factors().items()
    }
    adapter = opened(tmp_path, renamed, (up, wte, *rest), ensure_weight_tying=True)
    assert ModulePosition(1, 0) in adapter.ranks


def test_matrices_that_were_trained_as_one(tmp_path: Path) -> None:
    fields = {"ensure_weight_tying": True, "modules_to_save": ["embed_tokens"]}
    equal = {f"{EMBEDDING}.weight": ROWS + 1, f"{HEAD}.weight": ROWS + 1}
    adapter = opened(tmp_path, equal, ends(tied=True), **fields)
    assert [m.position for m in adapter.read_matrices()] == [
        ModulePosition(3, 0),
        ModulePosition(4, 0),
    ]
    other = equal | {f"{HEAD}.weight": ROWS + 2}
    assert "were not trained as one" in refusal(tmp_path, other, ends(tied=True), **fields)


@pytest.mark.parametrize(
    "bad", [torch.ones(()), torch.ones(VOCAB), torch.ones(3, 3).to(torch.int8)]
)
def test_ends_of_no_right_shape_or_type_are_refused_before_they_are_compared(
    tmp_path: Path, bad: Tensor
) -> None:
    fields = {"ensure_weight_tying": True, "modules_to_save": ["embed_tokens", "lm_head"]}
    tensors = {f"{EMBEDDING}.weight": bad, f"{HEAD}.weight": bad.clone()}
    message = refusal(tmp_path, tensors, ends(tied=True), **fields)
    assert "embed_tokens.weight has" in message
    assert "adapts model" not in message
