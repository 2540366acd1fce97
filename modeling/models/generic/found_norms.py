"""Which of transformers' modules are norms that adapters may bring."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from modeling.adapters.norms import NormModule, is_norm
from modeling.models.generic.cuts import CutPlan
from modeling.models.generic.norms import FusedRMSNorm
from modeling.models.generic.step import CurrentStep

Shapes = dict[str, tuple[int, ...]]


@contextmanager
def input_shapes(causal: nn.Module, step: CurrentStep, shapes: Shapes) -> Iterator[None]:
    """Write down the shapes of norms' inputs meanwhile, by the norms' paths.

    Not those in recurrent layers, which compute some of a step's tokens at a time.
    """
    with ExitStack() as stack:
        for path, module in causal.named_modules():
            if is_norm(module):
                handle = module.register_forward_pre_hook(partial(_note, path, step, shapes))
                stack.callback(handle.remove)
            if isinstance(module, FusedRMSNorm):
                stack.enter_context(module.alone())
        yield


def find_norms(
    causal: nn.Module, plan: CutPlan, shapes: Mapping[str, tuple[int, ...]], num_tokens: int
) -> list[NormModule]:
    """Return the norms; shapes: of their inputs in a step of so many tokens.

    Left out: those that no forward called, and those with an input of which several dimensions,
    or none, could be the tokens.
    """
    found = []
    for path, module in causal.named_modules():
        code = module.code if isinstance(module, FusedRMSNorm) else module
        if not is_norm(code) or not plan.covers(path):
            continue
        counting = [at for at, n in enumerate(shapes.get(path, ())[:-1]) if n == num_tokens]
        if len(counting) == 1:
            found.append(NormModule(path, module, code, counting[0]))
    return found


def _note(
    path: str, step: CurrentStep, shapes: Shapes, _module: nn.Module, inputs: tuple[Any, ...]
) -> None:
    if step.part_tokens == 0 and len(inputs) == 1 and isinstance(inputs[0], Tensor):
        shapes[path] = tuple(inputs[0].shape)
