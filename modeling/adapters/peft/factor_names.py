"""The names of a module's factors in a PEFT file, and how the factors lie there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from modeling.adapters.faults import refuse
from modeling.adapters.peft.config import LoraPlan
from modeling.adapters.peft.ends import PREFIX
from modeling.adapters.peft.fused import FusedPart
from modeling.adapters.projection import ModulePosition, Projection, ProjectionKind
from sharding.tensor_file import TensorFile

_LINEAR = (".lora_A.weight", ".lora_B.weight")
_EMBEDDING = (".lora_embedding_A", ".lora_embedding_B")


@dataclass(frozen=True)
class FactorNames:
    """The tensors that hold A [r, in] and B [out, r] of a module.

    part: the rows of B that are the module's, of a fused one's; None for all.
    flipped: both lie transposed. PEFT makes the factors of a parameter [rows, columns] as A [r,
    columns] and B [rows, r] (`ParamWrapper`). Where the parameter is the transposed weight, [in,
    out], B's tensor holds the transposed A, and A's the transposed B.
    """

    a: str
    b: str
    flipped: bool = False
    part: FusedPart | None = None

    def shapes(self, file: TensorFile) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of A and B."""
        step = -1 if self.flipped else 1
        a, b = file.shape(self.a)[::step], file.shape(self.b)[::step]
        if self.part is not None and b[:1] == (self.part.total,):
            b = (self.part.stop - self.part.start, *b[1:])
        return a, b

    def read(self, file: TensorFile) -> tuple[Tensor, Tensor]:
        """Return A and B in float32."""
        found = file.get_tensor(self.a).float(), file.get_tensor(self.b).float()
        a, b = (found[0].t(), found[1].t()) if self.flipped else found
        return a, self.own(b)

    def own(self, b: Tensor) -> Tensor:
        """Return the module's rows of B, [..., out, r]."""
        return b if self.part is None else b[..., self.part.start : self.part.stop, :]


def factor_names(module: str, projection: Projection, plan: LoraPlan) -> FactorNames:
    """Return the names of a module's factors; module: its path in the base model."""
    is_embedding = projection.kind is ProjectionKind.EMBEDDING
    path, part = PREFIX + plan.path(module), plan.parts.get(module)
    if not plan.is_parameter(module):
        a, b = _EMBEDDING if is_embedding else _LINEAR
        return FactorNames(path + a, path + b, part=part)
    a, b = (path + suffix for suffix in _LINEAR)
    if is_embedding or projection.stored_transposed:
        return FactorNames(b, a, flipped=True)
    return FactorNames(a, b, part=part)


def check_found(modules: Mapping[str, ModulePosition], projections: Sequence[Projection]) -> None:
    """Refuse factors that PEFT leaves out with a warning; modules: those that a file has."""
    lost = [name for name, at in modules.items() if projections[at.projection].is_lost]
    if lost:
        refuse(
            f"factors of {lost[0]} (and {len(lost) - 1} more such modules): transformers' list of "
            "this model's older names changes this one too, so PEFT does not find them when it "
            "reads the file: name the modules in exclude_modules and retrain, or merge the adapter "
            "into the base model"
        )
