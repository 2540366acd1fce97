"""Layers that keep a state of each sequence in place of keys and values: recurrent ones.

transformers' own modules compute them (linear attention, state space models, short convolutions).
They are called as its `generate` calls them, with a cache that holds the states of some rows: once
for rows of one token each, once for every longer row. A batch slot has its states here, on the
device, from one step to the next; a row that begins at its first position has none yet. There is
one batch slot more, the dummy: rows that pad a captured step read and write its states. Behind it
are copies that are kept of some positions, from which other sequences go on.
"""

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from configs.architectures.base import ArchitectureError
from modeling.models.context import StateRows
from modeling.models.generic.mixer_functions import MixerForward, SlotStates, mixer_forward
from modeling.models.generic.step import CurrentStep
from modeling.models.generic.waits import host_waits

logger = logging.getLogger("loray.modeling")

_CACHES = ("cache", "cache_params", "past_key_values")
"""How mixers call their cache: the first since transformers 5.24."""

_UPDATES = frozenset({"set_linear_cache", "update_conv_state", "update_recurrent_state"})

KINDS = ("conv_states", "recurrent_states")
"""What a layer of transformers' cache has of states, each by a number."""


class _State(NamedTuple):
    """The states of one kind and number: of all batch slots, the dummy and kept ones, [n, ...]."""

    kind: str
    number: int
    of_slots: Tensor


class _Cache(Cache):
    """transformers' cache, with the names by which MiniMax's mixers read and write it."""

    def get_linear_cache(self, layer: int) -> Tensor | None:
        """Return the states of a layer, None for rows that begin."""
        state: Tensor | None = self._of(layer).recurrent_states[0]
        return state

    def set_linear_cache(self, layer: int, state: Tensor) -> None:
        """Replace them."""
        self._of(layer).recurrent_states[0] = state

    def _of(self, layer: int) -> Any:
        return self.layers[layer]


class RecurrentLayers:
    """The recurrent layers of one model, and the states of all batch slots."""

    def __init__(self, causal: nn.Module, step: CurrentStep, config: Any) -> None:
        """Take over the calls of all mixers. config: the decoder's."""
        self._step = step
        self._examples: dict[int, list[_State]] = {}
        self._states: dict[int, list[_State]] = {}
        self._batch_slots = 0
        self._decodes: list[tuple[str, Callable[[], Any]]] = []
        self._fresh: list[Any] = []
        self._forwards: dict[int, MixerForward] = {}
        for module in causal.modules():
            name = _cache_argument(module)
            if name is not None:
                names = list(inspect.signature(type(module).forward).parameters)[2:]
                # Of this module alone.
                module.forward = partial(self._compute, module, name, names)
                self._fresh = self._fresh or DynamicCache(config=config).layers

    @property
    def layers(self) -> frozenset[int]:
        """Their numbers in the model; known once they were computed."""
        return frozenset(self._examples)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence's states in all layers."""
        return sum(each.of_slots.nbytes for own in self._examples.values() for each in own)

    @torch.inference_mode()
    def can_be_captured(self) -> bool:
        """Whether steps of one token a row can be CUDA graphs.

        Each layer computes one token more behind the probe's: the host must not wait for it.
        """
        decodes, self._decodes = self._decodes, []
        for name, decode in decodes:
            if host_waits(decode):
                logger.info("transformers' %s cannot be captured: the host waits in it", name)
                return False
        return True

    def allocate(self, batch_slots: int, kept: int) -> None:
        """Take the memory of so many sequences' states, the dummy's, and so many kept ones."""
        self._batch_slots = batch_slots
        sizes = batch_slots, kept
        self._states = {
            layer: [each._replace(of_slots=_allocated(each.of_slots, *sizes)) for each in own]
            for layer, own in self._examples.items()
        }

    def go_on(self, batch_slot: int, kept: int) -> None:
        """Give a batch slot the states that were kept by a number."""
        number = self._batch_slots + 1 + kept
        for own in self._states.values():
            for each in own:
                each.of_slots[batch_slot].copy_(each.of_slots[number])

    def tensors(self) -> Iterator[Tensor]:
        """All states but the dummy's, each [batch slots, ...] or [kept, ...]."""
        slots = self._batch_slots
        for own in self._states.values():
            for each in own:
                yield each.of_slots[:slots]
                yield each.of_slots[slots + 1 :]

    def _compute(
        self,
        module: Any,
        name: str,
        names: Sequence[str],
        hidden_states: Tensor,
        *given: Any,
        **options: Any,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Replace a mixer's forward: [1, tokens, hidden] to [1, tokens, ...], or several of those.

        name: its cache's. names: those of what may be given by position. Some return None beside.
        """
        options |= zip(names, given, strict=False)
        layer: int = module.layer_idx
        if layer not in self._forwards:
            own = mixer_forward(module, hidden_states.device, hidden_states.dtype)
            self._forwards[layer] = own
        forward, by_slots, scan = self._forwards[layer]
        if "attention_mask" in options:
            options["attention_mask"] = None
        found = []
        for rows in self._step.state_rows:
            tokens = hidden_states[0, rows.tokens]
            part = tokens[:, None] if rows.single else tokens[None]
            cache = self._cache(layer, rows, by_slots and rows.single)
            if scan is not None:
                scan.state = cache.get_linear_cache(layer)
            with self._step.adapted_by(rows.adapter_data, len(tokens)):
                computed = forward(part, **{**options, name: cache})
            outputs = (computed,) if isinstance(computed, Tensor) else computed
            if layer not in self._examples:
                self._learn(layer, cache.layers[layer])
                decode = partial(forward, part[:, :1], **{**options, name: cache})
                self._decodes.append((type(module).__name__, decode))
            self._keep(layer, rows, cache.layers[layer])
            found.append(outputs)
        first, *others = (_joined(parts) for parts in zip(*found, strict=True))
        assert first is not None, "a mixer returns its tokens first"
        return first if isinstance(computed, Tensor) else (first, *others)

    def _cache(self, layer: int, rows: StateRows, by_slots: bool) -> _Cache:
        """The states of some rows as transformers' cache has them.

        by_slots: recurrent ones are those of all batch slots, which the mixer changes.
        """
        own = copy.copy(self._fresh[layer])
        # Not deeply: what a layer that attends has of its window would be copied on the device.
        vars(own).update({n: dict(each) for n, each in vars(own).items() if isinstance(each, dict)})
        own.update_recurrent_state = partial(_take, own)
        # The mixer looks at its own layer alone.
        cache = _Cache(layers=[*self._fresh[:layer], own])
        if rows.begins:
            return cache
        for kind, number, of_slots in self._states[layer]:
            if by_slots and kind == KINDS[1]:
                assert rows.slots is not None, "rows that go on have batch slots"
                getattr(own, kind)[number] = SlotStates(of_slots, rows.slots)
            else:
                getattr(own, kind)[number] = of_slots[rows.slots]
            getattr(own, f"is_{kind}_initialized")[number] = True
            own.has_previous_state[number] = True
            if kind == KINDS[0]:
                own.conv_kernel_size[number] = of_slots.shape[-1]
        return cache

    def _learn(self, layer: int, own: Any) -> None:
        """Write down what the states of a layer look like."""
        self._examples[layer] = [
            _State(kind, number, state[0].clone())
            for kind in KINDS
            for number, state in getattr(own, kind).items()
            if state is not None
        ]

    def _keep(self, layer: int, rows: StateRows, own: Any) -> None:
        """Write down the states behind the rows."""
        if rows.slots is None:
            return
        for kind, number, of_slots in self._states[layer]:
            state = getattr(own, kind)[number]
            # None: it was changed where it lies.
            if state is not None:
                of_slots[rows.slots] = state.to(of_slots.dtype)
            if rows.kept >= 0:
                kept = self._batch_slots + 1 + rows.kept
                of_slots[kept : kept + 1] = of_slots[rows.slots]


def _allocated(example: Tensor, batch_slots: int, kept: int) -> Tensor:
    # Left as it is: a row that begins reads none, and on a CPU unused memory takes no room.
    states = example.new_empty(batch_slots + 1 + kept, *example.shape)
    states[batch_slots].zero_()
    return states


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Bring what was computed of a step's rows, [rows, tokens of one, ...], to [1, tokens, ...]."""
    found = [part.flatten(0, 1) for part in parts if part is not None]
    if not found:
        return None
    return (torch.cat(found) if len(found) > 1 else found[0])[None]


def _take(own: Any, state: Tensor | None, number: int = 0, **_options: Any) -> Tensor | None:
    """Replace a cache's `update_recurrent_state`, which copies: `_keep` does."""
    own.recurrent_states[number] = state
    return state


def _cache_argument(module: nn.Module) -> str | None:
    """The name of a mixer's cache; None for modules that keep no state."""
    forward: Any = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None or not hasattr(module, "layer_idx") or _UPDATES.isdisjoint(code.co_names):
        return None
    names = inspect.signature(forward).parameters
    found = next((name for name in _CACHES if name in names), None)
    if found is None:
        raise ArchitectureError(
            f"transformers' {type(module).__name__} has no cache of states that this version of "
            "LoRay knows: install the version that it names"
        )
    return found
