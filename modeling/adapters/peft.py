"""A PEFT LoRA folder read against the projections of a model: exact, or refused by name."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.adapters import AdapterRefusal
from modeling.adapters.peft_config import LoraPlan, read_config, refuse
from modeling.adapters.projection import Projection, ProjectionKind

WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."
SUFFIXES = {"A": ".lora_A.weight", "B": ".lora_B.weight"}
EMBEDDING_SUFFIXES = {"A": ".lora_embedding_A", "B": ".lora_embedding_B"}
COPY_SUFFIX = ".base_layer.weight"
"""PEFT saves the base weight of adapted embeddings and heads beside their factors."""
OPEN_ADVICE = (
    "start the server with adapters.vocabulary true (LoRA factors only), or retrain with "
    "target_modules inside the layers"
)
COPY_ROWS = 4096
"""Rows of a copied base weight that are compared at once."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True)
class Place:
    """Where a module's delta belongs: index of the projection, and the layer."""

    projection: int
    layer: int


@dataclass(frozen=True)
class LoraModule:
    """One module's factors in float32: a [r, in], b [out, r] with the scaling folded in."""

    place: Place
    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class PeftAdapter:
    """A judged adapter: its file and the true rank at every place that it adapts."""

    path: Path
    plan: LoraPlan
    modules: dict[str, Place]
    projections: tuple[Projection, ...]

    @property
    def ranks(self) -> dict[Place, int]:
        """True rank of every adapted place."""
        return {place: self.plan.rank_of(module) for module, place in self.modules.items()}

    def read(self) -> Iterator[LoraModule]:
        """Yield the modules one by one; refuses values that are not finite."""
        with safe_open(self.path, framework="pt") as file:
            self._check_copies(file)
            for module, place in self.modules.items():
                key_a, key_b = (_key(self.projections[place.projection], module, s) for s in "AB")
                # The fold happens once, in float32, whatever type the pools have.
                a = cast(Tensor, file.get_tensor(key_a)).float()
                b = cast(Tensor, file.get_tensor(key_b)).float()
                b = b * self.plan.scaling_of(module)
                _check_finite(key_a, a)
                _check_finite(key_b, b)
                yield LoraModule(place, a, b)

    def _check_copies(self, file: Any) -> None:
        """Refuse a copy of a base weight that says anything else in this rank's rows."""
        for module, place in self.modules.items():
            projection = self.projections[place.projection]
            key = PREFIX + module + COPY_SUFFIX
            if projection.base is None or key not in file.keys():  # noqa: SIM118
                continue
            _check_copy(key, file.get_slice(key), projection)


def open_adapter(folder: Path, projections: Sequence[Projection], max_rank: int) -> PeftAdapter:
    """Judge a folder's config, tensor names, types and shapes; reads no weights yet."""
    plan = read_config(folder)
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        other = " (only a .bin)" if any(folder.glob("*.bin")) else ""
        refuse(
            f"no {WEIGHTS_NAME} among the adapter's files{other}: save it with "
            "save_pretrained(..., safe_serialization=True)"
        )
    known = {
        projection.module.format(layer=layer): Place(index, layer)
        for index, projection in enumerate(projections)
        for layer in range(projection.num_layers)
    }
    adapter = PeftAdapter(path, plan, known, tuple(projections))
    try:
        with safe_open(path, framework="pt") as file:
            adapter = replace(adapter, modules=_match(file.keys(), adapter))
            for module, side in itertools.product(adapter.modules, ("A", "B")):
                projection = projections[known[module].projection]
                key = _key(projection, module, side)
                tensor = file.get_slice(key)
                _check_type(key, tensor.get_dtype())
                _check_shape(_Side(module, side), tuple(tensor.get_shape()), plan, projection)
    except (SafetensorError, OSError) as error:
        refuse(f"{WEIGHTS_NAME} cannot be read: {error}; save or upload it again")
    _check_ranks(adapter, max_rank)
    _check_tying(adapter)
    return adapter


@dataclass(frozen=True)
class _Side:
    module: str
    side: str


def _key(projection: Projection, module: str, side: str) -> str:
    """The name of a factor's tensor."""
    is_embedding = projection.kind is ProjectionKind.EMBEDDING
    return PREFIX + module + (EMBEDDING_SUFFIXES if is_embedding else SUFFIXES)[side]


def _match(keys: Iterable[str], adapter: PeftAdapter) -> dict[str, Place]:
    """Map every tensor to a place of the model; refuse what has none, and lone halves."""
    known, projections = adapter.modules, adapter.projections
    factors: dict[str, tuple[str, str]] = {}
    copies: dict[str, str] = {}
    for module, place in known.items():
        projection = projections[place.projection]
        factors |= {_key(projection, module, side): (module, side) for side in "AB"}
        if projection.kind is not ProjectionKind.LINEAR:
            copies[PREFIX + module + COPY_SUFFIX] = module
    found: dict[str, set[str]] = {}
    for key in keys:
        if key in copies:
            found.setdefault(copies[key], set())
        elif key in factors:
            module, side = factors[key]
            found.setdefault(module, set()).add(side)
        else:
            _refuse_tensor(key, adapter)
    for module, sides in found.items():
        for side in sorted({"A", "B"} - sides):
            missing = _key(projections[known[module].projection], module, side)
            refuse(f"{missing} is missing beside its partner: the file is incomplete")
    if not found:
        refuse(f"{WEIGHTS_NAME} holds no LoRA tensor: it adapts nothing")
    # In the model's order, so that staging walks the pools in memory order.
    return {module: place for module, place in known.items() if module in found}


def _refuse_tensor(key: str, adapter: PeftAdapter) -> NoReturn:
    known = adapter.modules
    if any(part in key for part in ("embed", "lm_head", "wte", "wpe")):
        is_open = any(p.kind is not ProjectionKind.LINEAR for p in adapter.projections)
        refuse(
            f"tensor {key} adapts the vocabulary (embeddings or head), which is not served here: "
            + ("retrain it as LoRA factors alone" if is_open else OPEN_ADVICE)
        )
    names = sorted({module.rsplit(".", 1)[-1] for module in known})
    refuse(
        f"tensor {key} belongs to no adaptable module of this model (those are {', '.join(names)} "
        f"in {len(known)} places, named {PREFIX}<module>.lora_A.weight): is the adapter for "
        "another base model?"
    )


def _check_type(key: str, dtype: str) -> None:
    if dtype not in FLOATS:
        refuse(f"{key} has type {dtype}: save the adapter in float32, float16 or bfloat16")


def _check_finite(key: str, tensor: Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        refuse(
            f"{key} holds values that are not finite (NaN or infinity): the training diverged; "
            "save a good checkpoint"
        )


def _check_shape(
    side: _Side, shape: tuple[int, ...], plan: LoraPlan, projection: Projection
) -> None:
    """Compare a factor with the config's rank and the model's sizes."""
    rank = plan.rank_of(side.module)
    key = _key(projection, side.module, side.side)
    if len(shape) != 2:
        refuse(f"{key} has shape {list(shape)}, not a matrix: it is no plain LoRA factor")
    found_rank, found_size = shape if side.side == "A" else shape[::-1]
    size = projection.in_features if side.side == "A" else projection.out_features
    word = "inputs" if side.side == "A" else "outputs"
    if found_size != size:
        refuse(
            f"adapter for another base model: {key} has {found_size} {word}, "
            f"this model's {side.module} has {size}"
        )
    if found_rank != rank:
        refuse(
            f"{key} has rank {found_rank}, but adapter_config.json (r, rank_pattern) says {rank}: "
            "the two files do not belong together"
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


def _check_tying(adapter: PeftAdapter) -> None:
    kinds = {adapter.projections[place.projection].kind for place in adapter.modules.values()}
    if adapter.plan.ensure_weight_tying and kinds != {ProjectionKind.LINEAR}:
        refuse(
            "ensure_weight_tying=True is not served with an adapted embedding or head: "
            "retrain without it"
        )


def _check_copy(key: str, copy: Any, projection: Projection) -> None:
    """Compare an adapter's copy of a base weight with this rank's rows, some at a time."""
    base = projection.base
    assert base is not None
    is_embedding = projection.kind is ProjectionKind.EMBEDDING
    vocab_size = projection.in_features if is_embedding else projection.out_features
    if tuple(copy.get_shape()) != (vocab_size, base.shape[1]):
        refuse(
            f"{key} has shape {copy.get_shape()}: the vocabulary was resized, which is not served"
        )
    ((first, _),) = projection.inputs if is_embedding else projection.outputs
    for start in range(0, len(base), COPY_ROWS):
        own = base[start : start + COPY_ROWS].cpu()
        saved = copy[first + start : first + start + len(own)].to(own.dtype)
        if not torch.equal(own, saved):
            refuse(
                f"{key} is not this model's weight: it was trained as a whole, or the adapter is "
                "for another base model; save the adapter with save_embedding_layers=False"
            )
