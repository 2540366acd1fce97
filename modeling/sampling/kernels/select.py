"""Kernels that sample, where the device has them; torch's operations serve elsewhere."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from modeling.sampling.rows import Allowed, Penalties, RandomRows, Watermarks

logger = logging.getLogger("loray.modeling")


@dataclass(frozen=True)
class SamplingKernels:
    """What the kernels compute; the last three change float32 logits [n, vocab].

    best: logits [n, vocab] to int64 [n], each row's best token, the lowest id of equals.
    draw: (logits [n, vocab], random rows, tokens int64 [n]): writes the random rows' tokens.
    logprobs: see logprobs.logprobs.
    most_logprobs: alternatives that it reports at most.
    copied: logits [n, vocab] to float32.
    penalise, mark, allow: penalties, watermarks and masks, as `adjustments` defines them.
    """

    best: Callable[[Tensor], Tensor]
    draw: Callable[[Tensor, RandomRows, Tensor], None]
    logprobs: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
    most_logprobs: int
    copied: Callable[[Tensor], Tensor]
    penalise: Callable[[Tensor, Penalties], None]
    mark: Callable[[Tensor, Watermarks], None]
    allow: Callable[[Tensor, Allowed], None]


def sampling_kernels(device: torch.device) -> SamplingKernels | None:
    """Return the kernels of a CUDA device with Triton; None elsewhere."""
    return _triton_kernels() if device.type == "cuda" else None


@cache
def _triton_kernels() -> SamplingKernels | None:
    try:
        # Here, not above: Triton comes with CUDA builds of torch only.
        from modeling.sampling.kernels import (
            adjust,
            logprobs,
            sampler,
        )
    except ImportError as error:
        logger.warning("sampling is slow here: %s", error)
        return None
    return SamplingKernels(
        best=sampler.best,
        draw=sampler.draw,
        logprobs=logprobs.logprobs,
        most_logprobs=logprobs.MOST,
        copied=adjust.copied,
        penalise=adjust.penalise,
        mark=adjust.mark,
        allow=adjust.allow,
    )
