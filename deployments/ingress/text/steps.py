"""The steps of a `tokenizers` component (normalizer, pre-tokenizer, decoder) as data."""

import json
from collections.abc import Mapping
from typing import Any

Step = Mapping[str, Any]
"""One step as tokenizer.json has it: `type`, and the settings of that type."""


def steps_of(component: Any, list_name: str) -> list[Step]:
    """The steps of a component in order, with nested sequences flattened; [] for None.

    list_name: the field of a `Sequence` that lists its steps, e.g. "decoders".
    """
    return [] if component is None else _flat(json.loads(component.__getstate__()), list_name)


def _flat(step: Step, list_name: str) -> list[Step]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step[list_name] for inner in _flat(part, list_name)]
