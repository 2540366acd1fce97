"""Reads what transformers' own modules keep of a checkpoint: norms, experts, routers, buffers."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from modeling.models.generic.cuts import CutPlan
from modeling.models.generic.expert_linears import read_dummies, read_linears
from modeling.models.generic.fp4_experts import is_stored, read_stored
from modeling.models.generic.names import SourceNames
from modeling.models.generic.stored_experts import StoredMatrices, keep_stored
from sharding.group import TensorParallel
from sharding.loader import Weights
from sharding.slicing import Segments, whole

SET_AGAIN = {"balancing_biases": -1.0}
"""Last numbers of buffers that transformers sets in what it has read, too (ZAYA): its code to make
new weights does not see that these are none."""


def read_rest(
    causal: PreTrainedModel,
    plan: CutPlan,
    weights: Weights,
    names: SourceNames,
    own: Mapping[str, range],
) -> None:
    """Read every parameter that is still transformers' own, and move its buffers.

    names: of the checkpoint's tensors. Experts are cut as the plan says, or those of `own` are read
    whole (by their module's path), and their outputs summed; what is kept for each head is cut like
    the heads; all else is whole on every rank.
    """
    reader = _Reader(causal, plan, weights, names, own)
    for path, module in _unread(causal):
        reader.parameters(path, module)
        reader.buffers(path, module)


class _Reader:
    """Reads the tensors of single modules."""

    def __init__(
        self,
        causal: PreTrainedModel,
        plan: CutPlan,
        weights: Weights,
        names: SourceNames,
        own: Mapping[str, range],
    ) -> None:
        self._plan = plan
        self._own = own
        self._weights = weights
        self._names = names
        self._may_turn = causal.config.model_type == "qwen3_moe"
        kept: Any = getattr(causal, "_keep_in_fp32_modules_strict", None) or ()
        self._wide = re.compile("|".join(kept) or r"(?!)")

    def parameters(self, path: str, module: nn.Module) -> None:
        """Read a module's own parameters."""
        own = self._own.get(path)
        is_cut = own is not None
        for name, parameter in list(module.named_parameters(recurse=False)):
            full, shape = f"{path}.{name}", tuple(parameter.shape)
            if is_stored(self._weights, full):
                rows = None if own is None else ((own.start, own.stop),)
                keep_stored(module, name, read_stored(self._weights, full, shape, rows))
                continue
            linears = self._linears(module, full, shape, own)
            if linears is not None:
                keep_stored(module, name, linears)
                is_cut |= self._plan.experts(full, shape) is not None
                continue
            if own is not None and shape[:1] == (getattr(module, "num_experts", None),):
                tensor = self._read_own(full, shape, own)
            else:
                cut = self._plan.experts(full, shape) if len(shape) == 3 else None
                is_cut |= cut is not None
                tensor = self._read(full, shape, cut)
            setattr(module, name, nn.Parameter(tensor, requires_grad=False))
        if is_cut:
            module.register_forward_hook(partial(_summed, self._weights.group))

    def _linears(
        self, module: nn.Module, name: str, shape: tuple[int, ...], own: range | None
    ) -> StoredMatrices | None:
        """Read matrices of experts that are quantised as linear maps are; None for others."""
        if len(shape) != 3:
            return None
        cut = None if own is not None else self._plan.experts(name, shape)
        stacked = self._names.stacked(name)
        if stacked is None:
            is_made = getattr(module, "is_transposed", None) is False
            return read_dummies(self._weights, name, shape, cut, own) if is_made else None
        rows, columns = cut or (whole(shape[1]), whole(shape[2]))
        return read_linears(self._weights, stacked, shape, rows, columns, own)

    def buffers(self, path: str, module: nn.Module) -> None:
        """Read the buffers that checkpoints hold, and move all."""
        weights = self._weights
        for name, buffer in list(module.named_buffers(recurse=False)):
            full, kept = f"{path}.{name}", name not in module._non_persistent_buffers_set
            if kept and weights.has(full):
                buffer = weights.read(full, tuple(buffer.shape), dtype=buffer.dtype)
            if name in SET_AGAIN:
                buffer[-1] = SET_AGAIN[name]
            setattr(module, name, buffer.to(weights.device))

    def _read_own(self, name: str, shape: tuple[int, ...], own: range) -> Tensor:
        """Read this rank's experts of a tensor of all, of any number of dimensions."""
        stacked = self._names.stacked(name)
        if stacked is not None:
            _, rows, columns = shape
            return stacked.read(self._weights, shape, whole(rows), whole(columns), own)
        return self._matrices(name, shape, ((own.start, own.stop),))

    def _matrices(
        self, name: str, shape: tuple[int, ...], experts: Segments | None = None
    ) -> Tensor:
        """A tensor of all experts; Qwen3-VL-MoE's files may have their matrices transposed."""
        dtype = torch.float32 if self._wide.search(name) else None
        turned = (shape[0], *reversed(shape[1:]))
        may_turn = self._may_turn and len(shape) == 3 and self._weights.lists(name)
        if may_turn and self._weights.stored_shape(name) == turned != shape:
            found = self._weights.read(name, turned, experts, dtype=dtype)
            return found.transpose(1, 2).contiguous()
        return self._weights.read(name, shape, experts, dtype=dtype)

    def _read(
        self, name: str, shape: tuple[int, ...], cut: tuple[Segments, Segments] | None
    ) -> Tensor:
        dtype = torch.float32 if self._wide.search(name) else None
        if parts := self._names.joined(name):
            read, shape_of = self._weights.read, self._weights.stored_shape
            return torch.cat([read(part, shape_of(part), dtype=dtype) for part in parts])
        if len(shape) == 3:
            rows, columns = cut or (whole(shape[1]), whole(shape[2]))
            stacked = self._names.stacked(name)
            if stacked is not None:
                return stacked.read(self._weights, shape, rows, columns)
            found = self._matrices(name, shape)
            return _part(_part(found, 1, rows), 2, columns).contiguous()
        own = self._plan.rows(name, shape) if shape else None
        return self._weights.read(name, shape, rows=own, dtype=dtype)


def _unread(causal: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are not ours."""
    for path, module in causal.named_modules():
        if type(module).__module__.startswith(("transformers.", "torch.")):
            yield path, module


def _part(tensor: Tensor, dim: int, segments: Segments) -> Tensor:
    pieces = [tensor.narrow(dim, start, stop - start) for start, stop in segments]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _summed(group: TensorParallel, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """Sum the ranks' parts of an experts module's output."""
    return group.all_reduce(output)
