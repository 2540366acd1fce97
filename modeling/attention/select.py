"""Selects an attention backend."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from configs.engine import AttentionKind
from modeling.attention.base import AttentionBackend, AttentionSpec
from modeling.attention.sparse import SparseAttention


def _flashinfer() -> type[AttentionBackend]:
    from modeling.attention.flashinfer import FlashInferAttention

    return FlashInferAttention


def _flash_attn() -> type[AttentionBackend]:
    from modeling.attention.flash_attn import FlashAttention

    return FlashAttention


def _triton() -> type[AttentionBackend]:
    from modeling.attention.triton.backend import TritonAttention

    return TritonAttention


def _sdpa() -> type[AttentionBackend]:
    from modeling.attention.sdpa import SdpaAttention

    return SdpaAttention


BACKENDS: dict[AttentionKind, Callable[[], type[AttentionBackend]]] = {
    AttentionKind.FLASHINFER: _flashinfer,
    AttentionKind.FLASH_ATTN: _flash_attn,
    AttentionKind.TRITON: _triton,
    AttentionKind.SDPA: _sdpa,
}
"""Backends by name, best first, each imported on demand; ImportError means not installed."""

_COMPILED_DIM = 128
"""FlashInfer's kernels of wider heads, and those that cap scores, are compiled for minutes at a
first start. Ours take seconds, and a decode step of 64 rows of Gemma 2 9B is 9.5 ms with them and
10.8 with FlashInfer (H200), so they go first there."""

PACKAGES = {
    AttentionKind.FLASHINFER: "flashinfer-python",
    AttentionKind.FLASH_ATTN: "flash-attn",
    AttentionKind.TRITON: "triton",
}
"""What to install for those backends that need more than torch; all compute on CUDA only."""


@dataclass(frozen=True)
class AttentionChoice:
    """The selected backend, and its name and reason for logs."""

    backend: AttentionBackend
    reason: str


def select_attention(wanted: AttentionKind, spec: AttentionSpec) -> AttentionChoice:
    """Build the wanted backend, or for AUTO the best that imports and fits.

    ValueError if the wanted one is not available or lacks something that the model needs.
    """
    if spec.index_topk is not None:
        dense = select_attention(wanted, replace(spec, index_topk=None))
        return AttentionChoice(SparseAttention(spec, dense.backend), dense.reason)
    if wanted is not AttentionKind.AUTO:
        return AttentionChoice(_load(wanted)(spec), f"{wanted}: requested")
    passed_over: list[str] = []
    for name in _order(spec):
        if name in PACKAGES and spec.device.type == "cpu":
            continue
        try:
            backend = _load(name)
        except ValueError as error:
            passed_over.append(str(error))
            continue
        lack = backend.lacks(spec)
        if lack is None:
            why = "; ".join(passed_over) or "the best available"
            return AttentionChoice(backend(spec), f"{name}: {why}")
        passed_over.append(f"{name}: {lack}")
    raise ValueError("no attention backend fits: " + "; ".join(passed_over))


def select_checking(backend: AttentionBackend) -> AttentionBackend | None:
    """Return the attention of captured steps in which rows have several tokens; None: no such.

    backend: that of other steps, which comes first. All read the same cache.
    """
    if backend.graph_words(1, 1, 2) is not None:
        return backend
    try:
        own = _load(AttentionKind.TRITON)
    except ValueError:
        return None
    return None if own.lacks(backend.spec) else own(backend.spec)


def _order(spec: AttentionSpec) -> list[AttentionKind]:
    """The backends, best first for this model."""
    if spec.softcap is None and spec.head_dim <= _COMPILED_DIM:
        return list(BACKENDS)
    first = AttentionKind.TRITON
    return [first, *(name for name in BACKENDS if name is not first)]


def _load(name: AttentionKind) -> type[AttentionBackend]:
    """Import a backend; ValueError if this build or this machine has none of that name."""
    if name not in BACKENDS:
        raise ValueError(
            f"attention backend {name.value!r} is not available in this build; "
            f"available: {', '.join(BACKENDS)}"
        )
    try:
        return BACKENDS[name]()
    except ImportError as error:
        package = PACKAGES.get(name)
        how = f"; pip install {package}" if package else ""
        raise ValueError(
            f"attention backend {name.value!r} is not installed: {error}{how}"
        ) from error
