"""The start of a padded runner: load the model, make the adapter pools, measure, allocate."""

from dataclasses import dataclass

import torch
from torch import Tensor

from configs.adapters import AdaptersConfig
from configs.engine import CacheDType, EngineConfig
from configs.wire.plan import RequestJoin
from configs.wire.sampling import Sampling
from modeling.adapters.bank import AdapterBank, page_bytes
from modeling.adapters.kernels.select import select_kernel
from modeling.adapters.peft.score import score_projection
from modeling.adapters.projection import Projection
from modeling.adapters.score import ScoreHeads
from modeling.models.causal_lm import CausalLM
from modeling.models.encoder import Encoder
from modeling.models.padded.prompts import CausalLMPrompts
from modeling.runner.block_tables import BatchSize
from modeling.runner.loading import total_tokens
from modeling.runner.memory import (
    POOL_SETTINGS,
    adapter_pages,
    bank_size,
    cpu_blocks,
    cuda_blocks,
    device_memory,
    fitting,
)
from modeling.runner.padded import PaddedAdapters, PaddedParts, PaddedRunner
from modeling.runner.padded_batches import MAX_PADDING
from modeling.runner.padded_loading import load_causal_lm
from modeling.runner.shared import LoadedRunner, on_device
from modeling.sampling.grammars import Grammars
from sharding.group import TensorParallel
from sources.model import fetch_model


def load_padded(
    config: EngineConfig, group: TensorParallel, device: torch.device, spread: bool = False
) -> "LoadedPadded":
    """Load the whole model and make its adapter pools.

    spread: whether the model may lie on all GPUs that this process sees. ValueError for more than
    one rank, and for what such a model cannot have.
    """
    _check_config(config, group)
    with on_device(device):
        kernel = select_kernel(device)
        weights = load_causal_lm(config.model, device, spread)
        model = weights.model
        embedding = model.model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor)
        vocab_size = len(embedding)
        grammars = Grammars(lambda: fetch_model(config.model), vocab_size)
        prompts = CausalLMPrompts(model, vocab_size)
        longest = total_tokens(config, weights.architecture)
        projections = model.projections
        if projections:
            projections = (*projections, score_projection(embedding.shape[1], False))
        bank = padded_bank(config, projections, model)
    return LoadedPadded(
        PaddedParts(
            config=config,
            # A spread model takes its inputs where its embedding is.
            device=model.device,
            weights=weights,
            kernel=kernel,
            bank=bank,
            size=BatchSize(config.limits.max_running, longest, config.cache.block_size),
            grammars=grammars,
            prompts=prompts,
            adapters=PaddedAdapters(kernel, bank),
        )
    )


def padded_bank(
    config: EngineConfig, projections: tuple[Projection, ...], model: CausalLM | Encoder
) -> AdapterBank:
    """Make the adapter pools of a model that runs whole, over these projections; perhaps none."""
    pages = 0
    if projections:
        memory = device_memory(model.device) if model.device.type == "cuda" else None
        width = page_bytes(projections, model.dtype)
        pages = adapter_pages(config.adapters, width, memory)
    size = bank_size(config.adapters, pages)
    with fitting(POOL_SETTINGS):
        return AdapterBank(projections, size, model.dtype, model.device, model.base_tensors())


def check_unused(adapters: AdaptersConfig) -> None:
    """ValueError for settings of what adapters change in paged models alone."""
    names = "whole_linears", "vocabulary_copies", "vocabulary_pages", "expert_pages", "draft_heads"
    for name in names:
        if getattr(adapters, name):
            raise ValueError(
                f"adapters.{name}: of this model, which has no paged implementation, adapters "
                "change linear maps inside the layers alone, by their factors: remove it"
            )


def _check_config(config: EngineConfig, group: TensorParallel) -> None:
    if group.size != 1:
        raise ValueError(
            f"tensor_parallel ({group.size}) must be 1: this model has no paged "
            "implementation and runs whole in one rank (one that Ray gave several GPUs, if "
            "the model's config.json can be read where the application is built)"
        )
    if config.adapters.vocabulary:
        raise ValueError(
            "adapters.vocabulary: embedding and head of a model without a paged implementation "
            "cannot be adapted: set it to false"
        )
    check_unused(config.adapters)
    if config.cache.dtype is CacheDType.FP8:
        raise ValueError(
            "cache.dtype: fp8: the cache of a model without a paged implementation is in the "
            "model's own type: set it to auto"
        )


@dataclass(frozen=True)
class LoadedPadded(LoadedRunner):
    """A padded model on its device with its adapter pools, without batch slots yet."""

    parts: PaddedParts

    def measure(self) -> int:
        """Return the token budget in blocks."""
        parts = self.parts
        config = parts.config
        if config.cache.num_blocks is not None:
            return config.cache.num_blocks
        if parts.device.type != "cuda":
            return cpu_blocks(parts.size, self._block_bytes)
        with on_device(parts.device):
            peak, memory = self._step_peak(), device_memory(parts.device)
            return cuda_blocks(config, memory, peak, self._block_bytes * MAX_PADDING)

    def allocate(self, num_blocks: int | None = None, record: bool = True) -> PaddedRunner:
        """Take the batch slots' token buffer; the cache itself grows with its rows."""
        if num_blocks is None:
            num_blocks = self.measure()
        parts = self.parts
        # One more than the longest sequence: its last token is sampled and never computed.
        shape = parts.size.max_running, parts.size.max_total_tokens + 1
        with on_device(parts.device):
            tokens = torch.zeros(shape, dtype=torch.int64, device=parts.device)
        reason = f"{parts.weights.architecture.architecture} in transformers' own code"
        report = parts.report(num_blocks, self._block_bytes, "padded", reason)
        return PaddedRunner(parts, tokens, report)

    @property
    def _block_bytes(self) -> int:
        return self.parts.size.block_size * self.parts.weights.model.bytes_per_token

    def _step_peak(self) -> int:
        """Return the bytes that the widest prefills take beyond weights and pools."""
        size, budget = self.parts.size, self.parts.config.limits.max_step_tokens
        device, longest = self.parts.device, size.max_total_tokens
        num_rows = min(size.max_running, MAX_PADDING * budget)
        length = min(longest, MAX_PADDING * budget // num_rows)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        try:
            self._try_rows(1, longest)
            self._try_prompt(longest)
            self._try_rows(num_rows, length)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"no memory is left for a prompt of {longest} tokens, which this model computes "
                f"whole, or for {num_rows} of {length}: lower limits.max_total_tokens or "
                "limits.max_step_tokens"
            ) from error
        return torch.cuda.max_memory_allocated(device) - before

    @torch.inference_mode()
    def _try_rows(self, num_rows: int, length: int) -> None:
        """Prefill so many rows and draw a token for each at random."""
        sampling = Sampling(temperature=1.0, top_p=0.9, typical_p=0.9, logprobs=0)
        joins = [RequestJoin(i, [0] * length, length, -1, sampling) for i in range(num_rows)]
        model = self.parts.weights.model
        model.generate_token(model.batch(joins))

    @torch.inference_mode()
    def _try_prompt(self, length: int) -> None:
        """Score a prompt, its logits in slices."""
        join = RequestJoin(0, [0] * length, length, -1, Sampling(prompt_logprobs=0))
        heads = ScoreHeads(self.parts.bank, None).logits
        self.parts.prompts.score([(0, join)], self.parts.adapters.of_slot, heads)
