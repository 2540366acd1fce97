"""A pytest plugin that counts what the parity tests compared: `pytest -p tests.parity_report`.

It prints the tables of outcomes, writes docs/parity.md, and closes with the number of wrong cells.
"""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.modeling.padded import PaddedWorld
from tests.modeling.parity.comparison import Comparison, World
from tests.parity_page import Fault, Outcome, outcome_text, page

PAGE = Path("docs/parity.md")


def pytest_configure(config: pytest.Config) -> None:
    """Let a report listen to this run."""
    config.pluginmanager.register(ParityReport(config), "parity-report")


class ParityReport:
    """The outcome of a run, printed last."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._outcome = Outcome()
        self._finished = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Function
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Take in what a test has compared."""
        report = yield
        right = not report.failed
        if report.when == "call":
            seen = _drain(item.funcargs)
            wrong = [not self._outcome.add(one) for one in seen if not one.faulty]
            faults = [_fault(item, one, report.passed) for one in seen if one.faulty]
            self._outcome.faults += faults
            right = right or any(wrong) or bool(faults)
        if not right:
            self._outcome.failed.append(item.nodeid)
        return report

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Remember whether the tests ran to their end."""
        self._finished = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)

    def pytest_unconfigure(self) -> None:
        """Print the tables and the numbers below pytest's own last line, and write the page."""
        if not self._finished:
            return
        path = self._config.rootpath / PAGE
        path.write_text(page(self._outcome), encoding="utf-8")
        print(f"\n{outcome_text(self._outcome)}\nwritten: {PAGE}\n{self._outcome.summary}")


def _drain(funcargs: dict[str, Any]) -> list[Comparison]:
    """What a test's worlds have noted since the last call."""
    seen: list[Comparison] = []
    for world in funcargs.values():
        if isinstance(world, World | PaddedWorld):
            seen += world.record.comparisons
            world.record.comparisons.clear()
    return seen


def _fault(item: pytest.Function, seen: Comparison, noticed: bool) -> Fault:
    """Name a fault by its test, less what every such name says."""
    text = item.originalname.removeprefix("test_").replace("_", " ")
    for verb in ("is", "are"):
        text = text.removesuffix(f" {verb} noticed")
    choice = "" if not hasattr(item, "callspec") else item.callspec.id
    if choice and not choice.startswith("setting"):
        text += f": {choice}"
    setting = seen.setting
    where = (
        f"{seen.architecture} {setting.variant}, {setting.ranks} rank{'s' * (setting.ranks > 1)}"
    )
    return Fault(text, f"{where}, {' and '.join(setting.names)}", noticed)
