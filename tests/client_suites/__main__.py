"""Clients' own test suites, unmodified, against the demo: `make test-clients`.

The models that their tests name are adapters of the demo. Prints for each suite how many tests
passed, and each failure's reason; a failure without a reason in suites.yaml ends it with status 1.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any
from xml.etree import ElementTree

import yaml

from configs.batches import BatchesConfig
from configs.wire.adapters import AdapterSource
from deployments.ingress.generation.engine import IngressSettings
from tests.served import demo_app, demo_config, served

HERE = Path(__file__).resolve().parent
HOME = HERE.parents[1] / ".venv-clients"
BASE = "gpt-4o-mini"
NAMES = (
    "model", "gpt-6-astra", "gpt-5-nano", "gpt-4.1-mini", "gpt-4.1-nano", "gpt-3.5-turbo-instruct",
    "text-embedding-3-small", "claude-opus-5-5", "claude-haiku-4-5-20251001",
    "claude-sonnet-4-5",
)  # fmt: skip
"""The models that the suites name, besides the base model."""
_BUILD = ("hatchling", "hatch-vcs", "hatch-fancy-pypi-readme", "poetry-core", "setuptools", "wheel")
_PYTEST = ("pytest", "pytest-timeout")
# Clients keep connections of one event loop for the next test's.
_ONE_LOOP = [
    option
    for scope in ("fixture", "test")
    for option in ("-o", f"asyncio_default_{scope}_loop_scope=session")
]

Suite = Mapping[str, Any]


def main(wanted: Sequence[str]) -> int:
    """Run the suites of these names, or all."""
    suites: list[Suite] = yaml.safe_load((HERE / "suites.yaml").read_text("utf-8"))
    chosen = [suite for suite in suites if not wanted or suite["name"] in wanted]
    for suite in chosen:
        _install(suite)
    with tempfile.TemporaryDirectory() as folder, served(_demo(Path(folder))) as url:
        unknown = sum([_run(suite, url, Path(folder) / "report.xml") for suite in chosen])
    return min(unknown, 1)


def _demo(folder: Path) -> Any:
    """The demo, with its pirate under every name."""
    for name in NAMES:
        copytree("configs/demo/adapters/pirate", folder / "adapters" / name)
    config = demo_config()
    roots = [*config.adapters.local_roots, str(folder / "adapters")]
    config = demo_config(
        adapters={**config.adapters.model_dump(), "local_roots": roots},
        model={**config.model.model_dump(), "name": BASE},
    )
    batches = BatchesConfig(storage=str(folder / "batches"))
    settings = IngressSettings(default_source=AdapterSource.LOCAL, loopback=True, batches=batches)
    return demo_app(config, settings)


def _python(suite: Suite) -> Path:
    """The interpreter of the suite's environment."""
    return HOME / str(suite.get("environment", "clients")) / "bin/python"


def _source(suite: Suite) -> Path:
    """The folder of the suite's source package."""
    return HOME / "sources" / re.sub("[-_]", "_", suite["package"]).replace("==", "-")


def _install(suite: Suite) -> None:
    """Make the environment, and fetch the source package, where they are not there."""
    python, source = _python(suite), _source(suite)
    if source.is_dir():
        return
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    pip: list[str | Path] = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    needs = [suite["package"], *suite["needs"], *_BUILD, *_PYTEST]
    subprocess.run([*pip, "install", *needs], check=True)
    HOME.joinpath("sources").mkdir(exist_ok=True)
    subprocess.run(
        [*pip, "download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
         "--dest", source.parent, suite["package"]],
        check=True,
    )  # fmt: skip
    with tarfile.open(f"{source}.tar.gz") as archive:
        archive.extractall(source.parent, filter="data")


def _run(suite: Suite, url: str, report: Path) -> int:
    """Run one suite and print what became of it; returns the failures without a reason."""
    # The first two need the route's prefix; Anthropic's client writes it itself.
    v1 = url if suite["name"] == "anthropic" else f"{url}/v1"
    variables = {
        "TEST_API_BASE_URL": v1, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "none",
    }  # fmt: skip
    command: list[str | Path] = [
        _python(suite), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=120",
        "--tb=line", "-o", "addopts=", *_ONE_LOOP, f"--junitxml={report}", *suite["paths"],
    ]  # fmt: skip
    report.unlink(missing_ok=True)
    subprocess.run(
        command, cwd=_source(suite), env={**os.environ, **variables}, check=False,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    cases = [*ElementTree.parse(report).getroot().iter("testcase")]
    reasons = Counter(
        _reason(suite, f"{case.get('classname')}.{case.get('name')}", fault.get("message") or "")
        for case in cases
        for fault in (*case.iter("failure"), *case.iter("error"))
    )
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - skipped - reasons.total()
    print(f"{suite['package']}: {passed} passed, {reasons.total()} failed, {skipped} skipped")
    for reason, number in reasons.most_common():
        print(f"  {number:4} {reason}")
    return sum(number for reason, number in reasons.items() if reason.startswith("UNKNOWN"))


def _reason(suite: Suite, test: str, message: str) -> str:
    """Why the test failed, as suites.yaml has it."""
    for row in suite["failures"]:
        if re.search(row.get("test", ""), test) and re.search(row.get("message", ""), message):
            return str(row["reason"])
    return f"UNKNOWN {test}: {message[:300]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
