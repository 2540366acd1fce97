"""CausalLM: any AutoModelForCausalLM, in transformers' own code, over padded batches.

The way for architectures without a paged implementation. Adapters join each linear module's
output as everywhere else; what a model does with its cache, its positions and its padding is
proved by a probe at start, because nothing else says it.
"""

import inspect
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from configs.wire.plan import RequestJoin
from configs.wire.sampling import Sampling
from modeling.adapters.projection import BaseRows, Projection
from modeling.models.cache_name import cache_name
from modeling.models.padded.adapters import (
    AdapterHooks,
    LinearModule,
    ModuleCalls,
    ProbeSize,
    Reach,
    RowAdapters,
    base_tensors,
    hook_positions,
)
from modeling.models.padded.batch import CausalLMBatch
from modeling.models.padded.cache import Past, cache_bytes, keys_head_dim_last
from modeling.models.padded.sharing import Sharing, sharing_of
from modeling.sampling.sampler import SampledStep, sample_tokens
from modeling.sampling.tensors import sampling_tensors

__all__ = ["CausalLM", "CausalLMBatch"]

logger = logging.getLogger("loray.modeling.causal_lm")

PROBE = ([5, 3, 7, 1, 4, 6, 2], [6, 1, 3])
"""Tokens of two rows of unequal length; 7 is the width of no model's heads."""

EQUAL_PROBE = (PROBE[0], [2, 2, 6, 1, 3, 5, 1])
"""And of two rows of one length."""

STRICT = {True: 0.05, False: 1.0}
"""How much of the bound on rounding padding may use up, by whether the model is in float32."""


class CausalLM:
    """A transformers model with adapters, and what its probe showed.

    projections: the linear maps that adapters may change; linears: their modules.
    bytes_per_token: of the cache. keys_head_dim_last: see padded/cache.py.
    sharing: which rows may lie in one forward.
    exact: False where the weights' quantisation makes rows depend on their batch, so that the
    probe cannot judge padding.
    """

    def __init__(
        self, model: PreTrainedModel, pad_token_id: int, device: torch.device, exact: bool = True
    ) -> None:
        """Try the model out; ValueError when not even rows of one length can share its batches.

        device: where its inputs, its logits and all adapters lie.
        """
        self.model = model
        self.pad_token_id = pad_token_id
        self.device = device
        self.dtype = model.dtype
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_name = cache_name(model.forward)
        self._takes_num_logits = "logits_to_keep" in parameters
        # Code from elsewhere may know tuples only: it makes its own first cache.
        self._takes_cache = type(model).__module__.startswith("transformers.")
        self._hooks = AdapterHooks([], device)
        self.keys_head_dim_last = True
        # What code from elsewhere does with longer rows is unknown.
        self.sharing = sharing_of(model) if self._takes_cache else Sharing(equal_from=0)
        with _failures_named():
            found = self._try_all(exact)
        self.keys_head_dim_last = found.keys_head_dim_last
        self.bytes_per_token = found.bytes_per_token
        self.linears = found.linears
        self.projections: tuple[Projection, ...]
        self.projections, hooked = hook_positions(self.linears)
        self._hooks = AdapterHooks(hooked, device)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: Past | None = None,
        adapter_data: RowAdapters | None = None,
        last_only: bool = False,
    ) -> tuple[Tensor, Past]:
        """(logits [rows, length, vocab], the cache with these tokens in it).

        input_ids, position_ids: int64 [rows, length]. attention_mask: int64 [rows, cached
        columns + length]. adapter_data: the rows' adapters, over any number of tokens in each.
        last_only: length is 1 in the logits.
        """
        options: dict[str, object] = {}
        if self._takes_positions:
            options["position_ids"] = position_ids
        if last_only and self._takes_num_logits:
            options["logits_to_keep"] = 1
        if past_key_values is None and self._takes_cache:
            # Whole in every layer: one cut to a sliding window could not be padded on its left.
            past_key_values = DynamicCache()
        options[self._cache_name] = past_key_values
        rows, length = input_ids.shape
        reach = Reach(rows, length, attention_mask.shape[1])
        with self._hooks.using(adapter_data, reach):
            out = self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                use_cache=True,
                return_dict=True,
                **options,
            )
        past: Past | None = getattr(out, self._cache_name, None)
        if past is None:
            raise ValueError("the model keeps no cache of keys and values: it is not served")
        logits = out.logits[:, -1:] if last_only else out.logits
        return logits.to(self.device), past

    def base_tensors(self) -> dict[str, BaseRows]:
        """What belongs to embedding and head: adapters' files may hold copies of it."""
        return base_tensors(self.model)

    def next_logits(self, batch: CausalLMBatch, adapter_data: RowAdapters | None = None) -> Tensor:
        """Compute a batch's inputs into its cache: logits [rows, vocab] of the tokens to be."""
        logits, batch.past_key_values = self.forward(
            batch.input_ids,
            batch.seen,
            batch.position_ids,
            batch.past_key_values,
            adapter_data,
            last_only=True,
        )
        return logits[:, -1]

    def generate_token(
        self, batch: CausalLMBatch, adapter_data: RowAdapters | None = None
    ) -> tuple[SampledStep, CausalLMBatch]:
        """Sample every row's next token; returns the batch that continues with them too."""
        logits = self.next_logits(batch, adapter_data)
        params = [request.sampling for request in batch.requests]
        if any(each.adjusted for each in params):
            raise ValueError("penalties, biases and watermarks need PaddedRunner's token buffer")
        sampled = sample_tokens(logits, sampling_tensors(params, batch.input_lengths, self.device))
        batch.advance(sampled.tokens)
        return sampled, batch

    def hidden_states(self, ids: Tensor, adapter_data: RowAdapters | None) -> Tensor | None:
        """transformers' hidden_states[-1] [n, width] of one sequence, int64 [n].

        None where code from elsewhere shows no hidden states.
        """
        inner: Any = getattr(self.model, "base_model", self.model)
        options: dict[str, object] = {"use_cache": False, "return_dict": True}
        if inner is self.model:
            if "output_hidden_states" not in inspect.signature(inner.forward).parameters:
                return None
            options["output_hidden_states"] = True
        with self._hooks.using(adapter_data, Reach(1, len(ids), len(ids))):
            out = inner(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], **options)
        states: Tensor = out.hidden_states[-1] if inner is self.model else out.last_hidden_state
        return states[0].to(self.device)

    def batch(self, requests: list[RequestJoin]) -> CausalLMBatch:
        """Return a batch of whole sequences for this model."""
        return CausalLMBatch.from_requests(
            requests, self.pad_token_id, self.device, self.keys_head_dim_last
        )

    def _try_all(self, exact: bool) -> "_Findings":
        """Try unequal rows, and where they cannot share a forward, rows of one length."""
        # On one side of every border, or a row would differ from itself.
        shift = [1] * max((border for border in self.sharing.borders if border < 9), default=0)
        longest, equal_from = len(shift) + len(PROBE[0]) + 1, self.sharing.equal_from
        if equal_from is None or longest < equal_from:
            found = self._try([shift + row for row in PROBE])
            # Strict, for a failure here refuses nothing: rows of one length are tried next.
            if not exact or found.error <= found.bound * STRICT[self.dtype == torch.float32]:
                return found
            logger.info(
                "logits move by %.3g of %.3g when a row is padded on its left: only rows of one "
                "length share a forward", found.error, found.largest,
            )  # fmt: skip
            self.sharing = replace(self.sharing, equal_from=0)
        found = self._try([shift + row for row in EQUAL_PROBE])
        if exact and not found.error <= found.bound:
            raise ValueError(
                f"the model's logits move by {found.error:.3g} of {found.largest:.3g} between a "
                "row that goes on from its cache beside another of its length, and the same row "
                "computed whole and by itself (is it no decoder?): it is not served"
            )
        return found

    @torch.inference_mode()
    def _try(self, tokens: Sequence[list[int]]) -> "_Findings":
        """Prefill two rows, decode one token, and compare the second with a row of its own."""
        calls = ModuleCalls(self.model)
        rows = [RequestJoin(i, row, len(row), -1, Sampling()) for i, row in enumerate(tokens)]
        batch = self.batch(rows)
        with calls.watch():
            sampled = self.next_logits(batch).argmax(-1)
        past = batch.past_key_values
        assert past is not None
        size = (len(rows), len(tokens[0]))
        head_dim_last, bytes_held = keys_head_dim_last(past, *size), cache_bytes(past)
        batch.advance(sampled)
        with calls.watch():
            together = self.next_logits(batch)[1]
        alone = self.batch([RequestJoin(0, [*tokens[1], int(sampled[1])], 1, -1, Sampling())])
        apart = self.next_logits(alone)[0]
        return _Findings(
            keys_head_dim_last=head_dim_last,
            bytes_per_token=bytes_held // math.prod(size),
            linears=calls.adaptable(ProbeSize(*size, self.dtype)),
            error=float((together - apart).abs().max()),
            largest=float(apart.abs().max()),
            bound=(1e-3 if apart.dtype == torch.float32 else 0.1) * float(apart.abs().max()),
        )


@contextmanager
def _failures_named() -> Iterator[None]:
    """Refuse a model with code that fails on rows beside each other or on its own cache."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"the model's own code fails on two rows of a few tokens and a cache ({error}): it is "
            "not served"
        ) from error


@dataclass(frozen=True)
class _Findings:
    """What a probe showed.

    error: by how much a row's logits, of which `largest` is the largest, differ from those of
    the row by itself; up to `bound` it is rounding.
    """

    keys_head_dim_last: bool
    bytes_per_token: int
    linears: list[LinearModule]
    error: float
    largest: float
    bound: float
