"""What is rotated of latents' keys and queries, and stored: by torch, and by the kernel."""

import os

import pytest
import torch
from torch import Tensor

from modeling.attention.kv_cache import CacheSpec, LayerCache, allocate
from modeling.layers.angles import Angles
from modeling.layers.attention import rotate_and_store
from modeling.layers.rotary import rotate
from tests.modeling.attention.triton.test_interpreted import Interpreted

SIZES = {"DeepSeek's": (20, 512, 64), "odd": (3, 24, 6)}


def cached(
    sizes: tuple[int, int, int], neighbours: bool, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Tensor, Tensor], Angles, LayerCache, Tensor]:
    """q and k, angles, an empty cache and slots of 5 tokens."""
    heads, latent, rotated = sizes
    width, tokens = latent + rotated, 5
    q, k = (torch.randn(tokens, n, width, device=device).to(dtype) for n in (heads, 1))
    turned = torch.rand(tokens, 1, rotated // 2, device=device) * 6
    cos, sin = turned.cos(), turned.sin()
    angles = Angles(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), neighbours)
    cache = allocate(CacheSpec(1, 4, 1, width, dtype, keys_only=True), 3, device)[0]
    return (q, k), angles, cache, torch.tensor([7, 2, 11, 0, 5], device=device)


def check(
    sizes: tuple[int, int, int], neighbours: bool, dtype: torch.dtype, device: torch.device
) -> None:
    (q, k), angles, cache, slots = cached(sizes, neighbours, dtype, device)
    first = sizes[1]
    wanted = [part.float().clone() for part in (q, k)]
    for part in wanted:
        part[..., first:] = rotate(part[..., first:].clone(), *angles)
    found = rotate_and_store((q, k, k), angles, cache, slots, None)
    close = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(found.float(), wanted[0], rtol=close, atol=close)
    torch.testing.assert_close(cache.flat_keys[slots].float(), wanted[1], rtol=close, atol=close)
    others = torch.ones(len(cache.flat_keys), dtype=torch.bool, device=device)
    others[slots] = False
    assert not cache.flat_keys[others].any()


@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_by_torch(sizes: tuple[int, int, int], neighbours: bool) -> None:
    check(sizes, neighbours, torch.float32, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_by_the_kernel(sizes: tuple[int, int, int], neighbours: bool, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    check(sizes, neighbours, dtype, torch.device("cuda"))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_interpreted(
    sizes: tuple[int, int, int], neighbours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from modeling.layers.kernels import latents

    monkeypatch.setattr(latents, "_LAUNCH", Interpreted(latents._LAUNCH._kernel))
    (q, k), angles, cache, slots = cached(sizes, neighbours, torch.float32, torch.device("cpu"))
    own = q.clone(), k.clone()
    wanted = rotate_and_store((*own, own[1]), angles, cache, slots, None)
    expected = cache.flat_keys.clone()
    cache.flat_keys.zero_()
    latents.store_latents(q, k, angles, cache, slots)
    torch.testing.assert_close(q, wanted)
    torch.testing.assert_close(cache.flat_keys, expected)
