"""Read a PEFT LoRA folder for a model's projections: served exactly, or refused with reasons."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

import torch
from torch import Tensor

from configs.reading import DamagedFile
from configs.wire.adapters import AdapterRefusal
from modeling.adapters.activation import check_activation
from modeling.adapters.biases import BiasTensors, find_biases
from modeling.adapters.dora import check_magnitudes, magnitude_key, read_magnitudes
from modeling.adapters.faults import Faults, refuse
from modeling.adapters.peft_config import LoraPlan, check_config
from modeling.adapters.peft_ends import (
    INSIDE_ONLY_ADVICE,
    PREFIX,
    WEIGHT_SUFFIX,
    EndTensors,
    Matrix,
    check_tying,
    find_ends,
    is_tied,
)
from modeling.adapters.peft_names import WEIGHTS_NAME, open_tensors
from modeling.adapters.peft_score import SCORE_KEY, ScoreTensor, find_score, without_score
from modeling.adapters.peft_tensors import (
    check_file_rank,
    check_finite,
    check_shape,
    check_type,
)
from modeling.adapters.projection import (
    WHOLE_KINDS,
    BaseRows,
    ModulePosition,
    Projection,
    ProjectionKind,
)
from modeling.adapters.stacks import LoraModule, LoraStack
from sharding.tensor_file import TensorFile

FACTOR = ".lora_"
"""Part of the names of all tensors that are not the base model's."""
SUFFIXES = {"A": ".lora_A.weight", "B": ".lora_B.weight"}
EMBEDDING_SUFFIXES = {"A": ".lora_embedding_A", "B": ".lora_embedding_B"}
IDLE_SUFFIXES = (".lora_velora_embed",)
"""Suffixes of tensors that only a backward pass reads."""

SETTING_ADVICE = (
    "start the server with adapters.vocabulary true (LoRA factors only), or retrain with "
    "target_modules inside the layers"
)
STACK_NUMBERS = 2**19
"""Most elements of a stack's factor, 2 MiB in float32: malloc returns much larger blocks to the
system at each free, and every stack would pay for new pages."""

MAX_UNKNOWN = 64
"""Most unknown tensors that a refusal examines; a file may hold any number of them."""

ENDS = frozenset({"embed_tokens", "lm_head", "embed_in", "embed_out", "wte"})
"""Names of embeddings and heads in models' module paths."""


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter that passed all checks.

    file: open, holds the tensors.
    plan: ranks and scalings.
    modules: the adapted modules' positions by path.
    projections: the model's.
    ends: tensors of embedding and head besides factors.
    score: its classification head; None without one.
    biases: those in the file.
    """

    file: TensorFile
    plan: LoraPlan
    modules: dict[str, ModulePosition]
    projections: tuple[Projection, ...]
    ends: EndTensors = field(default_factory=EndTensors)
    score: ScoreTensor | None = None
    biases: BiasTensors = field(default_factory=BiasTensors)

    @property
    def other_names(self) -> set[str]:
        """Return the names of all tensors that are no factors."""
        score = set() if self.score is None else {self.score.key}
        return self.ends.names | self.biases.names | score

    @property
    def is_scaled(self) -> bool:
        """Return whether it scales outputs (DoRA)."""
        return self.plan.use_dora

    @property
    def is_biased(self) -> bool:
        """Return whether it adds to outputs whatever the inputs are."""
        return bool(self.biases.names)

    @property
    def ranks(self) -> dict[ModulePosition, int]:
        """Return each adapted position's true rank.

        A whole matrix, which has none, counts as 1; a classification head's is its labels' number.
        """
        whole = dict.fromkeys(self.ends.matrices.values(), 1)
        if self.score is not None:
            whole[self.score.position] = self.score.num_labels
        return whole | {at: self.plan.rank_of(name) for name, at in self.modules.items()}

    def read(self) -> Iterator[LoraModule]:
        """Yield the modules one by one; refuses values that are not finite."""
        for stack in self.stacks():
            yield from stack.modules()

    def stacks(self) -> Iterator[LoraStack]:
        """Yield the modules in stacks: one call of torch serves many modules."""
        with reading():
            self.ends.check_copies(self.file)
        for (index, rank), group in itertools.groupby(self.modules, self._kind):
            projection, names = self.projections[index], list(group)
            widest = max(projection.in_features, projection.out_features)
            count = max(1, STACK_NUMBERS // (rank * widest))
            for first in range(0, len(names), count):
                yield self._stack(index, names[first : first + count])

    def _kind(self, module: str) -> tuple[int, int]:
        """Return a module's projection and rank, which the modules of a stack share."""
        return self.modules[module].projection, self.plan.rank_of(module)

    def _stack(self, index: int, names: Sequence[str]) -> LoraStack:
        projection = self.projections[index]
        keys_a, keys_b = ([_key(projection, name, side) for name in names] for side in "AB")
        with reading():
            a, b = self.file.stack(keys_a), self.file.stack(keys_b)
        if a.dtype is torch.float64:
            a = a.float()
        scales = [self.plan.scaling_of(name) for name in names]
        # The scaling is folded in here, in float32, before B is rounded to the pools' type.
        b = b.float() * torch.tensor(scales).view(-1, 1, 1)
        for keys, factors in ((keys_a, a), (keys_b, b)):
            # One sum for the whole stack; only if it is not finite, a look at each tensor.
            if not torch.isfinite(factors.sum(dtype=torch.float32)):
                for key, factor in zip(keys, factors, strict=True):
                    check_finite(key, factor)
        layers = tuple(self.modules[name].layer for name in names)
        with reading():
            magnitudes = read_magnitudes(self.file, names) if self.plan.use_dora else None
            biases, base_biases = self.biases.read(self.file, names, scales)
        return LoraStack(index, layers, a, b, magnitudes, biases, base_biases)

    def factors(self, module: str) -> tuple[Tensor, Tensor]:
        """Return A [r, in] and B [out, r] of a module in float32; refuses values not finite."""
        projection = self.projections[self.modules[module].projection]
        key_a, key_b = (_key(projection, module, side) for side in "AB")
        with reading():
            a, b = self.file.get_tensor(key_a).float(), self.file.get_tensor(key_b).float()
        check_finite(key_a, a)
        check_finite(key_b, b)
        return a, b

    def read_matrices(self) -> Iterator[Matrix]:
        """Yield this rank's rows of whole embeddings and heads; refuses values not finite."""
        with reading():
            if self.score is not None:
                yield self.score.read(self.file)
            yield from self.ends.read(self.file, self.projections)


@contextmanager
def reading() -> Iterator[None]:
    """Refuse a file that cannot be read, or that is written to while it is read."""
    try:
        yield
    except DamagedFile as error:
        refuse(f"{WEIGHTS_NAME} cannot be read: {error}; save or upload it again")
    except OSError as error:
        refuse(f"{WEIGHTS_NAME} cannot be read: {error}; try again", AdapterRefusal.UNAVAILABLE)


def open_adapter(
    folder: Path,
    projections: Sequence[Projection],
    max_rank: int,
    base: Mapping[str, BaseRows] = MappingProxyType({}),
    within: Path | None = None,
) -> PeftAdapter:
    """Check a folder's config, tensor names, types and shapes; reads no weights yet.

    base: tensors of the model by their paths, of which the file may hold copies. within: the
    folder that links must not lead out of. AdapterError names all that is wrong.
    """
    faults = Faults()
    plan, adapter = check_config(folder, faults, within), None
    with faults.gather(), reading():
        file = open_tensors(folder, within)
        if plan is not None:
            adapter = _check_file(file, plan, projections, base, max_rank)
    faults.check()
    assert adapter is not None
    return adapter


def _check_file(
    file: TensorFile,
    plan: LoraPlan,
    projections: Sequence[Projection],
    base: Mapping[str, BaseRows],
    max_rank: int,
) -> PeftAdapter:
    """Check a file against its config and the model; base: as in `open_adapter`."""
    known = {
        module: ModulePosition(index, layer)
        for index, projection in enumerate(projections)
        if projection.kind.has_factors
        for layer in range(projection.num_layers)
        for module in projection.modules(layer)
    }
    found = find_biases(file.keys(), plan, known)
    adapter = PeftAdapter(file, plan, known, tuple(projections), biases=found)
    faults, keys = Faults(), file.keys()
    with faults.gather():
        adapter = replace(adapter, score=find_score(file, plan, projections))
    plan = without_score(plan, keys)
    with faults.gather():
        adapter = replace(adapter, ends=find_ends(keys, plan, projections, base))
    adapter = replace(adapter, modules=_match(keys, adapter, faults))
    _check_tensors(adapter, faults)
    # It compares values, so types and shapes must be right.
    if not faults:
        with faults.gather():
            check_tying(file, plan, projections, adapter.modules)
    with faults.gather():
        _check_ranks(adapter, max_rank)
    with faults.gather():
        _check_once(adapter)
    with faults.gather():
        _check_targets(adapter, known)
    with faults.gather():
        adapter.biases.check(file, plan, adapter.modules, known, projections)
    with faults.gather():
        has_whole = bool(adapter.ends.matrices) or adapter.score is not None
        check_activation(plan, adapter.projections, adapter.modules.values(), has_whole)
    faults.check()
    return adapter


def _check_tensors(adapter: PeftAdapter, faults: Faults) -> None:
    """Check the types and shapes of all tensors that were found."""
    file = adapter.file
    with faults.gather():
        adapter.ends.check(file, adapter.projections)
    for module, side in itertools.product(adapter.modules, ("A", "B")):
        projection = adapter.projections[adapter.modules[module].projection]
        key = _key(projection, module, side)
        with faults.gather():
            check_type(key, file.dtype(key))
            check_shape(key, file.shape(key), side == "A", projection)
            check_file_rank(key, file.shape(key)[side == "B"], adapter.plan.rank_of(module))
    if adapter.plan.use_dora:
        with faults.gather():
            check_magnitudes(file, adapter.plan, adapter.modules, adapter.projections)


def _key(projection: Projection, module: str, side: str) -> str:
    """Return the name of a factor's tensor."""
    is_embedding = projection.kind is ProjectionKind.EMBEDDING
    return PREFIX + module + (EMBEDDING_SUFFIXES if is_embedding else SUFFIXES)[side]


def _match(keys: Iterable[str], adapter: PeftAdapter, faults: Faults) -> dict[str, ModulePosition]:
    """Map tensors to modules of the model; unknown tensors and missing partners are faults."""
    known, projections = adapter.modules, adapter.projections
    factors: dict[str, tuple[str, str]] = {}
    for module, position in known.items():
        projection = projections[position.projection]
        factors |= {_key(projection, module, side): (module, side) for side in "AB"}
    idle = {PREFIX + module + suffix for module in known for suffix in IDLE_SUFFIXES}
    if adapter.plan.use_dora:
        idle |= {magnitude_key(module) for module in known}
    found: dict[str, set[str]] = {module: set() for module in adapter.ends.copied}
    unknown = []
    for key in set(keys) - idle:
        if key in factors:
            module, side = factors[key]
            found.setdefault(module, set()).add(side)
        elif key not in adapter.other_names:
            unknown.append(key)
    # Faults that were found before concern embedding or heads: their tensors are refused once.
    unknown = [k for k in unknown if not (faults and (_names_end(k) or k == SCORE_KEY))]
    for key in sorted(unknown)[:MAX_UNKNOWN]:
        with faults.gather():
            _refuse_tensor(key, adapter)
    for module, sides in found.items():
        for side in sorted({"A", "B"} - sides):
            missing = _key(projections[known[module].projection], module, side)
            with faults.gather():
                refuse(f"{missing} is missing beside its partner: the file is incomplete")
    if not found and not adapter.ends.matrices and adapter.score is None and not faults:
        refuse(f"{WEIGHTS_NAME} holds no LoRA tensor: it adapts nothing")
    # In the model's order, so that staging writes the pools in memory order.
    whole = {module for module, sides in found.items() if len(sides) == 2}
    return {module: position for module, position in known.items() if module in whole}


def _names_end(key: str) -> bool:
    return not ENDS.isdisjoint(key.split("."))


def _refuse_tensor(key: str, adapter: PeftAdapter) -> NoReturn:
    known = adapter.modules
    if _names_end(key):
        has_ends = any(p.kind.of_vocabulary for p in adapter.projections)
        can_adapt = all(p.can_adapt_ends for p in adapter.projections)
        advice = "retrain it as LoRA factors alone" if has_ends else SETTING_ADVICE
        refuse(
            f"tensor {key} adapts the vocabulary (embeddings or head), which is not served here: "
            + (advice if can_adapt else INSIDE_ONLY_ADVICE)
        )
    if adapter.plan.bias != "none" and key.endswith(".bias"):
        refuse(
            f"bias={adapter.plan.bias!r}: {key} is the bias of no adaptable linear module; retrain "
            'with bias="lora_only", or merge the adapter into the base model'
        )
    names = sorted({module.rsplit(".", 1)[-1] for module in known})
    refuse(
        f"tensor {key} belongs to no adaptable module of this model (those are {', '.join(names)} "
        f"at {len(set(known.values()))} paths, named {PREFIX}<module>.lora_A.weight): is the "
        "adapter for another base model?"
    )


def _check_ranks(adapter: PeftAdapter, max_rank: int) -> None:
    for module in adapter.modules:
        rank = adapter.plan.rank_of(module)
        if rank > max_rank:
            refuse(
                f"rank {rank} at {module} is above this server's max_rank {max_rank}: "
                "raise adapters.max_rank, or train with a smaller r",
                AdapterRefusal.TOO_LARGE,
            )


def _check_targets(adapter: PeftAdapter, known: Mapping[str, ModulePosition]) -> None:
    """Refuse modules that PEFT would leave out or initialise; known: all adaptable modules."""
    plan, projections = adapter.plan, adapter.projections
    left_out: dict[str, str] = {}
    for module, position in adapter.modules.items():
        kind = projections[position.projection].kind
        names: tuple[str, ...] = (module,)
        if kind is not ProjectionKind.LINEAR and is_tied(plan, projections):
            names = tuple(m for m in known if projections[known[m].projection].kind in WHOLE_KINDS)
        fields = [plan.left_out_by(name, kind is ProjectionKind.LINEAR) for name in names]
        if None not in fields:
            left_out.setdefault(str(fields[0]), module)
    if left_out:
        module = next(iter(left_out.values()))
        refuse(
            f"the file adapts {module}, which {' and '.join(left_out)} of adapter_config.json "
            "leave out, and so PEFT leaves it out: correct that field, or remove the tensors"
        )
    if plan.random:
        _check_whole(adapter, known)


def _check_whole(adapter: PeftAdapter, known: Mapping[str, ModulePosition]) -> None:
    """Refuse a file that lacks factors which PEFT would initialise with random values."""
    given = set(adapter.modules.values())
    for module, position in known.items():
        is_linear = adapter.projections[position.projection].kind is ProjectionKind.LINEAR
        missing = position not in given and position not in adapter.ends.matrices.values()
        if missing and is_linear and adapter.plan.left_out_by(module, True) is None:
            refuse(
                f"the file holds nothing for {module}, which target_modules names, and "
                "init_lora_weights is false: PEFT would make up random factors; correct either"
            )


def _check_once(adapter: PeftAdapter) -> None:
    """Refuse a module that the file adapts twice, by two names or by factors and a matrix."""
    whole = {key.removesuffix(WEIGHT_SUFFIX) for key in adapter.ends.matrices}
    taken: set[ModulePosition] = set()
    for module, position in adapter.modules.items():
        if position in taken or PREFIX + module in whole:
            refuse(f"{module} is adapted twice: save the adapter again")
        taken.add(position)
