"""The shape of the source tree, and words that it does not use."""

import ast
import re
from collections import Counter

import pytest

from tests.house import ROOT, circles, functions, imports, length, modules

MODULES = modules()

PLAIN = (
    r"claims?|standings?|trials?|suspects?|payers?|seats?|seated|placed|places|(?<!in )place|parted"
    r"|aside|errands?|ledgers?|seams?|arenas?|head_?start|chosen|spots?|adopts?|rehearsals?|mailbox"
    r"|holdings|doors?|mates?|who|whom|whose|his|him|he|told|nobody|somebody|everybody|anybody"
    r"|asked|asks?"
)

SERVER = (
    r"claims?|standings?|trials?|suspects?|seats?|seated|parted|aside|who|whom|whoever|his|him|he"
    r"|told|asked|nobody|somebody|everybody|anybody|errands?|ledgers?|seams?|arenas?|adopts?|adopted"
    r"|mailbox(?:es)?|holdings|meant|given by hand"
)

DRIVER_TESTS = (
    r"told|asked|who|whom|whoever|he|his|him|somebody|everybody|anybody|errands?|ledgers?|seats?"
    r"|adopts?|adopted|holdings|mailbox(?:es)?|arenas?|seams?|standing|suspects?|placed|taken back"
)

RETIRED = {
    "deployments/*.py": SERVER,
    "deployments/commands": rf"{SERVER}|turns?|places?|placed|chooses?|whose",
    "deployments/driver": rf"{SERVER}|fills?|places?|placed|chosen|tells?|payers|glance|share_out",
    "deployments/observability": rf"{SERVER}|chosen|tells?|whose",
    "deployments/rank": rf"{SERVER}|fills?|places?|chosen|tells?|turns?",
    "deployments/ingress": (
        r"claims?|standings?|trials?|suspects?|seats?|seated|places?|placed|parted|aside|apart"
        r"|whoever|who|whom|his|him|he|told|tells?|nobody|somebody|everybody|anybody|errands?"
        r"|ledgers?|seams?|arenas?|desk|asked|asking|said|held|stands?|bears?|spelled|tried|whichever"
    ),
    "docs": (
        r"claims?|standings?|trials?|seats?|seated|placed|parted|aside|whom|whoever|his|him|told"
        r"|tells|somebody|everybody|anybody|errands?|ledgers?|seams?|arenas?|head_?starts?"
        r"|mailbox|owes?|owed"
    ),
    "configs": (
        r"claims?|standings?|trials?|suspects?|payers?|seats?|seated|fills?|placed|parted|aside"
        r"|who|whom|whose|his|him|told|tells|asked|asks?|nobody|somebody|everybody|anybody"
        r"|errands?|ledgers?|seams?|arenas?|head_?start|doors?|owes?|owed|mailbox|shells?"
    ),
    "sources": (
        r"claims?|standings?|trials?|suspects?|seats?|seated|fills?|places?|placed|parted|aside"
        r"|who|whom|his|him|told|tells|asked|nobody|somebody|everybody|anybody|errands?|ledgers?"
        r"|seams?|arenas?|head_?start|doors?|owes?|owed|mailbox|shells?"
    ),
    "benchmarks": (
        r"claims?|standings?|trials?|suspects?|seats?|seated|fills|places|placed|parted|aside"
        r"|whom|whoever|his|him|told|tells|asked|nobody|somebody|everybody|anybody|errands?"
        r"|ledgers?|seams?|arenas?|head_?starts?|doors?|owes?|owed|mailbox|shells?"
    ),
    "modeling/adapters": PLAIN,
    "modeling/attention": rf"{PLAIN}|tells?",
    "modeling/layers": PLAIN,
    "modeling/models": rf"{PLAIN}|tells?",
    "modeling/runner": rf"{PLAIN}|tells?",
    "modeling/sampling": PLAIN,
    "scheduler": rf"{PLAIN}|fills?",
    "sharding": PLAIN,
    "tests/deployments/driver": DRIVER_TESTS,
    "tests/deployments/rank": DRIVER_TESTS,
    "tests/end_to_end": DRIVER_TESTS,
}
RETIRED["tests/deployments/ingress"] = RETIRED["deployments/ingress"]
"""Words that a folder's code and prose must not contain, as a whole word or a part of a name."""


def test_public_class_names_are_unique() -> None:
    classes = [n.name for m in MODULES for n in ast.walk(m.tree) if isinstance(n, ast.ClassDef)]
    counts = Counter(name for name in classes if not name.startswith("_"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(imports(MODULES)) == []


def test_files_and_functions_are_short() -> None:
    assert [module.name for module in MODULES if module.lines > 400] == []
    lengths = [length(function) for module in MODULES for function in functions(module)]
    assert sum(lengths) / len(lengths) <= 10
    kernels = re.compile(r"modeling/(.*/)?(kernels|triton)/")
    files = [module for module in MODULES if not kernels.search(module.path.as_posix())]
    found = [(module.name, each) for module in files for each in functions(module)]
    assert [(name, each.name) for name, each in found if length(each) > 50] == []


@pytest.mark.parametrize("folder", RETIRED)
def test_retired_words_do_not_come_back(folder: str) -> None:
    pattern = re.compile(rf"(?<![A-Za-z])(?:{RETIRED[folder]})(?![A-Za-z])", re.IGNORECASE)
    found = []
    kind = "*.md" if folder == "docs" else "*.py"
    paths = ROOT.glob(folder) if folder.endswith(".py") else (ROOT / folder).rglob(kind)
    for path in sorted(paths):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            found += [f"{path.relative_to(ROOT)}:{number}: {w[0]}" for w in pattern.finditer(line)]
    assert found == []
