"""Embedding and head (the two ends) in a PEFT file: whole weights, copies, tied ends.

A whole weight (modules_to_save) replaces the base weight. A copy must equal the base weight: PEFT
writes it beside the factors of an adapted end, or by itself (save_embedding_layers). Ends that
were trained as one weight (ensure_weight_tying) are both in the file.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from modeling.adapters.faults import refuse
from modeling.adapters.peft.config import LoraPlan
from modeling.adapters.peft.tensors import check_finite, check_type
from modeling.adapters.projection import (
    WHOLE_KINDS,
    BaseRows,
    ModulePosition,
    Projection,
    ProjectionKind,
)
from sharding.slicing import width
from sharding.tensor_file import TensorFile

PREFIX = "base_model.model."
WEIGHT_SUFFIX = ".weight"
COPY_SUFFIX = ".base_layer.weight"
TOKENS_COPY_SUFFIX = ".token_adapter.base_layer.weight"
ORIGINAL_SUFFIX = ".original_module.weight"
"""Of the base weight beside a whole one, where PEFT saves ends with all that their modules hold."""
TWICE_SUFFIXES = (".modules_to_save.weight", ".modules_to_save.bias")
"""Of the whole weight and its bias once more, there; PEFT does not read them."""
COPIES = (TOKENS_COPY_SUFFIX, ORIGINAL_SUFFIX)
BIAS_COPIES = (".base_layer.bias", ".original_module.bias")
"""Of the bias of a head, beside factors or a whole head."""
COPY_ROWS = 4096
"""How many rows of a copy are compared at once."""

INSIDE_ONLY_ADVICE = (
    "this model runs in transformers' own code, where only linear modules inside the layers are "
    "adapted; retrain with target_modules inside the layers, or merge it into the base model"
)
"""For models with an embedding and head that no setting makes adaptable."""

TIED_BY_PEFT = frozenset({"embed_tokens", "lm_head"})
"""Names by which PEFT notices that an adapted end is tied (peft/utils/other.py)."""


@dataclass(frozen=True)
class Matrix:
    """This rank's part of one matrix in the stored type: rows [n, width] of the pool's page.

    first: with which of the page's blocks of 8 rows they begin.
    """

    position: ModulePosition
    rows: Tensor
    first: int = 0


@dataclass(frozen=True)
class EndTensors:
    """The tensors of the ends besides factors, by name.

    matrices: the position of each whole weight.
    copies: the base tensor of each copy.
    copied: modules for which the file holds a copy of the base weight beside the factors.
    idle: names of tensors that PEFT does not read.
    """

    matrices: dict[str, ModulePosition] = field(default_factory=dict)
    copies: dict[str, BaseRows] = field(default_factory=dict)
    copied: set[str] = field(default_factory=set)
    idle: set[str] = field(default_factory=set)

    @property
    def names(self) -> set[str]:
        """Return the names of all these tensors."""
        return {*self.matrices, *self.copies, *self.idle}

    def check(self, file: TensorFile, projections: Sequence[Projection]) -> None:
        """Refuse whole weights and copies of another model's shape, or of no float type."""
        expected = {key: base.shape for key, base in self.copies.items()}
        for key, position in self.matrices.items():
            end = _partner(projections, projections[position.projection])
            expected[key] = end.base_rows.shape
        for key, shape in expected.items():
            check_type(key, file.dtype(key))
            _check_vocabulary(key, file.shape(key), shape)

    def check_copies(self, file: TensorFile) -> None:
        """Refuse a copy of a base tensor that differs in this rank's rows."""
        for key, base in self.copies.items():
            _check_copy(file, key, base)

    def read(self, file: TensorFile, projections: Sequence[Projection]) -> Iterator[Matrix]:
        """Yield this rank's rows of every whole weight; refuses values that are not finite."""
        for key, position in self.matrices.items():
            end = _partner(projections, projections[position.projection])
            rows = _own_rows(end)
            if rows.start == rows.stop:  # A rank that holds only padding of the vocabulary.
                continue
            found = file.rows(key, rows.start, rows.stop)
            check_finite(key, found)
            yield Matrix(position, found)


def find_ends(
    keys: Set[str],
    plan: LoraPlan,
    projections: Sequence[Projection],
    base: Mapping[str, BaseRows],
) -> EndTensors:
    """Find whole weights and copies; refuse modules_to_save that this server does not serve.

    base: the ends' tensors by their paths; their copies are accepted on any server.
    """
    ends = [p for p in projections if p.kind in WHOLE_KINDS]
    saved = _saved_ends(plan, ends, all(each.can_adapt_ends for each in projections))
    found = EndTensors()
    for path, rows in base.items():
        module, _, parameter = path.rpartition(".")
        suffixes = {"weight": COPIES, "bias": BIAS_COPIES}.get(parameter, ())
        names = [PREFIX + path, *(PREFIX + module + suffix for suffix in suffixes)]
        found.copies.update({name: rows for name in names if name in keys})
    for end in ends:
        present = _weights(end, keys)
        if end.name in saved:
            if len(present) != 1:
                refuse(
                    f"modules_to_save requires {PREFIX}{end.module}{WEIGHT_SUFFIX}, of which the "
                    f"file holds {len(present)}: save the adapter again"
                )
            found.matrices[present[0]] = ModulePosition(_whole_pool(end, projections, plan), 0)
            found.copies.pop(present[0], None)
            found.idle.update(
                PREFIX + m + suffix for m in end.modules(0) for suffix in TWICE_SUFFIXES
            )
        else:
            found.copies.update(dict.fromkeys(present, end.base_rows))
        for module in end.modules(0):
            if PREFIX + module + COPY_SUFFIX in keys:
                found.copies[PREFIX + module + COPY_SUFFIX] = end.base_rows
                found.copied.add(module)
    return found


def _saved_ends(plan: LoraPlan, ends: Sequence[Projection], can_adapt: bool) -> set[str]:
    """Return the ends that modules_to_save names, by PEFT's rule: an entry ends a module's path.

    can_adapt: whether some setting lets adapters change this model's ends. Refuses an entry that
    names another module.
    """
    saved: set[str] = set()
    for entry in plan.modules_to_save:
        meant = {end.name for end in ends if any(m.endswith(entry) for m in end.modules(0))}
        if not meant:
            _refuse_saved(plan, entry, bool(ends), can_adapt)
        saved |= meant
    return {end.name for end in ends} if saved and is_tied(plan, ends) else saved


def _refuse_saved(plan: LoraPlan, entry: str, has_ends: bool, can_adapt: bool) -> NoReturn:
    field = f"modules_to_save={list(plan.modules_to_save)!r} is not served here: "
    if has_ends:
        refuse(
            f"{field}{entry!r} is none of what adapters may bring whole here: linear maps inside "
            "the layers, embedding, head, a decoder's classification head (score), and norms where "
            "this server lets adapters bring them; retrain without it, or merge it into the base "
            "model"
        )
    if not can_adapt:
        refuse(field + INSIDE_ONLY_ADVICE)
    refuse(
        f"{field}but for a decoder's classification head (score), only a whole embedding or head "
        "can be, where the server is started with "
        "adapters.vocabulary true and adapters.vocabulary_copies above 0; merge other modules into "
        "the base model"
    )


def _whole_pool(end: Projection, projections: Sequence[Projection], plan: LoraPlan) -> int:
    """Return the index of the projection for whole weights of this end."""
    for index, projection in enumerate(projections):
        if projection.kind is WHOLE_KINDS[end.kind]:
            return index
    refuse(
        f"modules_to_save={list(plan.modules_to_save)!r} is not served here: start the server "
        f"with adapters.vocabulary_copies above 0, each copy takes a whole {end.name}"
    )


def check_tying(
    file: TensorFile,
    plan: LoraPlan,
    projections: Sequence[Projection],
    adapted: Mapping[str, ModulePosition],
) -> None:
    """Refuse ends that PEFT would tie (ensure_weight_tying) but that differ in the file."""
    ends = [p for p in projections if p.kind in WHOLE_KINDS]
    if not is_tied(plan, ends):
        return
    keys = file.keys()
    weights = [key for end in ends for key in _weights(end, keys)[:1]]
    if len(weights) == 2 and plan.modules_to_save:
        _check_equal_rows(file, weights[0], weights[1], ends[0])
    modules = [
        m for m, position in adapted.items() if projections[position.projection].kind in WHOLE_KINDS
    ]
    if len(modules) == 1 and modules[0].rsplit(".", 1)[-1] in TIED_BY_PEFT:
        refuse(
            f"ensure_weight_tying=True, but of the tied ends the file adapts {modules[0]} alone: "
            "save the adapter again with a recent PEFT, or retrain without it"
        )
    if len(modules) == 2:
        tokens, head = (PREFIX + module for module in modules)
        pairs = (
            (f"{head}.lora_A.weight", f"{tokens}.lora_embedding_B"),
            (f"{head}.lora_B.weight", f"{tokens}.lora_embedding_A"),
        )
        for one, other in pairs:
            if not torch.equal(file.get_tensor(one), file.get_tensor(other).t()):
                _refuse_two(one, other)


def is_tied(plan: LoraPlan, projections: Sequence[Projection]) -> bool:
    """Return whether the adapter was trained with both ends as one weight."""
    ends = [p for p in projections if p.kind in WHOLE_KINDS]
    is_one = len(ends) == 2 and ends[0].base is not None and ends[0].base is ends[1].base
    return plan.ensure_weight_tying and is_one


def _weights(end: Projection, keys: Set[str]) -> list[str]:
    """Return the names under which the file holds an end's weight."""
    names = (PREFIX + module + WEIGHT_SUFFIX for module in end.modules(0))
    return [name for name in names if name in keys]


def _check_equal_rows(file: TensorFile, one: str, other: str, end: Projection) -> None:
    rows = _own_rows(end)
    for start in range(rows.start, rows.stop, COPY_ROWS):
        stop = min(start + COPY_ROWS, rows.stop)
        if not torch.equal(file.rows(one, start, stop), file.rows(other, start, stop)):
            _refuse_two(one, other)


def _refuse_two(one: str, other: str) -> NoReturn:
    refuse(
        f"ensure_weight_tying=True, but {one} and {other} differ: they were not trained as one; "
        "save the adapter again, or set ensure_weight_tying to false if two are meant"
    )


def _check_copy(file: TensorFile, key: str, base: BaseRows) -> None:
    """Compare a copy of a base tensor with this rank's rows, some at a time.

    Compares in the server's type, to which PEFT would convert the copy when it loads it.
    """
    for start in range(0, len(base.rows), COPY_ROWS):
        # Some rows at a time: a second copy of a whole embedding may be gigabytes.
        own = base.rows[start : start + COPY_ROWS].cpu()
        first = base.first + start
        saved = file.rows(key, first, first + len(own)).to(own.dtype)
        if torch.equal(own, saved):
            continue
        if key.endswith(".bias"):
            refuse(
                f"{key} is not this model's bias: it was trained with a whole head, of which "
                "adapters bring the weight alone here, or the adapter is for another base model; "
                "merge it into its base model"
            )
        refuse(
            f"{key} is not this model's weight: it was trained as a whole, or the adapter is for "
            "another base model; name it in modules_to_save, or save the adapter with "
            "save_embedding_layers=False"
        )


def _check_vocabulary(key: str, shape: Sequence[int], wanted: tuple[int, ...]) -> None:
    """Refuse a vocabulary or width that differs from the base model's."""
    if tuple(shape) == wanted:
        return
    differs = f"{key} has shape {list(shape)}, this model's is {list(wanted)}"
    if tuple(shape[1:]) != wanted[1:]:
        refuse(f"{differs}: the adapter is for another base model")
    refuse(
        f"{differs}: the vocabulary was resized, or the adapter is for another base model. Resize "
        f"the base model by resize_token_embeddings({shape[0]}), save it and serve that; or, if no "
        "new token is needed and this matrix was not trained, save the adapter with "
        "save_embedding_layers=False"
    )


def _partner(projections: Sequence[Projection], whole: Projection) -> Projection:
    """Return the projection of factors at the same end as the whole matrices of `whole`."""
    return next(p for p in projections if WHOLE_KINDS.get(p.kind) is whole.kind)


def _own_rows(end: Projection) -> slice:
    """Return this rank's token ids; end: a projection of factors."""
    cut = end.inputs if end.kind is ProjectionKind.EMBEDDING else end.outputs
    ((first, last),) = cut or ((0, 0),)
    assert width(cut) == last - first
    return slice(first, last)
