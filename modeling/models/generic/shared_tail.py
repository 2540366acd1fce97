"""The end of a model in which all layers attend to keys and values that others have stored.

Gemma 3n and 4 end so (`num_kv_shared_layers`). Of a prompt's tokens those layers are needed for the
last one alone: transformers' own `generate` leaves the others out too. Its decoders run all of
their layers, so layers that are not to be computed return what enters them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from modeling.models.base import AttentionLayer
from modeling.models.generic.layer_calls import Call, LayerCall

TYPES = frozenset(("gemma3n_text", "gemma4_text", "gemma4_unified_text"))
"""Types of which layers take and return the stream [..., tokens, hidden], and compute all else that
they read of a token from the token alone."""


def first_shared(forms: Mapping[Call, LayerCall], num_layers: int) -> int:
    """The first of the layers at the end that all read what others have stored; else num_layers."""
    first = num_layers
    while first and (first - 1, 0) in forms and forms[first - 1, 0].form.source is not None:
        first -= 1
    return first


class SharedTail:
    """Layers of which a part is computed; all are, but within `before` and `behind`."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int,
        forms: Mapping[Call, LayerCall],
    ) -> None:
        """first: of the tail's."""
        self._first, self._end = first, len(layers)
        self._computed = range(self._end)
        self._stream: Tensor | None = None
        for index, layer in enumerate(layers):
            call = partial(self._call, index, layer.forward, forms[index, 0].form)
            setattr(layer, "forward", call)  # noqa: B010 - modules are not ours

    @contextmanager
    def before(self) -> Iterator[None]:
        """Compute the layers before the tail meanwhile; `left` is what enters it."""
        self._computed = range(self._first)
        try:
            yield
        finally:
            self._computed, self._stream = range(self._end), None

    def left(self) -> Tensor:
        """The stream that enters the tail, [tokens, ...]."""
        assert self._stream is not None, "the layers before the tail have not run"
        return self._stream.movedim(-2, 0)

    @contextmanager
    def behind(self, left: Tensor) -> Iterator[None]:
        """Compute the tail's layers meanwhile, from what `left` was of these tokens."""
        self._computed, self._stream = range(self._first, self._end), left.movedim(0, -2)
        try:
            yield
        finally:
            self._computed, self._stream = range(self._end), None

    def _call(
        self,
        index: int,
        forward: Any,
        form: AttentionLayer,
        hidden: Tensor,
        *rest: Any,
        **more: Any,
    ) -> Tensor:
        if index == self._first and index in self._computed and self._stream is not None:
            hidden = self._stream
        if index in self._computed:
            if self._computed.start:
                # The layers that would have left their keys and values were not computed.
                shape = (1, form.num_kv_heads, 1, form.head_dim)
                more["shared_kv_states"] = _Unread(hidden.new_zeros(shape))
            found: Tensor = forward(hidden, *rest, **more)
            return found
        if index == self._first:
            self._stream = hidden
        return hidden


class _Unread:
    """Keys and values that a layer takes and attention does not read, under every name."""

    def __init__(self, part: Tensor) -> None:
        self._part = part

    def __getitem__(self, _name: object) -> tuple[Tensor, Tensor]:
        return self._part, self._part
