import json
import sys
from pathlib import Path

import pytest

from benchmarks import staging


@pytest.mark.parametrize("size", [[], ["--large"]])
def test_every_adapter_is_staged_beside_launches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: list[str]
) -> None:
    before = sys.getswitchinterval()
    try:
        staging.main(["--work", str(tmp_path), "--shape", "tiny", "--adapters", "3", *size])
    finally:
        sys.setswitchinterval(before)
    row = json.loads(capsys.readouterr().out)
    assert (row["adapters"], row["readers"], row["switch_ms"]) == (3, 4, 0.5)
    assert row["all_ms"] > 0
    assert row["one_alone_p50_ms"] > 0
    assert row["one_alone_cpu_p50_ms"] > 0
    assert row["launch_alone_p50_ms"] > 0
