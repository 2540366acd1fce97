"""The fuzzer's fast part: it tells equal from wrong, and a number is the same case each time."""

from pathlib import Path

import pytest

from modeling.adapters.peft.config import LoraPlan
from tests.modeling.models.fuzz import main, run_case
from tests.sweeps import swept_rows

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("seed", "kind"),
    swept_rows([(1, "qwen3"), (2, "gpt2"), (3, "gemma3")], lambda seed, kind: kind == "qwen3"),
)
def test_a_case_is_equal(tmp_path: Path, seed: int, kind: str) -> None:
    case, word, why = run_case(seed, tmp_path / "first", kind)
    assert word == "equal", (why, case.said)
    assert case.adapters
    assert run_case(seed, tmp_path / "again", kind)[0].said == case.said


def test_a_fault_on_purpose_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoraPlan, "scaling_of", lambda self, module: 0.3)
    said: list[str] = []
    assert main(["--seed", "1", "--seconds", "0", "--kind", "qwen3"], said.append) == 1
    assert said[0].startswith("wrong     --seed 1 qwen3")
    assert said[-1] == "cases 1 to 1: {'wrong': 1}"
