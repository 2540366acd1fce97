"""Attention over latents becomes code for Hopper, in blocks that its shared memory holds.

Triton needs no GPU for that.
"""

import os
import re

import pytest
import torch

from modeling.attention.base import AttentionSpec
from modeling.attention.kv_cache import FP8, CacheSpec, allocate
from modeling.kernels.launch import Launcher
from tests.modeling.layers.kernels.test_experts_compile import Compiled

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled"
)
CPU = torch.device("cpu")
SHARED = {"H100": 232448, "A100": 166912, "L40S": 101376}


@pytest.mark.parametrize("gpu", SHARED)
@pytest.mark.parametrize("queries", [1, 48])
@pytest.mark.parametrize(("heads", "cache_dtype"), [(20, None), (128, None), (16, FP8)])
def test_they_compile(
    gpu: str,
    queries: int,
    heads: int,
    cache_dtype: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an H100 Gluon's kernels, or for fp8 Triton's with 64 keys as the tall side."""
    pytest.importorskip("triton")
    from modeling.attention.triton import backend

    monkeypatch.setattr(backend, "device_sizes", lambda device: (SHARED[gpu], 132))
    monkeypatch.setattr(backend, "has_dependent_launch", lambda device: True)
    monkeypatch.setattr(backend, "has_warpgroups", lambda device: gpu == "H100")
    compiled = Compiled()
    launch = lambda own, *given: compiled(own, *given)  # noqa: E731
    monkeypatch.setattr(Launcher, "__call__", launch)

    class OnCpu(backend.TritonAttention):
        @classmethod
        def lacks(cls, spec: AttentionSpec) -> str | None:
            return None

    width, dtype = 576, cache_dtype or torch.bfloat16
    sizes = (heads, 1, width, 0.1, 16, torch.bfloat16, CPU)
    attention = OnCpu(AttentionSpec(*sizes, cache_dtype=cache_dtype, value_dim=512))
    cache = allocate(CacheSpec(1, 16, 1, width, dtype, keys_only=True), 4, CPU)[0]
    tables = torch.arange(4, dtype=torch.int32).view(1, -1)
    q, starts = torch.zeros(queries, heads, width, dtype=torch.bfloat16), torch.tensor([0, queries])
    step = attention.prepare([queries], [60], tables)
    attention.forward(q, cache, starts, tables, step)
    (text,) = compiled.texts
    assert gpu != "H100" or re.search(r"wgmma\.mma_async\.\S+m64n", text)
    (name,) = compiled.names
    in_gluon = {"latent_row_kernel", "latent_tile_kernel"}
    assert (name in in_gluon) == (gpu == "H100" and cache_dtype is None), name
    assert compiled.shared[0] <= SHARED[gpu], compiled.shared


@pytest.mark.parametrize("rows", [3, 2100])
def test_what_splits_leave_has_room(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each row has one program, which stores the results of its splits too."""
    pytest.importorskip("triton")
    from modeling.attention.triton import backend

    monkeypatch.setattr(backend, "device_sizes", lambda device: (SHARED["H100"], 132))
    monkeypatch.setattr(backend, "has_warpgroups", lambda device: True)
    given: list[tuple[object, ...]] = []
    launch = lambda own, key, grid, arguments, *rest: given.append(arguments)  # noqa: E731
    monkeypatch.setattr(Launcher, "__call__", launch)
    monkeypatch.setattr(backend.TritonAttention, "lacks", classmethod(lambda own, spec: None))
    spec = AttentionSpec(20, 1, 576, 0.1, 16, torch.bfloat16, CPU, value_dim=512)
    attention = backend.TritonAttention(spec)
    cache = allocate(CacheSpec(1, 16, 1, 576, torch.bfloat16, keys_only=True), 20, CPU)[0]
    tables = torch.arange(20, dtype=torch.int32).repeat(rows, 1)
    q, starts = torch.zeros(rows, 20, 576, dtype=torch.bfloat16), torch.arange(rows + 1)
    step = attention.prepare([1] * rows, [300] * rows, tables)
    attention.forward(q, cache, starts, tables, step)
    ((_, _, _, _, partials, sums, *_),) = given
    assert isinstance(partials, torch.Tensor)
    assert isinstance(sums, torch.Tensor)
    assert partials.shape == (rows, 20, 3, 512)
    assert sums.shape == (rows, 20, 3, 2)
