"""The start of an encoder's runner: load the model, make the adapter pools, measure, allocate."""

from dataclasses import dataclass

import torch

from configs.engine import EngineConfig
from configs.wire.plan import RequestJoin
from configs.wire.sampling import Pooling, Sampling
from modeling.adapters.kernels.select import select_kernel
from modeling.runner.block_tables import BatchSize
from modeling.runner.encoder import EncoderParts, EncoderRunner
from modeling.runner.encoder_loading import load_encoder_weights
from modeling.runner.load_padded import check_unused, padded_bank
from modeling.runner.loading import total_tokens
from modeling.runner.padded import PaddedAdapters
from modeling.runner.padded_batches import MAX_PADDING
from modeling.runner.shared import LoadedRunner, on_device
from modeling.sampling.grammars import Grammars
from sharding.group import TensorParallel
from sources.model import fetch_model


def load_encoder(
    config: EngineConfig, group: TensorParallel, device: torch.device
) -> "LoadedEncoder":
    """Load the whole encoder and make its adapter pools.

    ValueError for more than one rank, and for what an encoder cannot have.
    """
    if group.size != 1:
        raise ValueError(
            f"tensor_parallel ({group.size}) must be 1: an encoder runs whole in one rank"
        )
    if config.adapters.vocabulary:
        raise ValueError(
            "adapters.vocabulary: the embedding of an encoder cannot be adapted: set it to false"
        )
    check_unused(config.adapters)
    with on_device(device):
        weights = load_encoder_weights(config.model, device)
        model, kernel = weights.model, select_kernel(device)
        bank = padded_bank(config, model.projections, model)
    longest = total_tokens(config, weights.architecture)
    vocab_size = weights.architecture.vocab_size
    return LoadedEncoder(
        EncoderParts(
            config=config,
            device=device,
            weights=weights,
            kernel=kernel,
            bank=bank,
            size=BatchSize(config.limits.max_running, longest, config.cache.block_size),
            grammars=Grammars(lambda: fetch_model(config.model), vocab_size),
            adapters=PaddedAdapters(kernel, bank),
        )
    )


@dataclass(frozen=True)
class LoadedEncoder(LoadedRunner):
    """An encoder on its device with its adapter pools."""

    parts: EncoderParts

    def measure(self) -> int:
        """Return the token budget in blocks: nothing is kept, so every batch slot has its own."""
        parts = self.parts
        if parts.device.type == "cuda":
            with on_device(parts.device):
                self._try_widest()
        wanted = parts.config.cache.num_blocks
        return parts.size.max_running * parts.size.max_blocks if wanted is None else wanted

    def allocate(self, num_blocks: int | None = None, record: bool = True) -> EncoderRunner:
        """Return the runner; there is no cache to take."""
        if num_blocks is None:
            num_blocks = self.measure()
        reason = f"{self.parts.weights.architecture.architecture} in transformers' own code"
        return EncoderRunner(self.parts, self.parts.report(num_blocks, 0, "padded", reason))

    @torch.inference_mode()
    def _try_widest(self) -> None:
        """Run the widest steps once; ValueError where there is no memory for them."""
        size, budget = self.parts.size, self.parts.config.limits.max_step_tokens
        num_rows = min(size.max_running, MAX_PADDING * budget)
        length = max(1, min(size.max_total_tokens, MAX_PADDING * budget // num_rows))
        sampling = Sampling(pooling=Pooling.MEAN)
        try:
            for rows, tokens in ((1, size.max_total_tokens), (num_rows, length)):
                joins = [RequestJoin(i, [0] * tokens, tokens, -1, sampling) for i in range(rows)]
                self.parts.weights.model.states(joins, None)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"no memory is left for a text of {size.max_total_tokens} tokens, or for "
                f"{num_rows} of {length}: lower limits.max_total_tokens or limits.max_step_tokens"
            ) from error
