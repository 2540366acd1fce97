"""Adapters on a model that knows nothing of them: which of its modules take one, and how.

A linear module takes part when a probe prefill and a probe decode showed that each calls it once,
in the model's own type, with tokens of every row in order: the step's new ones, or all that the
row's cache holds (what expands compressed keys and values). What is called otherwise (experts
that see some tokens, routers in float32, shared modules) is no projection, and adapters on it are
refused; so is whatever has two numbers in its path, for an expert may see all tokens of a probe
by chance. Each later call is held to the number of tokens that the probe showed.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from modeling.adapters.product import AdapterData, OutputSlice
from modeling.adapters.projection import BaseRows, Projection

logger = logging.getLogger("loray.modeling.causal_lm")

NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
"""A part of a path that counts: the layer's number, or an expert's."""


@dataclass(frozen=True)
class ModuleCall:
    """How a module was called: its input's leading dimensions, and both types."""

    leading: tuple[int, ...]
    input_dtype: torch.dtype
    output_dtype: torch.dtype


@dataclass(frozen=True)
class ProbeSize:
    """What a probe computed: a forward of [rows, length], and if it `decodes`, one more token in
    each row."""

    rows: int
    length: int
    dtype: torch.dtype
    decodes: bool = True


@dataclass(frozen=True)
class LinearModule:
    """A linear module inside a layer: its path, the layer, and nn.Linear's view of its sizes.

    reads_cache: whether each call sees all tokens of the cache, not the step's new ones alone.
    """

    path: str
    layer: int
    in_features: int
    out_features: int
    module: nn.Module
    reads_cache: bool = False

    @property
    def template(self) -> str:
        """The path with the layer left open."""
        return NUMBER.sub("{layer}", self.path)


class ModuleCalls:
    """What probe forwards show of a model's linear modules."""

    def __init__(self, model: nn.Module) -> None:
        """Look at every nn.Linear and Conv1D with exactly one number in its path."""
        found = (_linear_module(path, module) for path, module in model.named_modules())
        self.linears = [linear for linear in found if linear is not None]
        self._seen: dict[str, list[ModuleCall]] = defaultdict(list)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note how each module is called meanwhile."""
        hooks = [
            linear.module.register_forward_hook(self._record(linear.path))
            for linear in self.linears
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def adaptable(self, probe: ProbeSize) -> list[LinearModule]:
        """Return the modules that saw all tokens that they should, once in each forward.

        The forwards watched were the probe's prefill and its decode, if any, in this order.
        """
        kept = [
            replace(linear, reads_cache=reads_cache)
            for linear in self.linears
            for reads_cache in ((False, True) if probe.decodes else (False,))
            if _as_expected(self._seen[linear.path], probe, reads_cache)
        ]
        left_out = sorted({s.template for s in self.linears} - {s.template for s in kept})
        if left_out:
            logger.info("modules that take no adapters: %s", ", ".join(left_out))
        return kept

    def _record(self, path: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            # An input by keyword would not reach the hook that adds deltas.
            if inputs and isinstance(output, Tensor):
                x = inputs[0]
                call = ModuleCall(tuple(x.shape[:-1]), x.dtype, output.dtype)
            else:
                call = ModuleCall((), torch.bool, torch.bool)
            self._seen[path].append(call)

        return hook


def _as_expected(calls: Sequence[ModuleCall], probe: ProbeSize, reads_cache: bool) -> bool:
    """Whether a module was called once in each forward of the probe, with all tokens."""
    decode = (probe.length + 1 if reads_cache else 1,) if probe.decodes else ()
    lengths = (probe.length, *decode)
    return len(calls) == len(lengths) and all(
        (call.input_dtype, call.output_dtype) == (probe.dtype, probe.dtype)
        and _in_order(call.leading, probe.rows, length)
        for call, length in zip(calls, lengths, strict=True)
    )


def _in_order(leading: tuple[int, ...], rows: int, length: int) -> bool:
    """Whether a tensor's leading dimensions are rows of `length` tokens, flat or not."""
    long = [size for size in leading if size != 1]
    return long in ([size for size in (rows, length) if size != 1], [rows * length])


def _linear_module(path: str, module: nn.Module) -> LinearModule | None:
    numbers = NUMBER.findall(path)
    if len(numbers) != 1:
        return None
    if isinstance(module, nn.Linear):
        sizes = (module.in_features, module.out_features)
    elif isinstance(module, Conv1D):
        sizes = (int(module.nx), int(module.nf))  # Its weight lies as [in, out].
    else:
        return None
    return LinearModule(path, int(numbers[0]), *sizes, module)


@dataclass(frozen=True)
class HookPosition:
    """Where a module's delta comes from: index of the projection, and its layer there."""

    linear: LinearModule
    projection: int
    layer: int


def hook_positions(
    linears: Sequence[LinearModule],
) -> tuple[tuple[Projection, ...], list[HookPosition]]:
    """Make a projection of each kind of module, over all layers.

    Kinds that some layers lack, or have in another size, make one projection for each module.
    """
    kinds: dict[str, list[LinearModule]] = defaultdict(list)
    for linear in linears:
        kinds[linear.template].append(linear)
    groups: dict[str, list[LinearModule]] = {}
    for template, members in kinds.items():
        sizes = {(linear.in_features, linear.out_features) for linear in members}
        whole = [linear.layer for linear in members] == list(range(len(members)))
        if whole and len(sizes) == 1:
            groups[template] = members
        else:
            groups.update({linear.path: [linear] for linear in members})
    names = shortest_names(list(groups))
    projections = tuple(_projection(names[key], key, group) for key, group in groups.items())
    positions = [
        HookPosition(linear, index, layer)
        for index, group in enumerate(groups.values())
        for layer, linear in enumerate(group)
    ]
    return projections, positions


def _projection(name: str, module: str, group: Sequence[LinearModule]) -> Projection:
    inputs, outputs = group[0].in_features, group[0].out_features
    return Projection(
        name=name,
        module=module,
        in_features=inputs,
        out_features=outputs,
        inputs=((0, inputs),),
        outputs=((0, outputs),),
        num_layers=len(group),
        can_adapt_ends=False,
        stored_transposed=isinstance(group[0].module, Conv1D),
    )


def shortest_names(paths: Sequence[str]) -> Mapping[str, str]:
    """Return each path's end, as long as it takes to be unique among them."""
    ends = {path: path.split(".") for path in paths}

    def name(path: str) -> str:
        parts = ends[path]
        for length in range(1, len(parts)):
            end = parts[-length:]
            if sum(other[-length:] == end for other in ends.values()) == 1:
                return ".".join(end)
        return path

    return {path: name(path) for path in paths}


def base_tensors(model: PreTrainedModel) -> dict[str, BaseRows]:
    """What belongs to a model's embedding and head, by path; without what is quantised."""
    untyped: Any = model
    ends = (untyped.get_input_embeddings(), untyped.get_output_embeddings())
    paths = {id(module): path for path, module in model.named_modules()}
    return {
        f"{paths[id(end)]}.{name}": BaseRows(tensor.detach(), 0, tuple(tensor.shape))
        for end in ends
        if id(end) in paths
        for name, tensor in end.named_parameters()
        if tensor.dtype.is_floating_point
    }


RowAdapters = Callable[[int], AdapterData]
"""The adapters of a batch's rows: from a number of tokens in each row to what acts on them all,
row by row in order."""


@dataclass(frozen=True)
class Reach:
    """What one forward computes: `new` tokens in each of its rows, `seen` with those cached."""

    rows: int
    new: int
    seen: int


class AdapterHooks:
    """Adds a forward's deltas to what the hooked modules return."""

    def __init__(self, positions: Sequence[HookPosition], device: torch.device) -> None:
        """Hook the modules; `device` is where adapters lie."""
        self._over: Callable[[int], AdapterData] | None = None
        self._reach = Reach(0, 0, 0)
        self._device = device
        for each in positions:
            each.linear.module.register_forward_hook(self._hook(each))

    @contextmanager
    def using(self, adapters: RowAdapters | None, reach: Reach) -> Iterator[None]:
        """Apply `adapters` to the forward meanwhile; None is the base model."""
        self._over = None if adapters is None else cache(adapters)
        self._reach = reach
        try:
            yield
        finally:
            self._over = None

    def _data(self, linear: LinearModule, num_tokens: int) -> AdapterData | None:
        """What to add to a module's output; RuntimeError when it sees other tokens than before."""
        if self._over is None:
            return None
        reach = self._reach
        length = reach.seen if linear.reads_cache else reach.new
        if num_tokens != reach.rows * length:
            raise RuntimeError(
                f"{linear.path} was called with {num_tokens} tokens and not with {length} in each "
                f"of {reach.rows} rows, as the probe at start showed it: an adapter there would "
                "change other tokens than its own"
            )
        return self._over(length)

    def _hook(self, at: HookPosition) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Any]:
        layer, targets = at.layer, (OutputSlice(at.projection, 0),)

        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            data = self._data(at.linear, output.shape[:-1].numel())
            if data is None:
                return None
            # A model that is spread over several GPUs has inputs and layers on others.
            x = inputs[0].flatten(0, -2).to(self._device)
            y = output.flatten(0, -2)
            if y.device == self._device:
                data.add(y, x, layer, targets)
                return y.view(output.shape)
            delta = torch.zeros(y.shape, dtype=y.dtype, device=self._device)
            data.add(delta, x, layer, targets)
            return output + delta.to(y.device).view(output.shape)

        return hook
