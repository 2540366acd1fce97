"""Norm, rotation and the cache's store in one kernel, on a CPU, by Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4.
"""

import os
from typing import Any

import pytest
import torch

from modeling.attention.kv_cache import CacheSpec, LayerCache, allocate
from modeling.layers.angles import Angles
from modeling.layers.attention import rotate_and_store, rotate_queries
from modeling.layers.head_norms import HeadNorms
from tests.modeling.attention.triton.test_interpreted import Interpreted

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)

CPU = torch.device("cpu")
TOKENS, SLOTS = 5, torch.tensor([3, 0, 6, 9, 1])


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    kernels = pytest.importorskip("modeling.layers.kernels.operations")
    launch = Interpreted(kernels._LAUNCH_ROTATE_AND_STORE._kernel)
    monkeypatch.setattr(kernels, "_LAUNCH_ROTATE_AND_STORE", launch)
    return kernels.rotate_and_store


def new_cache(kv_heads: int, head_dim: int) -> LayerCache:
    return allocate(CacheSpec(1, 4, kv_heads, head_dim, torch.float32), 3, CPU)[0]


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (5, 1, 24), (3, 3, 64)])
@pytest.mark.parametrize("width", [0, 4, 16])
@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("normed", [0, 2, 3])
def test_as_by_torch(
    kernel: Any, heads: int, kv_heads: int, head_dim: int, width: int, neighbours: bool, normed: int
) -> None:
    wide = torch.randn(TOKENS, heads + 2 * kv_heads + 1, head_dim)
    parts = torch.split(wide[:, 1:], [heads, kv_heads, kv_heads], dim=1)
    angle = torch.randn(TOKENS, 1, width // 2)
    cos, sin = torch.randn(TOKENS, 1, width), torch.cat((-angle.sin(), angle.sin()), -1)
    angles = Angles(cos, sin, neighbours) if width else None
    weights = tuple(torch.rand(head_dim) + 0.5 for _ in range(normed))
    norms = HeadNorms(weights, (1e-6, 1e-1, 1.0)[:normed]) if normed else None
    found, wanted = new_cache(kv_heads, head_dim), new_cache(kv_heads, head_dim)
    q = kernel(parts, angles, found, SLOTS, norms)
    torch.testing.assert_close(q, rotate_and_store(parts, angles, wanted, SLOTS, None, norms))
    torch.testing.assert_close(found.flat_keys, wanted.flat_keys)
    torch.testing.assert_close(found.flat_values, wanted.flat_values)
    if norms is not None:
        norms = HeadNorms(norms.weights[:1], norms.eps[:1])
    alone = kernel(parts[:1], angles, None, None, norms)
    torch.testing.assert_close(alone, rotate_queries(parts[0], angles, norms))
    assert torch.equal(kernel(parts[:1], angles, None, None, norms, overwrites=True), alone)
    assert parts[0].data_ptr() == wide[:, 1:].data_ptr()
    assert torch.equal(parts[0], alone)
