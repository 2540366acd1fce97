"""Trained rows of embedding and head in a PEFT file (trainable_token_indices).

PEFT sets them in the weights. It names modules by the ends of their paths; a list alone is for the
embedding. A head that is tied to the embedding takes the embedding's rows, unless rows of other
tokens are its own. (peft/utils/other.py: set_additional_trainable_modules)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.adapters.faults import refuse
from modeling.adapters.peft.config import LoraPlan
from modeling.adapters.peft.ends import PREFIX
from modeling.adapters.peft.tensors import check_finite, check_type
from modeling.adapters.projection import (
    TOKEN_KINDS,
    ModulePosition,
    Projection,
    ProjectionKind,
)
from modeling.adapters.stacks import LoraStack
from sharding.slicing import whole
from sharding.tensor_file import TensorFile

ROWS_SUFFIX = ".token_adapter.trainable_tokens_delta"
DIGIT = 128
NUM_DIGITS = 3
"""Ids are below 128 ** 3, two million. Half precision holds each digit exactly."""


def token_projections(
    ends: Sequence[Projection], head_has_bias: bool = False
) -> tuple[Projection, ...]:
    """Return the projections of trained rows; ends: those of embedding's and head's factors.

    head_has_bias: PEFT leaves it out where it sets rows.
    """
    found = []
    for end in ends:
        vocab_size, hidden = end.base_rows.shape
        found.append(
            Projection(
                name=f"{end.name}.tokens",
                module=end.module,
                aliases=end.aliases,
                in_features=hidden,
                out_features=vocab_size,
                inputs=whole(hidden),
                outputs=whole(NUM_DIGITS),
                num_layers=1,
                kind=TOKEN_KINDS[end.kind],
                base=end.base,
                has_bias=head_has_bias and end.kind is ProjectionKind.HEAD,
            )
        )
    return tuple(found)


@dataclass(frozen=True)
class TokenTensor:
    """A tensor of trained rows [ids, width] in a file.

    positions: where they are set: embedding, head, or both where they are tied.
    names: of the tensor, and of its copies for a tied head, which PEFT may write and does not read.
    """

    key: str
    ids: tuple[int, ...]
    positions: tuple[ModulePosition, ...]
    names: frozenset[str]

    def stacks(self, file: TensorFile) -> Iterator[LoraStack]:
        """Yield the rows as A and their ids' digits as B, for each end; refuses not finite ones."""
        rows = file.rows(self.key, 0, len(self.ids))
        check_finite(self.key, rows)
        for position in self.positions:
            digits = digits_of(torch.tensor(self.ids))
            yield LoraStack(position.projection, (0,), rows[None], digits[None])


def digits_of(ids: Tensor) -> Tensor:
    """Return the digits of token ids, float32 [3, ids], the lowest first."""
    return torch.stack([ids // DIGIT**n % DIGIT for n in range(NUM_DIGITS)]).float()


def ids_of(digits: Tensor) -> Tensor:
    """Return token ids, int64, by their digits [ids, 3] in any type."""
    weights = [DIGIT**n for n in range(NUM_DIGITS)]
    return (digits.long() * torch.tensor(weights, device=digits.device)).sum(1)


def find_tokens(
    file: TensorFile, plan: LoraPlan, projections: Sequence[Projection]
) -> tuple[TokenTensor, ...]:
    """Find an adapter's trained rows, checked; AdapterError says what is wrong."""
    if not plan.tokens:
        return ()
    ends = {
        index: each for index, each in enumerate(projections) if each.kind in TOKEN_KINDS.values()
    }
    if not ends:
        refuse(
            "trainable_token_indices is not served over this model, which runs in transformers' "
            "own code, norms its embedding or scales its logits: merge the trained tokens into the "
            "base model"
        )
    named = _ids_of_ends(plan, ends)
    return tuple(_tensor(file, ends, each) for each in _joined(plan, ends, named))


def _ids_of_ends(plan: LoraPlan, ends: Mapping[int, Projection]) -> dict[int, tuple[int, ...]]:
    """Return the token ids of each end that the config names."""
    named: dict[int, tuple[int, ...]] = {}
    for name, ids in plan.tokens.items():
        found = [index for index, end in ends.items() if _is_named(name, end)]
        if not found:
            refuse(
                f"trainable_token_indices names {name!r}, which is neither the embedding nor the "
                "head: merge the trained tokens into the base model"
            )
        for index in found:
            if index in named:
                refuse(f"trainable_token_indices names {ends[index].module} twice")
            _check_ids(ids, ends[index])
            named[index] = ids
    return named


def _is_named(name: str, end: Projection) -> bool:
    if not name:
        return end.kind is ProjectionKind.EMBEDDING_TOKENS
    return any(module.endswith(name) for module in end.modules(0))


def _check_ids(ids: tuple[int, ...], end: Projection) -> None:
    wrong = [token for token in ids if not 0 <= token < end.out_features]
    if wrong:
        refuse(
            f"trainable_token_indices has {wrong[0]}, this model's vocabulary {end.out_features} "
            "tokens: serve the base model with the resized vocabulary"
        )
    if len(set(ids)) < len(ids):
        refuse("trainable_token_indices names a token twice: PEFT leaves open which row is meant")


@dataclass(frozen=True)
class _Rows:
    """Rows before they are found in a file: the ends that take them, the tensor's owner first."""

    ends: tuple[int, ...]
    ids: tuple[int, ...]


def _joined(
    plan: LoraPlan, ends: Mapping[int, Projection], named: Mapping[int, tuple[int, ...]]
) -> list[_Rows]:
    """Return which ends take which rows; PEFT ties a head that is tied and has no other ids."""
    embedding, head = ends
    is_one = ends[embedding].base is ends[head].base
    if not is_one or embedding not in named:
        return [_Rows((index,), ids) for index, ids in named.items()]
    ids = named[embedding]
    if named.get(head, ids) == ids:
        return [_Rows((embedding, head), ids)]
    if plan.ensure_weight_tying:
        refuse(
            "ensure_weight_tying=True, but trainable_token_indices names other tokens of the "
            "embedding than of the head: PEFT has no such adapters"
        )
    return [_Rows((embedding,), ids), _Rows((head,), named[head])]


def _tensor(file: TensorFile, ends: Mapping[int, Projection], rows: _Rows) -> TokenTensor:
    end = ends[rows.ends[0]]
    keys = [PREFIX + module + ROWS_SUFFIX for module in end.modules(0)]
    present = [key for key in keys if key in file.keys()]  # noqa: SIM118
    if len(present) != 1:
        refuse(
            f"trainable_token_indices requires {keys[0]}, of which the file holds {len(present)}: "
            "save the adapter again"
        )
    (key,) = present
    check_type(key, file.dtype(key))
    wanted = (len(rows.ids), end.in_features)
    if file.shape(key) != wanted:
        refuse(
            f"{key} has shape {list(file.shape(key))}, trainable_token_indices and this model need "
            f"{list(wanted)}: the adapter is for another base model, or its files do not belong "
            "together"
        )
    for index in rows.ends:
        if ends[index].has_bias:
            refuse(
                "trainable_token_indices: this model's head has a bias, which PEFT leaves out "
                "where it sets rows: merge the trained tokens into the base model"
            )
    positions = tuple(ModulePosition(index, 0) for index in rows.ends)
    modules = (module for index in rows.ends for module in ends[index].modules(0))
    names = frozenset(PREFIX + module + ROWS_SUFFIX for module in modules)
    return TokenTensor(key, rows.ids, positions, names)
