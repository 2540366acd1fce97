"""The rotation's kernel becomes code for Hopper in every form; Triton needs no GPU for that."""

import os
from itertools import product

import pytest
import torch

from modeling.attention.kv_cache import CacheSpec, allocate
from modeling.layers.angles import Angles
from modeling.layers.head_norms import HeadNorms
from tests.modeling.layers.kernels.test_experts_compile import Compiled

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled"
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("head_dim", [80, 128, 512])
def test_it_compiles(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from modeling.kernels.launch import Launcher
    from modeling.layers.kernels.operations import rotate_and_store

    compiled = Compiled()
    launch = lambda own, *given: compiled(own, *given)  # noqa: E731
    monkeypatch.setattr(Launcher, "__call__", launch)
    (cache,) = allocate(CacheSpec(1, 4, 2, head_dim, torch.bfloat16), 2, CPU)
    parts = [torch.empty(3, heads, head_dim, dtype=torch.bfloat16) for heads in (6, 2, 2)]
    slots = torch.arange(3)
    for part, neighbours, normed in product((0, 1, 4), (False, True), (0, 2, 3)):
        angles = None
        if part:
            numbers = torch.empty(3, 1, head_dim // part, dtype=torch.bfloat16)
            angles = Angles(numbers, numbers, neighbours)
        norms = HeadNorms((torch.empty(head_dim),) * normed, (1e-6,) * normed) if normed else None
        rotate_and_store(parts, angles, cache, slots, norms)
        rotate_and_store(parts[:1], angles, None, None, norms)
    assert compiled.names == {"_rotate_and_store"}
