"""A PEFT adapter's files that passed all checks, read stack by stack."""

import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from configs.reading import DamagedFile
from configs.wire.adapters import AdapterRefusal
from modeling.adapters.expert_pages import ExpertPages
from modeling.adapters.faults import refuse
from modeling.adapters.peft.biases import BiasTensors
from modeling.adapters.peft.config import LoraPlan
from modeling.adapters.peft.dora import magnitude_key
from modeling.adapters.peft.ends import EndTensors, Matrix
from modeling.adapters.peft.experts import ExpertPart, ExpertTensors
from modeling.adapters.peft.factor_names import FactorNames, factor_names
from modeling.adapters.peft.heads import HeadTensors
from modeling.adapters.peft.names import WEIGHTS_NAME
from modeling.adapters.peft.norms import NormTensors
from modeling.adapters.peft.score import ScoreTensor
from modeling.adapters.peft.tensors import check_finite, have_finite_sums
from modeling.adapters.peft.tokens import TokenTensor
from modeling.adapters.peft.whole import WholeLinearTensors
from modeling.adapters.projection import ModulePosition, Projection
from modeling.adapters.stacks import LoraModule, LoraStack
from sharding.extents import Scratch, Stacks
from sharding.tensor_file import TensorFile

PART_BYTES = 28 * 2**20
"""Most bytes of modules that are read and converted at a time, if one alone has not more: staging
needs little memory beside the host tier, and few calls."""


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter that passed all checks.

    file: open, holds the tensors.
    plan: ranks and scalings.
    modules: the adapted modules' positions by path.
    bare: those of modules with a trained bias and no factors.
    projections: the model's.
    ends: tensors of embedding and head besides factors.
    score: its classification head; None without one.
    biases: those in the file.
    tokens: trained rows of embedding and head.
    norms: weights and biases of norms.
    experts: factors of routed experts.
    whole: whole linear maps.
    heads: Medusa heads, in a file of their own; None without.
    has_idle: whether tensors were left out because all of their numbers are zero.
    """

    file: TensorFile
    plan: LoraPlan
    modules: dict[str, ModulePosition]
    projections: tuple[Projection, ...]
    ends: EndTensors = field(default_factory=EndTensors)
    score: ScoreTensor | None = None
    biases: BiasTensors = field(default_factory=BiasTensors)
    tokens: tuple[TokenTensor, ...] = ()
    norms: NormTensors = field(default_factory=NormTensors)
    bare: dict[str, ModulePosition] = field(default_factory=dict)
    experts: ExpertTensors = field(default_factory=ExpertTensors)
    whole: WholeLinearTensors = field(default_factory=WholeLinearTensors)
    heads: HeadTensors | None = None
    has_idle: bool = False
    _names: dict[str, FactorNames] = field(default_factory=dict, compare=False, repr=False)

    @property
    def other_names(self) -> set[str]:
        """Return the names of all tensors that are no factors."""
        score = set() if self.score is None else {self.score.key}
        tokens = {name for each in self.tokens for name in each.names}
        others = tokens | self.norms.vectors.keys() | self.norms.idle | self.experts.names
        return self.ends.names | self.biases.names | score | others | self.whole.names

    @property
    def is_scaled(self) -> bool:
        """Return whether it scales outputs (DoRA)."""
        return self.plan.use_dora

    @property
    def is_biased(self) -> bool:
        """Return whether it adds to outputs whatever the inputs are."""
        return bool(self.biases.names)

    @property
    def expert_pages(self) -> Mapping[int, ExpertPages]:
        """Return the pages of routed experts, by their projection."""
        return self.experts.pages

    @property
    def ranks(self) -> dict[ModulePosition, int]:
        """Return each adapted position's true rank.

        A whole matrix, which has none, counts as 1, as norms do; a classification head's is its
        labels' number, that of trained rows their tokens' number.
        """
        whole = dict.fromkeys(self.ends.matrices.values(), 1)
        if self.score is not None:
            whole[self.score.position] = self.score.num_labels
        if self.norms.position is not None:
            whole[self.norms.position] = 1
        if self.heads is not None:
            whole[self.heads.position] = 1
        whole |= dict.fromkeys(self.whole.positions, 1)
        whole |= dict.fromkeys(self.bare.values(), 1)
        whole |= {at: len(each.ids) for each in self.tokens for at in each.positions}
        whole |= self.experts.ranks
        return whole | {at: self.plan.rank_of(name) for name, at in self.modules.items()}

    def read(self) -> Iterator[LoraModule]:
        """Yield the modules one by one; refuses values that are not finite."""
        for stack in self.stacks():
            yield from stack.modules()

    def stacks(self, scratch: Scratch | None = None) -> Iterator[LoraStack]:
        """Yield the modules in stacks, some layers after the other: one call serves many.

        scratch: PART_BYTES for factors, which later stacks overwrite; None: new memory.
        """
        with reading():
            self.ends.check_copies(self.file)
        for names in self._parts():
            kinds: dict[Hashable, list[str]] = {}
            for name in names:
                kinds.setdefault(self._kind(name), []).append(name)
            yield from self._stacks([*kinds.values()], scratch)
        for module, at in self.bare.items():
            yield self._zeros(module, at)
        for each in self.tokens:
            yield from self._token_stacks(each)
        for part in self.experts.parts():
            yield from self._expert_stacks(part)

    def without(self, modules: Collection[str]) -> Self:
        """Return the adapter without some modules, which are read otherwise."""
        rest = {name: at for name, at in self.modules.items() if name not in modules}
        return replace(self, modules=rest)

    def names(self, module: str) -> FactorNames:
        """Return the names of a module's factors."""
        if module not in self._names:
            projection = self.projections[self.modules[module].projection]
            self._names[module] = factor_names(module, projection, self.plan)
        return self._names[module]

    def _parts(self) -> Iterator[list[str]]:
        """Yield some modules after the other, layer by layer, as they lie in a file."""
        part, size = list[str](), 0
        for module in sorted(self.modules, key=lambda module: self.modules[module].layer):
            own = sum(map(self.file.size, self._keys(module)))
            if part and size + own > PART_BYTES:
                yield part
                part, size = [], 0
            part.append(module)
            size += own
        if part:
            yield part

    def _keys(self, module: str) -> tuple[str, ...]:
        """Return the names of a module's tensors that are read together."""
        names = self.names(module)
        return (names.a, names.b, *([magnitude_key(module)] if self.plan.use_dora else ()))

    def _kind(self, module: str) -> Hashable:
        """Return what the modules of a stack have in common."""
        index, rank = self.modules[module].projection, self.plan.rank_of(module)
        scale, flipped = self.plan.scaling_of(module), self.names(module).flipped
        return index, rank, scale, flipped, module in self.plan.parts

    def _token_stacks(self, tokens: TokenTensor) -> list[LoraStack]:
        with reading():
            return list(tokens.stacks(self.file))

    def _zeros(self, module: str, at: ModulePosition) -> LoraStack:
        """Return a module's trained bias behind factors that add nothing."""
        projection = self.projections[at.projection]
        a = torch.zeros(1, 1, projection.in_features)
        b = torch.zeros(1, projection.out_features, 1)
        with reading():
            _, base_biases = self.biases.read(self.file, [module], [1.0])
        return LoraStack(at.projection, (at.layer,), a, b, base_biases=base_biases)

    def _expert_stacks(self, part: ExpertPart) -> list[LoraStack]:
        with reading():
            return list(part.stacks(self.file))

    def _stacks(
        self, groups: Sequence[Sequence[str]], scratch: Scratch | None
    ) -> Iterator[LoraStack]:
        """Read groups of modules, each of one kind, and yield a stack of each."""
        # Keys of A, of B and of magnitudes, for each group.
        keys = [list(zip(*map(self._keys, names), strict=True)) for names in groups]
        with reading():
            found = self.file.stacks([each for of_group in keys for each in of_group], scratch)
        _check_finite([key for of_group in keys for each in of_group for key in each], found)
        tensors = iter(found.stacks)
        for names, of_group in zip(groups, keys, strict=True):
            yield self._stack(names, list(itertools.islice(tensors, len(of_group))))

    def _stack(self, names: Sequence[str], tensors: Sequence[Tensor]) -> LoraStack:
        """Return a stack; tensors: as the file has them, [modules, ...] each."""
        a, b, *magnitudes = (t.float() if t.dtype is torch.float64 else t for t in tensors)
        factors, scale = self.names(names[0]), self.plan.scaling_of(names[0])
        if factors.flipped:
            a, b = a.transpose(1, 2), b.transpose(1, 2)
        positions = [self.modules[name] for name in names]
        with reading():
            biases, base_biases = self.biases.read(self.file, names, [scale] * len(names))
        layers = tuple(position.layer for position in positions)
        stack = LoraStack(
            *(positions[0].projection, layers, a, factors.own(b)),
            biases=biases,
            base_biases=base_biases,
            scale=scale,
        )
        if magnitudes:  # Norms are of the scaled B.
            b = stack.scaled_b(torch.float32)
            return replace(stack, b=b, scale=1.0, magnitudes=magnitudes[0].float())
        return stack

    def factors(self, module: str) -> tuple[Tensor, Tensor]:
        """Return A [r, in] and B [out, r] of a module in float32; refuses values not finite."""
        names = self.names(module)
        with reading():
            a, b = names.read(self.file)
        check_finite(names.a, a)
        check_finite(names.b, b)
        return a, b

    def read_matrices(self) -> Iterator[Matrix]:
        """Yield what is one matrix, this rank's rows of it; refuses values not finite."""
        with reading():
            if self.norms.position is not None:
                yield self.norms.read(self.file, self.projections[self.norms.position.projection])
            if self.score is not None:
                yield self.score.read(self.file)
            yield from self.ends.read(self.file, self.projections)
            yield from self.whole.read(self.file, self.projections)
            if self.heads is not None:
                yield from self.heads.read()


def _check_finite(keys: Sequence[str], found: Stacks) -> None:
    """Refuse NaN and infinity; keys: of all tensors."""
    # One sum for all of a type; only if it is not finite, a look at each tensor.
    if not have_finite_sums(found.flat):
        for key, tensor in zip(keys, itertools.chain(*found.stacks), strict=True):
            check_finite(key, tensor)


@contextmanager
def reading() -> Iterator[None]:
    """Refuse a file that cannot be read, or that is written to while it is read."""
    try:
        yield
    except DamagedFile as error:
        refuse(f"{WEIGHTS_NAME} cannot be read: {error}; save or upload it again")
    except OSError as error:
        refuse(f"{WEIGHTS_NAME} cannot be read: {error}; try again", AdapterRefusal.UNAVAILABLE)
