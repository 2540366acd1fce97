"""Masks of rows with drafts: those that the same tokens would get one by one."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from configs.wire.plan import StepRow
from configs.wire.sampling import Sampling
from tests.fakes import EOS, byte_level_tokenizer, token_id
from tests.modeling.sampling.test_grammars import AMBIGUOUS, PERSON, Ranks

pytest.importorskip("llguidance")

CPU = torch.device("cpu")
TOKENIZER = byte_level_tokenizer()
THINK, END = token_id(TOKENIZER, "<think>"), token_id(TOKENIZER, EOS)
PROMPT = 3


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return found


STOP = tuple(ids("x!"))
FREE = Sampling(json_schema=PERSON, free_until=STOP)
OPENED = Sampling(json_schema=PERSON, free_until=STOP, free_from=THINK)
JSON = ids('{"name": "fox", "age": 7}')


class Rows:
    """One batch slot after another; each has a text that it knows, and a reference beside it."""

    def __init__(self, root: Path, params: Sequence[Sampling]) -> None:
        self.params = params
        folders = [root / "drafted", root / "alone"]
        for folder in folders:
            folder.mkdir()
        self.drafted, self.alone = (Ranks(folder, params) for folder in folders)
        self.prompts = np.full(len(params), PROMPT)

    def expect(self, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        """The next step's rows: the index in the answer of the first sample, and the draft."""
        step = [
            StepRow(slot, PROMPT + at - 1, 1 + len(draft), [], True, 0, tuple(draft))
            for slot, (at, draft) in enumerate(rows)
        ]
        self.drafted.grammars.expect(step, self.prompts)

    def masks(self, drafts: Sequence[Sequence[int]]) -> list[npt.NDArray[np.int32]]:
        """Each slot's masks."""
        counts = [1 + len(draft) for draft in drafts]
        slots = np.repeat(np.arange(len(drafts)), counts).tolist()
        words: npt.NDArray[np.int32] = self.drafted.grammars.masks(slots, CPU).numpy()
        return np.split(words, np.cumsum(counts)[:-1])

    def sample(self, samples: Sequence[Sequence[int]]) -> None:
        slots = [slot for slot, own in enumerate(samples) for _ in own]
        tokens = torch.tensor([token for own in samples for token in own])
        self.drafted.grammars.advance(slots, tokens)

    def expected(self, slot: int, answer: Sequence[int]) -> npt.NDArray[np.int32]:
        """The mask behind these tokens."""
        self.alone.join(slot, self.params[slot].constraint, answer, self.params[slot])
        words: npt.NDArray[np.int32] = self.alone.grammars.masks([slot], CPU).numpy()[0]
        return words


@pytest.mark.parametrize(
    ("params", "text", "draft"),
    [
        (Sampling(json_schema=PERSON), [], JSON),
        (Sampling(json_schema=PERSON), JSON[:4], [*JSON[4:], END, END]),
        (FREE, ids("fox"), [*ids("dog "), *STOP, *JSON[:5]]),
        (FREE, STOP[:1], [STOP[1], *JSON[:3]]),
        (OPENED, [], [THINK, *ids("dog"), *STOP, *JSON[:4]]),
        (OPENED, [], [THINK, *ids("dog")]),
        (OPENED, [], JSON[:6]),
        (OPENED, [], []),
        (OPENED, [THINK, *STOP], JSON[:6]),
    ],
)
def test_masks_of_a_draft(
    tmp_path: Path, params: Sampling, text: list[int], draft: list[int]
) -> None:
    """Beside a row with the same matcher, and a wrong draft."""
    rows = Rows(tmp_path, [params, params, Sampling(json_schema=PERSON)])
    rows.drafted.join(0, params.constraint, text, params)
    wrong = [*JSON[:3], *STOP, 9]
    rows.expect([(len(text), draft), (0, ()), (0, wrong)])
    own, beside, other = rows.masks([draft, (), wrong])
    for index, mask in enumerate(own):
        np.testing.assert_array_equal(mask, rows.expected(0, [*text, *draft[:index]]))
    np.testing.assert_array_equal(beside[0], rows.expected(1, []))
    for index, mask in enumerate(other[:4]):
        np.testing.assert_array_equal(mask, rows.expected(2, wrong[:index]))
    bits = np.unpackbits(other[4:].view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in bits] == [[END]] * (len(other) - 4)
    assert rows.drafted.grammars.take_faults([0, 1, 2]) is None


def test_a_matcher_reads_what_is_right_alone(tmp_path: Path) -> None:
    """The samples up to the first that is not the draft's, and no row behind a wrong draft."""
    schema = Sampling(json_schema=json.dumps({"enum": ["foxes", "fox", "dog"]}))
    rows = Rows(tmp_path, [schema, schema])
    right, wrong = ids('"fox"'), ids('"dog"')
    rows.expect([(0, right[:2]), (0, wrong[:2])])
    rows.masks([right[:2], wrong[:2]])
    rows.sample([[*right[:2], right[2]], [wrong[0], right[1], 7]])
    # Both were planned behind a right draft.
    rows.expect([(3, ()), (3, right[2:])])
    [mask], void = rows.masks([(), right[2:]])
    np.testing.assert_array_equal(mask, rows.expected(0, right[:3]))
    np.testing.assert_array_equal(void, [[1 << END, *[0] * (void.shape[1] - 1)]] * 3)
    rows.sample([[right[3]], [8, 9, 10]])
    rows.expect([(4, ()), (2, right[2:])])
    [mask], own = rows.masks([(), right[2:]])
    np.testing.assert_array_equal(mask, rows.expected(0, right))
    for index in range(3):
        np.testing.assert_array_equal(own[index], rows.expected(1, right[: 2 + index]))
    assert rows.drafted.grammars.take_faults([0, 1]) is None


def test_a_draft_that_costs_too_much_is_a_fault_of_its_row(tmp_path: Path) -> None:
    """Others are as they would be without it."""
    rows = Rows(tmp_path, [Sampling(grammar=AMBIGUOUS), Sampling(json_schema=PERSON)])
    text = ids("a") * 390
    drafts = [text, JSON]
    rows.expect([(0, drafts[0]), (0, drafts[1])])
    own = rows.masks(drafts)[1]
    [(row, fault)] = rows.drafted.grammars.take_faults([0, 1]) or []
    assert row == 0
    assert fault.startswith("the constraint cannot be followed any further: ")
    for index, mask in enumerate(own):
        np.testing.assert_array_equal(mask, rows.expected(1, JSON[:index]))
