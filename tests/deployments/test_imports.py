"""What the processes of a replica load: drivers and ingresses start often and hold no tensors."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["deployments.driver.deployment", "deployments.ingress.deployment"]
)
def test_a_process_without_tensors_does_not_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
