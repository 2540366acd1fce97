"""A PEFT LoRA folder read against the projections of a model: exact, or refused by name."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from configs.adapters import AdapterRefusal
from modeling.adapters.peft_config import LoraPlan, read_config, refuse
from modeling.adapters.projection import Projection

WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."
SUFFIXES = {".lora_A.weight": "A", ".lora_B.weight": "B"}
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

    @property
    def ranks(self) -> dict[Place, int]:
        """True rank of every adapted place."""
        return {place: self.plan.rank_of(module) for module, place in self.modules.items()}

    def read(self) -> Iterator[LoraModule]:
        """Yield the modules one by one; refuses values that are not finite."""
        with safe_open(self.path, framework="pt") as file:
            for module, place in self.modules.items():
                # The fold happens once, in float32, whatever type the pools have.
                a = cast(Tensor, file.get_tensor(_key(module, "A"))).float()
                b = cast(Tensor, file.get_tensor(_key(module, "B"))).float()
                b = b * self.plan.scaling_of(module)
                _check_finite(_key(module, "A"), a)
                _check_finite(_key(module, "B"), b)
                yield LoraModule(place, a, b)


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
    try:
        with safe_open(path, framework="pt") as file:
            modules = _match(file.keys(), known)
            for module, side in itertools.product(modules, ("A", "B")):
                key = _key(module, side)
                tensor = file.get_slice(key)
                _check_type(key, tensor.get_dtype())
                projection = projections[modules[module].projection]
                _check_shape(_Side(module, side), tuple(tensor.get_shape()), plan, projection)
    except (SafetensorError, OSError) as error:
        refuse(f"{WEIGHTS_NAME} cannot be read: {error}; save or upload it again")
    adapter = PeftAdapter(path, plan, modules)
    _check_ranks(adapter, max_rank)
    return adapter


@dataclass(frozen=True)
class _Side:
    module: str
    side: str


def _key(module: str, side: str) -> str:
    return f"{PREFIX}{module}.lora_{side}.weight"


def _match(keys: Iterable[str], known: dict[str, Place]) -> dict[str, Place]:
    """Map every tensor to a place of the model; refuse what has none, and lone halves."""
    found: dict[str, set[str]] = {}
    for key in keys:
        suffix = next((s for s in SUFFIXES if key.endswith(s)), "")
        module = key.removeprefix(PREFIX).removesuffix(suffix)
        if not suffix or not key.startswith(PREFIX) or module not in known:
            _refuse_tensor(key, known)
        found.setdefault(module, set()).add(SUFFIXES[suffix])
    for module, sides in found.items():
        if sides != {"A", "B"}:
            (missing,) = {"A", "B"} - sides
            refuse(f"{_key(module, missing)} is missing beside its partner: the file is incomplete")
    if not found:
        refuse(f"{WEIGHTS_NAME} holds no LoRA tensor: it adapts nothing")
    # In the model's order, so that staging walks the pools in memory order.
    return {module: place for module, place in known.items() if module in found}


def _refuse_tensor(key: str, known: dict[str, Place]) -> NoReturn:
    if any(part in key for part in ("embed", "lm_head", "wte", "wpe")):
        refuse(
            f"tensor {key} adapts the vocabulary (embeddings or head), which is not served yet: "
            "retrain with target_modules inside the layers"
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
    key = _key(side.module, side.side)
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
