"""Import what a rank's start needs, before it is known when the start comes."""

from contextlib import suppress

import torch

from configs.engine import AttentionKind
from modeling.adapters.kernels.select import select_kernel
from modeling.attention.select import BACKENDS, PACKAGES
from modeling.layers.fused import fused_ops
from sharding.symmetric import prepare_mapping


def preload(
    attention: AttentionKind, device: torch.device, maps: bool, context: bool = True
) -> None:
    """Import kernels and libraries, and make the device's context.

    attention: AUTO imports the backends that are installed, as which one fits is not known yet.
    maps: whether ranks may sum through symmetric memory. context: False leaves the device alone.
    """
    if device.type == "cpu":
        return
    if context:
        _make_context(device)
        if maps:
            prepare_mapping(device)
    select_kernel(device)
    fused_ops(device)
    wanted = [*BACKENDS] if attention is AttentionKind.AUTO else [attention]
    for name in wanted:
        if name in PACKAGES:
            with suppress(ImportError):
                BACKENDS[name]()


def _make_context(device: torch.device) -> None:
    # The first product makes cuBLAS's handle too.
    one = torch.ones(16, 16, device=device)
    torch.mm(one, one)
    del one
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
