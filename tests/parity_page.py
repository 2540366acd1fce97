"""docs/parity.md as text: the conditions, the tables of outcomes, and PEFT's fields."""

import dataclasses
import importlib.metadata
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import peft

from modeling.adapters.peft.config import HARMLESS_INITS, IGNORED, REFUSED, SERVED
from tests.modeling.kinds import KINDS, MODELS
from tests.modeling.parity.comparison import WHOLE, Comparison, Setting
from tests.oracle import MIN_MARGIN, MIN_SHIFT, NUM_TOKENS, TOLERANCE

KIND_WAYS = ("alone", "mixed", "in chunks", "preempted", "prefix hits")
KIND_OF: dict[tuple[str, ...], str] = {
    **{
        (*model, name): kind
        for kind, each in KINDS.items()
        for model, names in each.names.items()
        for name in names
    },
    **{(*model, "activated"): "aLoRA" for model in MODELS},
    **{(*model, "score"): "classification head" for model in MODELS},
}
"""Kinds of adapters in the table, by family, variant and name."""

PADDED = "padded"
"""What the settings of models without a paged implementation call their family."""

SERVED_NOTES: Mapping[str, str] = {
    "peft_type": "`LORA`; other methods are refused",
    "r": "up to `adapters.max_rank` of the server",
    "init_lora_weights": f"true, false, {', '.join(f'`{name}`' for name in sorted(HARMLESS_INITS))}"
    "; the others change the base weights and are refused",
    "ensure_weight_tying": "both ends must be in the file, and say the same",
    "target_modules": "the file may adapt no module that this and the next leave out; not guessed",
    "trainable_token_indices": "of embedding and head; not in merges, with activated LoRA, beside "
    "factors or a whole matrix of the same module, or over padded models",
    "target_parameters": "weights of linear modules, of routed experts, of embedding and head; not "
    "in merges",
    "exclude_modules": "as PEFT matches it",
    "alora_invocation_tokens": "from the prompt's last invocation on, the base model before; 256 "
    "tokens at most; beside `task_type` `CAUSAL_LM`, without which PEFT never activates it; not in "
    "merges, with embedding or head, or over padded models",
    "bias": "of linear modules inside the layers and of norms; not in merges, with activated LoRA, "
    "or over padded models",
    "lora_bias": "of linear modules inside the layers; not in merges or over padded models",
    "use_dora": "on linear modules inside the layers; not in merges, with embedding or head, or "
    "over padded models",
    "layers_to_transform": "as PEFT matches it",
    "layers_pattern": "as PEFT matches it; plain names",
    "rank_pattern": "as PEFT matches it; 4,096 keys at most",
    "alpha_pattern": "as PEFT matches it; 4,096 keys at most",
    "task_type": "`SEQ_CLS` adapters bring a classification head; others change nothing",
    "modules_to_save": "a decoder's classification head; norms of paged models; embedding and "
    "head, where `adapters.vocabulary_copies` is above 0; linear maps that "
    "`adapters.whole_linears` names; others are refused",
}
"""What else there is to say of fields that are served."""

INTRO = """\
# Parity

`make parity` writes this page. transformers and PEFT compute the truth on tiny random checkpoints
that the tests make; the engine must give the same tokens and the same logprobs.

| condition | value |
|---|---|
"""

READING = """\
A cell is one adapter (or the base model) on one model, on a number of ranks, compared in one way.
`9/9` means nine cells, all right. A cell is right when every token and every logprob of the whole
vocabulary equals the oracle's, on every rank.

* Alone: the only request.
* Mixed: all adapters and the base in one batch, joining at different steps.
* In chunks: prompts are cut, beside rows that decode.
* Preempted: each request loses its blocks during its answer and joins again with all its tokens.
* Scheduled: by the real scheduler with its prefix cache, with prompts of lengths around a border.
  Other batches are made by hand.
* Ranks rebuilt: all ranks are lost during the answer, and new ones continue.
"""


KINDS_READING = """\
On how many ranks each is right. Prefix hits are asserted. A classification head is read at a
prompt's end, so its answers have no tokens at which they could be preempted.
"""


ORACLE: Mapping[str, tuple[str, str]] = {
    "answers are those of the model's own `generate`, which no token ends": (
        "`tests/checkpoints.py`",
        "`generation_config.eos_token_id` is None, so that all answers are of one length",
    ),
    "`attn_implementation` is `eager`": (
        "`load_oracle`",
        "one of transformers' own, the plain formula. Its Falcon adds ALiBi twice (5.23), so that "
        "model is judged by the attention that transformers takes by itself",
    ),
    "`experts_implementation` is `eager`": (
        "`load_oracle`",
        "one of transformers' own, expert by expert: the grouped products know no float64",
    ),
    "products are in float64": (
        "`tests/oracle.py`",
        "what a float32 runner is off by is then its own rounding. Norms and softmaxes stay in "
        "float32, as their code says, and so does GPT-2 with `reorder_and_upcast_attn`",
    ),
    "PEFT's fresh adapters get random numbers": (
        "`write_adapter`",
        "B is zero in a new adapter, and would change nothing",
    ),
    "a class of our own for Solar": (
        "`tests/solar.py`",
        "transformers has none: Mistral's, with the skips of the model's published code",
    ),
    "a folder whose config names the theta of a dynamic rope": (
        "`parity/test_ropes.py`",
        "transformers has no dynamic rope of a fixed length; the longest sequence is checked "
        "against the dynamic rope itself",
    ),
    "`PretrainedConfig.__getattribute__` records the keys that are read": (
        "`parity/test_config.py`",
        "to find keys without a decision; it returns the same value, and no numbers are compared",
    ),
    "half precision is `from_pretrained`'s `dtype`, or `.to` after PEFT has loaded": (
        "`tests/modeling/teacher.py`",
        "the bounds of half precision are transformers' own errors in it",
    ),
}
"""What tests do to transformers and PEFT before they compute: where, and why."""

ORACLE_READING = """\
Nothing of transformers or PEFT is replaced. What is set, or added to them, is this:
"""

PEFT_READING = """\
Every field of `peft.LoraConfig` is decided in
[peft/config.py](../modeling/adapters/peft/config.py): an adapter is served exactly or not at all.
A field that the table lacks is ignored, as PEFT ignores it, unless a newer PEFT wrote the file:
then it is refused when it is set. [adapters.md](adapters.md) has the kinds of adapters, other
tuners, and fields of other tools.
"""


@dataclass(frozen=True)
class Cell:
    """What one entry of the tables counts."""

    padded: bool
    model: tuple[str, str]
    way: str
    ranks: int
    name: str


@dataclass(frozen=True)
class Fault:
    """The code broken on purpose, and whether the comparison noticed."""

    name: str
    where: str
    noticed: bool


KindCell = tuple[str, str, str]
"""A kind of adapter, the model's class, and one of KIND_WAYS."""


@dataclass
class Outcome:
    """All that a run compared.

    cells: whether each is right. kinds: whether kinds of adapters are, by ranks. failed: tests
    wrong otherwise.
    """

    cells: dict[Cell, bool] = field(default_factory=dict)
    kinds: dict[KindCell, dict[int, bool]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    error: float = 0.0

    def add(self, seen: Comparison) -> bool:
        """Take a comparison of sound code in; returns whether all of it is right."""
        setting = seen.setting
        model = (seen.architecture, setting.variant)
        for name in setting.names:
            cell = Cell(setting.family == PADDED, model, way(setting), setting.ranks, name)
            self.cells[cell] = self.cells.get(cell, True) and name in seen.right
            kind = KIND_OF.get((setting.family, setting.variant, name))
            for told in ways_of_kind(setting) if kind else ():
                known = self.kinds.setdefault((str(kind), seen.architecture, told), {})
                known[setting.ranks] = known.get(setting.ranks, True) and name in seen.right
        self.error = max(self.error, seen.error)
        return seen.right >= set(setting.names)

    @property
    def summary(self) -> str:
        """The numbers in one line."""
        wrong = sum(not right for right in self.cells.values())
        missed = sum(not fault.noticed for fault in self.faults)
        line = f"parity: {len(self.cells)} cells, {wrong} wrong; "
        line += f"{len(self.faults)} faults on purpose, {missed} unnoticed"
        return line + (f"; {len(self.failed)} other tests failed" if self.failed else "")


def way(setting: Setting) -> str:
    """A description of how a setting compares."""
    parts = ["alone" if len(setting.names) == 1 else "mixed"]
    parts.append("whole" if setting.chunk >= WHOLE else "in chunks")
    if setting.rejoins_at is not None:
        parts.append("preempted")
    if setting.lengths:
        parts.append("scheduled")
    if setting.lost_at is not None:
        parts.append("ranks rebuilt")
    if setting.vocabulary:
        parts.append("vocabulary adapted")
    if setting.copies:
        parts.append("or replaced")
    if setting.linears:
        parts.append("linear maps replaced")
    if setting.spread:
        parts.append("whole experts on each rank")
    return ", ".join(parts)


def ways_of_kind(setting: Setting) -> list[str]:
    """Which of KIND_WAYS a setting is."""
    is_mixed = len(setting.names) > 1
    said = [not is_mixed, is_mixed, setting.chunk < WHOLE, setting.rejoins_at is not None]
    return [w for w, holds in zip(KIND_WAYS, [*said, setting.hits > 0], strict=True) if holds]


def kinds_table(kinds: Mapping[KindCell, Mapping[int, bool]]) -> str:
    """One row for each kind and model: the ranks on which each way is right."""
    rows = [
        [kind, model, *(_ranks(kinds.get((kind, model, told), {})) for told in KIND_WAYS)]
        for kind in dict.fromkeys(KIND_OF.values())
        for model in dict.fromkeys(model for own, model, _ in kinds if own == kind)
    ]
    return table(["adapter", "model", *KIND_WAYS], rows)


def _ranks(right: Mapping[int, bool]) -> str:
    return ", ".join(str(n) if right[n] else f"**{n} wrong**" for n in sorted(right))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *lines]) + "\n"


def cells_table(cells: Mapping[Cell, bool]) -> str:
    """Rows are models and ways, columns numbers of ranks; entries are right/compared."""
    columns = sorted({cell.ranks for cell in cells})
    counts: dict[tuple[str, str, str], dict[int, list[bool]]] = {}
    families = list(dict.fromkeys(cell.model[0] for cell in cells))
    first = list(dict.fromkeys(cell.model for cell in cells))
    first.sort(key=lambda model: families.index(model[0]))
    for cell in sorted(cells, key=lambda cell: first.index(cell.model)):
        row = counts.setdefault((*cell.model, cell.way), {})
        row.setdefault(cell.ranks, []).append(cells[cell])
    rows = [
        [*key, *(f"{sum(row[n])}/{len(row[n])}" if n in row else "" for n in columns)]
        for key, row in counts.items()
    ]
    ranks = [f"{n} rank{'s' * (n > 1)}" for n in columns]
    return table(["model", "variant", "compared", *ranks], rows)


def faults_table(faults: Iterable[Fault]) -> str:
    """One row for each fault."""
    rows = [[f.name, f.where, "noticed" if f.noticed else "**unnoticed**"] for f in faults]
    return table(["fault", "on", "outcome"], rows)


def outcome_text(outcome: Outcome) -> str:
    """All tables of outcomes."""
    paged = {cell: right for cell, right in outcome.cells.items() if not cell.padded}
    padded = {cell: right for cell, right in outcome.cells.items() if cell.padded}
    parts = ["## Kinds of adapters\n", KINDS_READING]
    parts += [kinds_table(outcome.kinds)]
    parts += ["## Paged models\n", cells_table(paged), "## Padded models\n"]
    parts += ["transformers' own code, batched by padding; on one rank.\n", cells_table(padded)]
    parts += ["## Faults on purpose\n", "Each breaks the code; the comparison must notice.\n"]
    parts += [faults_table(outcome.faults)]
    if outcome.failed:
        parts += ["## Tests that failed otherwise\n", "\n".join(f"- `{t}`" for t in outcome.failed)]
    return "\n".join(parts)


def oracle_table() -> str:
    """All that is done to the oracle."""
    return table(["done", "where", "why"], [(what, *rest) for what, rest in ORACLE.items()])


def undecided_fields() -> list[str]:
    """The fields of peft.LoraConfig that modeling/adapters/peft/config.py does not know."""
    return [name for name in _fields() if name not in {*SERVED, *IGNORED, *REFUSED}]


def peft_table() -> str:
    """Every field of peft.LoraConfig, and what becomes of it."""
    return table(["field", "decision", "note"], [_decision(name) for name in _fields()])


def _fields() -> list[str]:
    return [field.name for field in dataclasses.fields(peft.LoraConfig)]


def _decision(name: str) -> tuple[str, str, str]:
    if name in SERVED:
        return f"`{name}`", "served", SERVED_NOTES.get(name, "")
    if name in IGNORED:
        return f"`{name}`", "ignored", IGNORED[name]
    return f"`{name}`", "refused when set", REFUSED.get(name, "**undecided**")


def page(outcome: Outcome) -> str:
    """The whole of docs/parity.md."""
    versions = [
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "peft")
    ]
    conditions = {
        "numbers": "float32 on the CPU, one thread a rank; the oracle's products in float64",
        "ranks": "1, 2 and 4, in one process over gloo",
        "answers": f"{NUM_TOKENS} greedy tokens (padded models: {NUM_TOKENS - 6} to {NUM_TOKENS})",
        "tolerance of a logprob": f"{TOLERANCE:.0e}",
        "largest difference seen": f"{outcome.error:.1e}",
        "every token of the oracle leads by": f"{MIN_MARGIN:.0e} at least, in logits",
        "every adapter moves the base's logits by": f"{MIN_SHIFT:.0e} at least, at every token",
        "caches and adapter pages": "hold NaN before anything is written",
        "versions": f"Python {platform.python_version()}, {', '.join(versions)}",
        "outcome": f"**{outcome.summary}**",
    }
    rows = [f"| {name} | {value} |" for name, value in conditions.items()]
    parts = [INTRO + "\n".join(rows) + "\n", READING, outcome_text(outcome)]
    parts += ["## The oracle\n", ORACLE_READING, oracle_table()]
    parts += ["## PEFT's fields\n", PEFT_READING, peft_table()]
    return "\n".join(parts)
