import ast
import re
from pathlib import Path

from modeling.adapters.peft.config import HARMLESS_INITS
from tests.modeling.parity.comparison import BASE, WHOLE, Comparison, Setting
from tests.parity_page import (
    Fault,
    Outcome,
    cells_table,
    kinds_table,
    oracle_table,
    page,
    peft_table,
    undecided_fields,
)

PAGE = Path(__file__).parents[3] / "docs" / "parity.md"
_ORACLES = ("transformers", "peft")


def test_every_field_of_peft_is_decided() -> None:
    assert undecided_fields() == []


def test_the_page_holds_the_table_of_peft_as_it_is() -> None:
    _, found = PAGE.read_text(encoding="utf-8").split("## PEFT's fields\n")
    assert found.endswith(f"\n\n{peft_table()}"), "run `make parity`"
    assert all(f"`{init}`" in found for init in HARMLESS_INITS)


def test_the_page_lists_all_that_is_done_to_the_oracle() -> None:
    _, found = PAGE.read_text(encoding="utf-8").split("## The oracle\n")
    assert oracle_table() in found, "run `make parity`"


def test_nothing_else_is_done_to_the_oracle() -> None:
    """All that a test sets on objects of transformers or PEFT is in the page's table."""
    found = set()
    tests = Path(__file__).parents[2]
    for path in tests.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        theirs = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if (getattr(node, "module", None) or alias.name).split(".")[0] in _ORACLES
        }
        file = path.relative_to(tests).as_posix()
        found |= {(file, name) for name in map(_set_on, ast.walk(tree)) if name in theirs}
    # The second file's tests are about packages that are not installed, and compare no numbers; the
    # third's have a layer wait, and compare our own steps.
    assert found == {
        ("modeling/parity/test_config.py", "PretrainedConfig"),
        ("modeling/runner/test_padded_loading.py", "AutoModelForCausalLM"),
        ("modeling/runner/test_padded_loading.py", "AutoConfig"),
        ("modeling/test_cuda_generic.py", "Lfm2ShortConv"),
        ("modeling/test_cuda_generic.py", "PhiMLP"),
    }


def _set_on(node: ast.AST) -> str:
    """The name that begins what an assignment or a setattr changes; "" for other nodes."""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        changed: ast.expr = node.targets[0].value
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
        ("setattr", "patch.object")
    ):
        changed = node.args[0]
    else:
        return ""
    return re.split(r"\W", ast.unparse(changed).strip("'"))[0]


def test_the_page_tells_of_no_wrong_cell() -> None:
    assert " cells, 0 wrong; " in PAGE.read_text(encoding="utf-8")


def test_cells_are_counted_once_and_stay_wrong() -> None:
    outcome = Outcome()
    setting = Setting("llama", "gqa", 2, [BASE, "r8"], rejoins_at=3)
    half = Comparison(setting, "Llama", right={BASE}, error=2e-6)
    assert not outcome.add(half)
    assert outcome.add(Comparison(setting, "Llama", right={BASE, "r8"}))
    assert outcome.add(Comparison(Setting("llama", "gqa", 1, ["r8"], WHOLE), "Llama", right={"r8"}))
    outcome.faults.append(Fault("scale dropped", "Llama", noticed=False))
    summary = "parity: 3 cells, 1 wrong; 1 faults on purpose, 1 unnoticed"
    assert outcome.summary == summary
    assert cells_table(outcome.cells).splitlines() == [
        "| model | variant | compared | 1 rank | 2 ranks |",
        "|---|---|---|---|---|",
        "| Llama | gqa | mixed, in chunks, preempted |  | 1/2 |",
        "| Llama | gqa | alone, whole | 1/1 |  |",
    ]
    wrong = "**2 wrong** | " * 3
    row = f"| LoRA, rsLoRA, patterns, some layers | Llama | 1 | {wrong} |"
    assert kinds_table(outcome.kinds).splitlines()[2:] == [row]
    text = page(outcome)
    assert summary in text
    assert "**unnoticed**" in text
    assert "2.0e-06" in text
