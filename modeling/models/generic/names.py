"""Which tensors of a checkpoint make one parameter of transformers' modules.

Released checkpoints keep older names, and one matrix for each expert where the module has one
tensor of all. transformers lists both for each model type (`transformers.conversion_mapping`);
here the list is read backwards, so that only a rank's part of each tensor is read.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
)

from configs.architectures.base import ArchitectureError
from configs.architectures.generic import GenericArchitecture
from modeling.models.generic.stacked_experts import StackedExperts
from modeling.quantisation.formats import MARKS
from modeling.quantisation.stored_integers import CODES
from sharding.loader import RowsOf, Weights


class SourceNames:
    """The checkpoint's names by those of the model's parameters.

    inside: where parameters are that lie in a tensor of several.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        """names: of the checkpoint's tensors; ArchitectureError for conversions not known here."""
        transforms: list[Any] = get_model_conversion_mapping(model)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        tensors = (*model.named_parameters(), *model.named_buffers())
        self._rows = {name: len(tensor) for name, tensor in tensors if tensor.dim()}
        own = [name for name, _ in tensors]
        # Checkpoints of a model without its head lack the first part.
        self._whole = {name.partition(".")[2]: name for name in own} | {name: name for name in own}
        self._found_as: dict[str, str] = {}
        self._plain: dict[str, str] = {}
        self._stacked: dict[str, StackedExperts] = defaultdict(StackedExperts)
        self._joined: dict[str, dict[int, str]] = defaultdict(dict)
        self.inside: dict[str, RowsOf] = {}
        for name in names:
            self._add(name)

    def stacked(self, target: str) -> StackedExperts | None:
        """What a parameter is stacked from; None for one that is a tensor of the checkpoint."""
        return self._stacked.get(target)

    def joined(self, target: str) -> list[str]:
        """The tensors that lie one below the other in a convolution's weight; else none."""
        return [name for _, name in sorted(self._joined.get(target, {}).items())]

    def plain(self) -> dict[str, str]:
        """The model's name to the checkpoint's, for parameters where the two differ."""
        return {target: name for target, name in self._plain.items() if target != name}

    def are_lost(self, module: str) -> bool:
        """Whether PEFT does not find a module's factors in a file that it wrote.

        It renames them as transformers renames a checkpoint's tensors, and there the pattern of an
        old name may fit today's name too (Laguna's `shared_expert.`, which is an expression).
        """
        name = f"{module}.weight"
        return self._renamed(name) != name

    def _add(self, name: str) -> None:
        matrix = _matrix(name)
        target = self._renamed(matrix)
        for converter in self._converters:
            final, pattern = converter.rename_source_key(target)
            if pattern is not None:
                part = converter.source_patterns.index(pattern)
                if _joins_convolutions(converter):
                    self._joined[self._whole.get(final, final)][part] = name
                    return
                if name == matrix and _splits(converter):
                    self._split(converter.target_patterns, final, name)
                    return
                _check(converter)
                final = self._complete(final)
                # Others are read beside the matrix that they belong to.
                if name == matrix or name.endswith(CODES):
                    self._stacked[final].parts[part][_expert(pattern, target)] = matrix
                return
        final = self._renamed(name)
        self._plain[self._whole.get(final, final)] = name

    def _split(self, targets: Sequence[str], first: str, name: str) -> None:
        """Note the rows of one tensor that are several of the model's; first: the first of those.

        A parameter that the model has not (a bias) stays unread.
        """
        names = (first.replace(targets[0], each) for each in targets)
        found = [self._whole.get(each, each) for each in names]
        sizes = [self._rows.get(each, 0) for each in found]
        for index, each in enumerate(found):
            if sizes[index]:
                self.inside[each] = RowsOf(name, sum(sizes[:index]), sum(sizes))

    def _complete(self, final: str) -> str:
        """Return the model's name; ArchitectureError where experts' names lack parts unevenly."""
        found = self._whole.get(final, final)
        if self._found_as.setdefault(found, final) != final:
            raise ArchitectureError(
                f"{found}: some experts' tensors are named from {found.partition('.')[0]} on and "
                "others are not, and transformers mixes these experts up: rename them"
            )
        return found

    def _renamed(self, name: str) -> str:
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name


def _matrix(name: str) -> str:
    """Return the name of the matrix that a quantised map's tensor is of; others' as they are."""
    path, inside, _ = name.partition(".weight.")
    if inside:
        return f"{path}.weight"
    path, _, mark = name.rpartition(".")
    return f"{path}.weight" if mark in MARKS else name


def _expert(pattern: str, name: str) -> int:
    """Return the number at the asterisk of a pattern that occurs in a name."""
    # Some patterns mark their points as such, most do not.
    literal = pattern.replace("\\.", ".")
    found = re.search(re.escape(literal).replace(r"\*", r"(\d+)"), name)
    assert found is not None, (pattern, name)
    return int(found[1])


def _joins_convolutions(converter: Any) -> bool:
    """Whether convolutions of queries, keys and values, stored apart, are one in the module."""
    (operation, *others) = converter.operations
    is_join = not others and type(operation) is Concatenate and operation.dim == 0
    return is_join and all("conv1d" in pattern for pattern in converter.source_patterns)


def _splits(converter: Any) -> bool:
    """Whether several linear maps of the model are one tensor of the checkpoint, by its rows."""
    (operation, *others) = converter.operations
    # transformers before 5.24 has no class for parts of different sizes.
    is_split = type(operation).__name__ == "Split" or _is_chunk(operation)
    return not others and is_split and operation.dim == 0


def _is_chunk(operation: Any) -> bool:
    """Whether it cuts a tensor into equal parts, as many as it has names for."""
    return type(operation) is Chunk and operation.num_shards_attribute is None


def _check(converter: Any) -> None:
    """Refuse what is not: one matrix for each expert, all of one kind below each other."""
    known = {(MergeModulelist, 0), (Concatenate, 1)}
    for operation in converter.operations:
        if (type(operation), operation.dim) not in known:
            raise ArchitectureError(
                f"tensors {', '.join(converter.source_patterns)} are stored in a way that is not "
                "served paged: save the model anew with transformers 5"
            )


def unread(causal: PreTrainedModel, architecture: GenericArchitecture) -> tuple[str, ...]:
    """Tensors that transformers leaves unread in any module, as expressions of whole names."""
    found: list[str] = []
    for module in causal.modules():
        found += getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = (f".*(?:{pattern}).*" for pattern in dict.fromkeys(found))
    # Layers behind the last one, which predict further tokens (MTP): transformers lists them by
    # the numbers that the first models of a type have.
    count, first = architecture.settings.get("num_nextn_predict_layers"), architecture.num_layers
    numbers = range(first, first + min(count, first)) if isinstance(count, int) else ()
    idle = architecture.idle_layers
    return (*patterns, *(rf"model\.layers\.{number}\..*" for number in (*numbers, *idle)))


def find_sources(
    causal: PreTrainedModel, names: SourceNames, weights: Weights
) -> Mapping[str, str]:
    """Let the model's parameters be read by the checkpoint's names.

    Returns the parameters of layers that share an earlier layer's, each with that one's name; those
    that the checkpoint has twice are their own.
    """
    for target, name in names.plain().items():
        weights.stand_in(target, name)
    for target, rows in names.inside.items():
        weights.inside(target, rows)
    # A decoder that transformers has inside of a larger model alone says nothing of it.
    tied: dict[str, str] = getattr(causal, "all_tied_weights_keys", {})
    inside = f"{causal.base_model_prefix}."
    shared = {
        name: first
        for name, first in tied.items()
        if name.startswith(inside) and not weights.lists(name)
    }
    for target, first in shared.items():
        weights.stand_in(target, first)
    return shared
