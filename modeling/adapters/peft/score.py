"""The classification head in a PEFT file: what `modules_to_save` keeps of a SEQ_CLS adapter.

transformers' decoders call it `score`, one linear map without a bias. PEFT adds `classifier` and
`score` to `modules_to_save` of every SEQ_CLS adapter, whichever of them the model has.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from modeling.adapters.faults import refuse
from modeling.adapters.peft.config import LoraPlan
from modeling.adapters.peft.ends import PREFIX, WEIGHT_SUFFIX, Matrix
from modeling.adapters.peft.tensors import check_finite, check_type
from modeling.adapters.projection import ModulePosition, Projection, ProjectionKind
from sharding.slicing import whole
from sharding.tensor_file import TensorFile

SCORE = "score"
SCORE_KEY = f"{PREFIX}{SCORE}{WEIGHT_SUFFIX}"
CLASSIFIES = "SEQ_CLS"
"""PEFT's task_type of adapters that classify sequences."""
HEADS = frozenset({SCORE, "classifier"})
"""What PEFT adds to modules_to_save for that task."""


@dataclass(frozen=True)
class ScoreTensor:
    """The tensor [labels, hidden] of a classification head in a file."""

    key: str
    position: ModulePosition
    num_labels: int

    def read(self, file: TensorFile) -> Matrix:
        """Read it whole; refuses values that are not finite."""
        rows = file.rows(self.key, 0, self.num_labels)
        check_finite(self.key, rows)
        return Matrix(self.position, rows)


def score_projection(hidden: int, can_adapt_ends: bool = True) -> Projection:
    """Return the head as a projection: the LoRA rank rows of its A are the labels' rows."""
    return Projection(
        name=SCORE,
        module=SCORE,
        in_features=hidden,
        out_features=0,
        inputs=whole(hidden),
        outputs=(),
        num_layers=1,
        kind=ProjectionKind.SCORE,
        can_adapt_ends=can_adapt_ends,
    )


def find_score(
    file: TensorFile, plan: LoraPlan, projections: Sequence[Projection]
) -> ScoreTensor | None:
    """Return the head of an adapter that has one, checked; AdapterError says what is wrong."""
    index = next((i for i, p in enumerate(projections) if p.kind is ProjectionKind.SCORE), None)
    if index is None or not any(SCORE.endswith(entry) for entry in plan.modules_to_save):
        return None
    key = SCORE_KEY
    if key not in file.keys():  # noqa: SIM118
        refuse(f"modules_to_save requires {key}, which the file lacks: save the adapter again")
    check_type(key, file.dtype(key))
    shape, hidden = tuple(file.shape(key)), projections[index].in_features
    if len(shape) != 2 or shape[1] != hidden or not shape[0]:
        refuse(
            f"{key} has shape {list(shape)}, this model needs [labels, {hidden}]: is the adapter "
            "for another base model?"
        )
    return ScoreTensor(key, ModulePosition(index, 0), shape[0])


def without_score(plan: LoraPlan, keys: Set[str]) -> LoraPlan:
    """Return the plan without entries of modules_to_save that concern classification heads.

    `classifier` stays where the file holds such a module, which decoders do not have.
    """
    is_idle = plan.task == CLASSIFIES
    kept = tuple(
        entry
        for entry in plan.modules_to_save
        if not SCORE.endswith(entry)
        and not (is_idle and entry in HEADS and not _holds(keys, entry))
    )
    return replace(plan, modules_to_save=kept)


def _holds(keys: Set[str], module: str) -> bool:
    return any(key.startswith(f"{PREFIX}{module}.") for key in keys)
