"""Encoder: a model of transformers that reads its tokens both ways, over padded batches.

Rows are padded on their right, with the padding token that positions are counted by. Adapters join
each linear module's output as everywhere else.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.wire.plan import RequestJoin
from configs.wire.sampling import Sampling
from modeling.adapters.projection import BaseRows, Projection
from modeling.models.causal_lm import PROBE
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
from modeling.transfer import to_device

_PROBE = (*PROBE, [4, 2])
"""Three rows: DeBERTa maps twice as many relative positions as a row has tokens."""


class Encoder:
    """An encoder, with a classification head or without, and adapters on its linear modules.

    projections: the linear maps that adapters may change.
    """

    def __init__(self, model: PreTrainedModel, takes_types: bool, device: torch.device) -> None:
        """takes_types: whether its tokenizer gives the two texts of a pair types."""
        self.model = model
        self.device = device
        self.dtype = model.dtype
        # transformers types it as a plain module.
        self._inner: Any = model.base_model
        pad = getattr(model.config, "pad_token_id", None)
        self._pad = 0 if pad is None else int(pad)
        kinds = getattr(model.config, "type_vocab_size", 0)
        has_types = "token_type_ids" in inspect.signature(self._inner.forward).parameters
        self._takes_types = takes_types and has_types and kinds > 1
        self._hooks = AdapterHooks([], device)
        projections, hooked = hook_positions(self._linears())
        self.projections = tuple(self._with_other_heads(each) for each in projections)
        self._hooks = AdapterHooks(hooked, device)

    def states(self, rows: Sequence[RequestJoin], adapters: RowAdapters | None) -> Tensor:
        """transformers' last_hidden_state [rows, longest, width] of prompts."""
        states: Tensor = self._forward(self._inner, rows, adapters).last_hidden_state
        return states

    def logits(self, rows: Sequence[RequestJoin], adapters: RowAdapters | None) -> Tensor:
        """Float32 [rows, labels] of prompts; the model has a classification head."""
        logits: Tensor = self._forward(self.model, rows, adapters).logits
        return logits.float()

    def base_tensors(self) -> dict[str, BaseRows]:
        """What belongs to its embedding: adapters' files may hold copies of it."""
        return base_tensors(self.model)

    def _forward(
        self, module: Any, rows: Sequence[RequestJoin], adapters: RowAdapters | None
    ) -> Any:
        inputs = self._inputs(rows)
        shape = inputs["input_ids"].shape
        with self._hooks.using(adapters, Reach(shape[0], shape[1], shape[1])):
            return module(**inputs, return_dict=True)

    def _inputs(self, rows: Sequence[RequestJoin]) -> dict[str, Tensor]:
        """The tensors int64 [rows, longest] of prompts."""
        lengths = [row.prompt_length for row in rows]
        ids = np.full((len(rows), max(lengths)), self._pad, dtype=np.int64)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            ids[index, :length] = row.tokens[:length]
            mask[index, :length] = 1
            if row.sampling.second_at:
                types[index, row.sampling.second_at : length] = 1
        arrays = {"input_ids": ids, "attention_mask": mask}
        if self._takes_types:
            arrays["token_type_ids"] = types
        return {name: to_device(array, self.device) for name, array in arrays.items()}

    @torch.inference_mode()
    def _linears(self) -> list[LinearModule]:
        """Run the rows of the probe to see which modules adapters may change."""
        calls = ModuleCalls(self.model)
        rows = [RequestJoin(i, ids, len(ids), -1, Sampling()) for i, ids in enumerate(_PROBE)]
        with calls.watch():
            self._forward(self._inner, rows, None)
        size = ProbeSize(len(rows), len(_PROBE[0]), self.dtype, decodes=False)
        return calls.adaptable(size)

    def _with_other_heads(self, projection: Projection) -> Projection:
        """Name its modules as adapters do that were trained with another head, or without."""
        prefix, module = f"{self.model.base_model_prefix}.", projection.module
        other = module.removeprefix(prefix) if module.startswith(prefix) else prefix + module
        return replace(projection, aliases=(*projection.aliases, other))
