"""docs/models.md as text: every causal class of transformers, how it is served and why so."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from configs.architectures.base import ArchitectureError
from configs.architectures.generic import RECURRENT_TYPES, parse
from configs.architectures.padded import PaddedArchitecture
from configs.architectures.select import FAMILIES, MODEL_TYPES, parse_architecture
from configs.architectures.text_stack import WRAPPERS
from tests.parity_page import table

PAGE = Path("docs/models.md")

OWN = "Paged by code of this repository"
GENERIC = "Paged by transformers' modules"
TEXT = "Larger models, for text"
PADDED = "Padded"
REFUSED = "Refused"
UNKNOWN = "Not compared"
WRONG = "Wrong"

INTRO = """\
# Models

`make sweep ARGS=--page` writes this page: every `model_type` that AutoModelForCausalLM of
transformers {version} knows. It makes a tiny random model of each and two adapters on all of its
LoRA targets, and compares tokens and logprobs with transformers + PEFT.
The [parity page](parity.md) compares fewer types in more ways.

{counts}

What is paged has chunked prefill, the prefix cache and tensor parallelism; what is padded has one
rank and none of these ([the README](../README.md#models)). LoRA targets are the ends of the
modules' names, of linear layers inside the decoder; paged models can also adapt embedding and
head ([`adapters.vocabulary`](configuration.md)). Another config.json of a type on this page can
be refused, or padded, for a setting of its own: the start says which. Of paged types the
`...ForSequenceClassification` is served too, where transformers has one
([classification](compatibility.md#classification-scores-reranking)). Encoders embed and classify,
and have [a list of their own](compatibility.md#encoders).
"""

READING = {
    OWN: "Compared on one rank and on two.",
    GENERIC: "Compared on one rank and on two. Attention, cache, linear layers and both ends of\n"
    "the model are ours, all else is computed by transformers' modules. With another `rope_type`\n"
    "than default, dynamic, linear, llama3, proportional and yarn they are padded. Code that a\n"
    "repository of one of these types brings (`auto_map`) is not run.\n"
    "These types may have recurrent layers, which keep a state of each sequence in place of keys\n"
    "and values ([what that costs](design/generic_models.md)):\n"
    + "\n".join(f"`{kind}`," for kind in sorted(RECURRENT_TYPES)).rstrip(",")
    + ".",
    TEXT: "Their decoder alone is served, paged, as the parity page compares it. Their classes\n"
    "are\n"
    + "\n".join(f"`{name}`," for name in sorted(WRAPPERS)).rstrip(",")
    + ".\nOf Qwen's Omni models, which speak too, the thinker is served. Of these\n"
    "AutoModelForCausalLM knows:",
    PADDED: "Compared on one rank: transformers' own code.",
    REFUSED: "The start ends with this sentence.",
    UNKNOWN: "The tests can make no tiny model of these types, or transformers and PEFT do not\n"
    "run it. What can start is padded.",
    WRONG: "These must not be served.",
}
"""What stands above the tables, by their headings."""


@dataclass(frozen=True)
class Row:
    """How a kind fared; see `Outcome` of the sweep."""

    kind: str
    word: str
    served: str
    why: str
    targets: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A line of the page. why: what it says for itself. targets: as it lists them."""

    heading: str
    kind: str
    architecture: str
    why: str
    targets: str


def models_page(rows: Sequence[Row]) -> str:
    """The whole of docs/models.md."""
    entries = [_entry(row) for row in rows]
    present = [heading for heading in READING if any(e.heading == heading for e in entries)]
    sections = [
        f"## {heading}\n\n{READING[heading]}\n\n{_table(heading, entries)}" for heading in present
    ]
    number = {heading: sum(entry.heading == heading for entry in entries) for heading in READING}
    counts = "\n".join(f"* {heading}: {count}" for heading, count in number.items())
    intro = INTRO.format(version=transformers.__version__, counts=counts)
    return "\n".join([intro, *sections])


def read_page(text: str) -> list[Entry]:
    """The lines of a page's tables."""
    found = []
    for section in text.split("\n## ")[1:]:
        heading, _, rest = section.partition("\n")
        lines = [
            line
            for line in rest.splitlines()
            if line.startswith("| `") and line[3:13] != "model_type"
        ]
        for line in lines:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            kind, architecture = cells[0].strip("`"), cells[1].strip("`")
            why = cells[-1] if heading in _WITH_WHY else ""
            targets = cells[2] if heading not in _WITHOUT_TARGETS else ""
            found.append(Entry(heading, kind, architecture, why, targets))
    return found


def expected_heading(kind: str, architecture: str) -> str:
    """Where the code's tables put a type that is served: among the paged ones, or padded."""
    if architecture in WRAPPERS:
        return TEXT
    if _is_own(kind, architecture):
        return OWN
    return PADDED if reason(kind, architecture) else GENERIC


def _is_own(kind: str, architecture: str) -> bool:
    """Whether code of ours computes a type: others are built as a class of its families, too."""
    own = MODEL_TYPES[architecture] if architecture in FAMILIES else None
    return own == CONFIG_MAPPING[kind].model_type


def reason(kind: str, architecture: str) -> str:
    """Why a type is not paged by transformers' modules; "" for one that is."""
    sizes = {"vocab_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 256}
    # Of types that may have recurrent layers too, tiny models have none.
    layers = {"layer_types": ["full_attention"] * 2}
    # Dory's by default are more than two.
    ends = {"n_input_layers": 1, "n_output_layers": 1}
    found = parse(architecture, {"model_type": kind, **sizes, **layers, **ends})
    return found.reason if isinstance(found, PaddedArchitecture) else ""


_WITH_WHY = (PADDED, REFUSED, UNKNOWN, WRONG)
_WITHOUT_TARGETS = (TEXT, REFUSED, UNKNOWN, WRONG)


def _entry(row: Row) -> Entry:
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[row.kind]
    heading, why = _placed(row, architecture)
    return Entry(heading, row.kind, architecture, why, ", ".join(f"`{t}`" for t in row.targets))


def _placed(row: Row, architecture: str) -> tuple[str, str]:
    """The heading, and what there is to say."""
    if row.word == "exact" and row.served == "paged":
        return (OWN if _is_own(row.kind, architecture) else GENERIC), ""
    if row.word == "exact":
        return PADDED, reason(row.kind, architecture)
    if architecture in WRAPPERS:
        return TEXT, ""
    if row.word in ("refused", "wrong"):
        return (REFUSED if row.word == "refused" else WRONG), _sentence(row.why)
    refusal = _refusal(row.kind, architecture)
    return (REFUSED, refusal) if refusal else (UNKNOWN, _obstacle(row))


def _refusal(kind: str, architecture: str) -> str:
    """What a start says of a config with the type's own settings; "" where it reads them."""
    try:
        settings = CONFIG_MAPPING[kind]().to_dict()
    except Exception:
        return ""
    try:
        parse_architecture({**settings, "architectures": [architecture]})
    except ArchitectureError as error:
        return _sentence(str(error))
    return ""


def _obstacle(row: Row) -> str:
    """Why a type was not compared."""
    if row.word == "no truth":
        peft = "PEFT" in row.why
        return _sentence(row.why) if peft else "transformers' `generate` ends in an error"
    if "does not shrink" in row.why:
        return "the smallest model of it has millions of parameters"
    return "its config cannot be made small by the settings that do for the others"


def _sentence(why: str) -> str:
    """An error's text alone, without what else is supported."""
    text = re.sub(r"^\w+(Error|Exception): ", "", why)
    return re.split(r"; known: |; only layers that keep", text)[0].replace("|", "/").strip()


def _table(heading: str, entries: Iterable[Entry]) -> str:
    head = ["`model_type`", "class"]
    head += [] if heading in _WITHOUT_TARGETS else ["LoRA targets"]
    head += ["why"] if heading in _WITH_WHY else []
    rows = []
    for e in entries:
        cells = [f"`{e.kind}`", f"`{e.architecture}`"]
        cells += [] if heading in _WITHOUT_TARGETS else [e.targets or "none"]
        cells += [e.why] if heading in _WITH_WHY else []
        if e.heading == heading:
            rows.append(cells)
    return table(head, rows)
