"""Which backend is chosen, what is said about it, and what cannot be had."""

import pytest
import torch

from configs.engine import AttentionKind
from modeling.attention import select
from modeling.attention.base import AttentionBackend, AttentionSpec
from modeling.attention.sdpa import SdpaAttention
from modeling.attention.select import select_attention

SPEC = AttentionSpec(4, 2, 8, 1.0, 16, torch.float32, torch.device("cpu"))
ON_CUDA = AttentionSpec(4, 2, 8, 1.0, 16, torch.float32, torch.device("cuda"))


class Choosy(SdpaAttention):
    name = "choosy"

    @classmethod
    def lacks(cls, spec: AttentionSpec) -> str | None:
        return f"head_dim {spec.head_dim} is not 128"


def not_installed() -> type[AttentionBackend]:
    raise ImportError("No module named 'flash_attn'")


@pytest.mark.parametrize("name", [AttentionKind.AUTO, AttentionKind.SDPA])
def test_sdpa_serves_anything(name: AttentionKind) -> None:
    choice = select_attention(name, SPEC)
    assert isinstance(choice.backend, SdpaAttention)
    assert choice.reason.startswith("sdpa: ")


@pytest.mark.parametrize(
    ("name", "package"),
    [
        (AttentionKind.FLASH_ATTN, "flash-attn"),
        (AttentionKind.FLASHINFER, "flashinfer-python"),
        (AttentionKind.TRITON, "triton"),
    ],
)
def test_what_is_not_installed_says_how_to_get_it(
    name: AttentionKind, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "BACKENDS", {**select.BACKENDS, name: not_installed})
    with pytest.raises(ValueError, match=f"{name.value!r} is not installed.*pip install {package}"):
        select_attention(name, SPEC)


def test_a_cpu_passes_over_those_that_need_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        **select.BACKENDS,
        AttentionKind.FLASHINFER: not_installed,
        AttentionKind.FLASH_ATTN: not_installed,
        AttentionKind.TRITON: not_installed,
    }
    monkeypatch.setattr(select, "BACKENDS", table)
    assert select_attention(AttentionKind.AUTO, SPEC).reason == "sdpa: the best available"


def test_auto_says_whom_it_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        AttentionKind.FLASHINFER: lambda: Choosy,
        AttentionKind.FLASH_ATTN: not_installed,
        AttentionKind.SDPA: select.BACKENDS[AttentionKind.SDPA],
    }
    monkeypatch.setattr(select, "BACKENDS", table)
    reason = select_attention(AttentionKind.AUTO, ON_CUDA).reason
    assert "'flash_attn' is not installed" in reason
    assert "flashinfer: head_dim 8 is not 128" in reason
    with pytest.raises(ValueError, match="'choosy': head_dim 8 is not 128"):
        select_attention(AttentionKind.FLASHINFER, SPEC)


def test_when_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "BACKENDS", {AttentionKind.FLASH_ATTN: not_installed})
    with pytest.raises(ValueError, match=r"no attention backend fits: .*not installed"):
        select_attention(AttentionKind.AUTO, ON_CUDA)


def test_a_name_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        select, "BACKENDS", {AttentionKind.SDPA: select.BACKENDS[AttentionKind.SDPA]}
    )
    with pytest.raises(ValueError, match=r"'flashinfer' is not available in this build.*sdpa"):
        select_attention(AttentionKind.FLASHINFER, SPEC)
