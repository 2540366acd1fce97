"""A worker that crashes fails one test: all others run, and the run ends."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 600.0

CRASHES = """
import os

def test_before():
    pass

def test_crash():
    os._exit(1)

def test_behind():
    pass
"""

SOUND = """
import pytest, time

@pytest.mark.parametrize("n", range(4))
def test_one(n):
    time.sleep(0.01)
"""


@pytest.mark.sweep
def test_a_worker_that_crashes_fails_one_test_and_the_run_ends(tmp_path: Path) -> None:
    for number in range(12):
        content = CRASHES if number == 5 else SOUND
        (tmp_path / f"test_{number:02}.py").write_text(content)
    (tmp_path / "pytest.ini").write_text("[pytest]")
    command = [sys.executable, "-m", "pytest", "-p", "tests.sharing", "-n", "2", str(tmp_path)]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert "1 failed, 46 passed" in ran.stdout, ran.stdout
