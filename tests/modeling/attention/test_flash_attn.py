"""flash-attn against SDPA, on a GPU that has the package."""

import pytest
import torch

from modeling.attention.base import AttentionBackend, AttentionSpec
from modeling.attention.sdpa import SdpaAttention
from tests.modeling.attention.test_flashinfer import STEPS, Paged, check, make_spec

pytestmark = pytest.mark.gpu


def make_backend(spec: AttentionSpec) -> AttentionBackend:
    pytest.importorskip("flash_attn")
    from modeling.attention.flash_attn import FlashAttention

    return FlashAttention(spec)


@pytest.mark.parametrize("lengths", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("window", [None, 64])
def test_equals_sdpa(lengths: list[tuple[int, int]], window: int | None) -> None:
    spec = make_spec(256, windows=(window,))
    paged = Paged(spec, lengths)
    check(paged.run(make_backend(spec), window), paged.run(SdpaAttention(spec), window))


@pytest.mark.parametrize("head_dim", [80, 96, 256])
def test_head_sizes(head_dim: int) -> None:
    spec = make_spec(256, head_dim=head_dim)
    paged = Paged(spec, STEPS["mixed"])
    check(paged.run(make_backend(spec)), paged.run(SdpaAttention(spec)))


def test_small_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size 16 is not a multiple of 256"):
        make_backend(make_spec(16))


def test_an_fp8_cache_is_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match="no kernels for an fp8 cache: take flashinfer, or set"):
        make_backend(make_spec(256, cache_dtype=torch.float8_e4m3fn))
