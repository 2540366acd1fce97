"""Products of many tokens with weights of 4 bits become code for Hopper that does not spill."""

import re
import subprocess
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modeling.quantisation.integers import IntegerWeight
from tests.modeling.layers.kernels import test_experts_compile
from tests.modeling.layers.kernels.test_experts_compile import Compiled
from tests.modeling.quantisation.kernels.test_tiled_integers_interpreted import (
    act_order,
    from_table,
    symmetric,
)

pytestmark = test_experts_compile.pytestmark

FORMS = {"4 bits": symmetric, "act-order": act_order, "from a table": from_table}


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("triton")
    from modeling.quantisation.kernels import tiled_integers

    stream = SimpleNamespace(cuda_stream=0)
    memory = torch.empty(1), torch.empty(1, dtype=torch.int32)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    for name, value in (("has_dependent_launch", True), ("product_memory", memory)):
        monkeypatch.setattr(tiled_integers, name, lambda *given, own=value: own)
    return tiled_integers


def stack_of(code: bytes, folder: Path) -> int:
    """Bytes that a program keeps in memory for lack of registers."""
    from triton import knobs

    file = folder / "code.cubin"
    file.write_bytes(code)
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", text)
    return int(stack)


@pytest.mark.parametrize("form", FORMS)
def test_they_compile(
    tiled: Any, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cut, for Llama-3-8B's hidden size. Where programs share inputs, sums may spill once."""
    compiled = Compiled()
    monkeypatch.setattr(
        tiled,
        "_launch_tiled",
        lambda *given: compiled(SimpleNamespace(_kernel=tiled._tiled), *given),
    )
    weight: IntegerWeight = FORMS[form](64, 4096)
    for cut in set(chain(*tiled.TILED_CUTS.values())):
        x = torch.empty(96, 4096, dtype=torch.float16)
        y = torch.empty(96, 64, dtype=torch.float16)
        tiled.tiled_product(weight.operands(x), None, y, replace(cut, blocks=1))
    assert compiled.names == {"_tiled"}
    assert not any(stack_of(code, tmp_path) for code in compiled.codes)
