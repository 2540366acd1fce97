"""PaddedRunner: ModelRunner's door over a padded CausalLM, for models without paged attention.

Every row that samples is in a padded batch, which lives from step to step (`PaddedBatches`).
Nothing is kept of a row that left but its tokens; if a plan names it again, it is
prefilled again. So any plan is answered rightly; which ones are answered fast is told to the
scheduler as data (no chunks, no prefix cache). Cache blocks are a token budget only.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from configs.engine import CacheDType, EngineConfig
from configs.wire.adapters import (
    AdapterError,
    AdapterKey,
    AdapterRefusal,
    AdapterShape,
    FetchedAdapter,
)
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.adapters.bank import AdapterBank, BankSize, page_bytes
from modeling.adapters.device_copies import CopyEvent
from modeling.adapters.kernels.select import select_kernel
from modeling.batch import ForwardBatch, StepOutput
from modeling.models.causal_lm import CausalLM, CausalLMBatch
from modeling.models.causal_lm_adapters import RowAdapters
from modeling.models.causal_lm_prompts import CausalLMPrompts
from modeling.runner.input_batch import BatchSize
from modeling.runner.loading import total_tokens
from modeling.runner.memory import adapter_pages, cpu_blocks, cuda_blocks, device_memory
from modeling.runner.outputs import step_output
from modeling.runner.padded_batches import MAX_PADDING, PaddedBatches
from modeling.runner.padded_loading import LoadedCausalLM, load_causal_lm
from modeling.runner.report import RunnerReport
from modeling.sampling.grammars import Grammars
from modeling.sampling.history import TokenHistory
from modeling.sampling.prompt_scores import PromptScoresOnDevice
from modeling.sampling.sampler import choose, no_rows
from modeling.sampling.tensors import sampling_tensors
from modeling.transfer import to_device
from sharding.group import TensorParallel
from sources.model import fetch_model


class PaddedRunner:
    """One whole model, its padded batch, adapter rows, and the places' tokens."""

    def __init__(
        self,
        config: EngineConfig,
        group: TensorParallel,
        device: torch.device,
        spread: bool = False,
    ) -> None:
        """Load nothing yet; spread: the model may lie on all GPUs that this process sees.

        ValueError for more than one rank.
        """
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
        if config.cache.dtype is CacheDType.FP8:
            raise ValueError(
                "cache.dtype: fp8: the cache of a model without a paged implementation is in the "
                "model's own type: set it to auto"
            )
        self._config = config
        self._device = device
        self._spread = spread
        self._kernel = select_kernel(device)
        self._loaded: LoadedCausalLM
        self._model: CausalLM
        self._prompts: CausalLMPrompts
        self._bank: AdapterBank
        self._size: BatchSize
        self._grammars: Grammars
        self._tokens: Tensor
        self._batch_slots: dict[int, RequestJoin] = {}
        self._running: PaddedBatches

    def load(self) -> RunnerReport:
        """Measure and allocate at once."""
        return self.allocate(self.measure())

    def measure(self) -> int:
        """Load the model, make the adapter pools, and return the token budget in blocks."""
        with self._on_device():
            return self._measure()

    def allocate(self, num_blocks: int) -> RunnerReport:
        """Take the places' token buffer; the cache itself grows with its rows."""
        with self._on_device():
            # One more than the longest sequence: its last token is sampled and never computed.
            width = self._size.max_total_tokens + 1
            self._tokens = torch.zeros(
                self._size.max_running, width, dtype=torch.int64, device=self._device
            )
        return self._report(num_blocks)

    @torch.inference_mode()
    def step(self, batch: ForwardBatch) -> StepOutput:
        """Launch one step; the next may be launched before `wait` is called on its output."""
        with self._on_device():
            self._join(batch.joins)
            with self._bank.in_use(
                [self._batch_slots[row.batch_slot].adapter_slot for row in batch.rows]
            ):
                told = self._score_prompts(batch.rows)
                # A chunk that samples nothing waits for the prefill of its last one.
                rows = [row for row in batch.rows if row.samples]
                if not rows:
                    return step_output(no_rows(self._device), [], told)
                return self._step(rows, told, [row.batch_slot for row in batch.rows])

    def stage(self, adapter: FetchedAdapter) -> AdapterShape:
        """Read an adapter into host memory; AdapterError when it cannot be served exactly."""
        if not self._config.adapters.enabled:
            raise AdapterError(
                AdapterRefusal.UNSUPPORTED,
                "this server serves no adapters: set adapters.enabled to true",
            )
        with self._on_device():
            return self._bank.stage(adapter)

    @torch.inference_mode()
    def load_adapter(self, key: AdapterKey, slot: int, pages: Sequence[Sequence[int]]) -> CopyEvent:
        """Start to move a staged adapter to the device, beside the steps; waits for nothing.

        Steps launched before read what lay there, steps launched after read the adapter.
        """
        with self._on_device():
            return self._bank.load(key, slot, pages)

    def drop(self, key: AdapterKey) -> None:
        """Forget the host copy of an adapter."""
        self._bank.drop(key)

    def prepare(self, number: int, constraint: str, gone: Sequence[int]) -> str:
        """Make a constraint's matcher, beside the steps, and forget those that are `gone`.

        Returns what is wrong, "" for nothing. Joins name it by its number.
        """
        return self._grammars.prepare(number, constraint, gone)

    def check(self) -> None:
        """Assert what must hold between steps."""
        self._bank.check()
        self._running.check()
        assert self._running.places <= self._batch_slots.keys()

    def _measure(self) -> int:
        config = self._config
        self._loaded = load_causal_lm(config.model, self._device, self._spread)
        self._model = model = self._loaded.model
        self._running = PaddedBatches(model, self._adapters)
        self._device = model.device
        embedding = model.model.get_input_embeddings().weight
        assert isinstance(embedding, Tensor)
        self._grammars = Grammars(lambda: fetch_model(config.model), len(embedding))
        self._prompts = CausalLMPrompts(model, len(embedding))
        longest = total_tokens(config, self._loaded.architecture)
        block_size = config.cache.block_size
        self._size = BatchSize(config.limits.max_running, longest, block_size)
        on_cuda = self._device.type == "cuda"
        pages = 0
        if model.projections:
            memory = device_memory(self._device) if on_cuda else None
            width = page_bytes(model.projections, model.dtype)
            pages = adapter_pages(config.adapters, width, memory)
        size = BankSize(
            pages=pages,
            slots=config.adapters.max_device_adapters if pages else 0,
            max_rank=config.adapters.max_rank,
            host_bytes=config.adapters.host_bytes,
        )
        self._bank = AdapterBank(
            model.projections, size, model.dtype, self._device, model.base_tensors()
        )
        if config.cache.num_blocks is not None:
            return config.cache.num_blocks
        block_bytes = block_size * model.bytes_per_token
        if not on_cuda:
            return cpu_blocks(self._size, block_bytes)
        peak = self._step_peak()
        return cuda_blocks(config, device_memory(self._device), peak, block_bytes * MAX_PADDING)

    def _step_peak(self) -> int:
        """Return the bytes that the widest prefills take beyond weights and pools."""
        longest, budget = self._size.max_total_tokens, self._config.limits.max_step_tokens
        num_rows = min(self._size.max_running, MAX_PADDING * budget)
        length = min(longest, MAX_PADDING * budget // num_rows)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        try:
            self._warm_up(1, longest)
            self._warm_up_prompt(longest)
            self._warm_up(num_rows, length)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"no memory is left for a prompt of {longest} tokens, which this model computes "
                f"whole, or for {num_rows} of {length}: lower limits.max_total_tokens or "
                "limits.max_step_tokens"
            ) from error
        return torch.cuda.max_memory_allocated(self._device) - before

    @torch.inference_mode()
    def _warm_up(self, num_rows: int, length: int) -> None:
        """Prefill so many rows and draw a token for each at random."""
        sampling = Sampling(temperature=1.0, top_p=0.9, typical_p=0.9, logprobs=0)
        joins = [RequestJoin(i, [0] * length, length, -1, sampling) for i in range(num_rows)]
        self._model.generate_token(self._model.batch(joins))

    @torch.inference_mode()
    def _warm_up_prompt(self, length: int) -> None:
        """Score a prompt, its logits in slices."""
        asked = Sampling(prompt_logprobs=0)
        self._prompts.score([(0, RequestJoin(0, [0] * length, length, -1, asked))], self._alone)

    def _join(self, joins: Sequence[RequestJoin]) -> None:
        """Give each request its place; whoever had it before has left."""
        for join in joins:
            count = len(join.tokens)
            assert 0 <= join.batch_slot < self._size.max_running, join.batch_slot
            assert 1 <= count <= self._size.max_total_tokens, (join.batch_slot, count)
            tokens = to_device(np.array(join.tokens, dtype=np.int64), self._device)
            self._tokens[join.batch_slot, :count].copy_(tokens, non_blocking=True)
            self._batch_slots[join.batch_slot] = join
            answer = join.tokens[join.prompt_length :]
            self._grammars.join(join.batch_slot, join.matcher, answer)
        self._running.keep(self._running.places - {join.batch_slot for join in joins})

    def _score_prompts(self, rows: Sequence[StepRow]) -> PromptScoresOnDevice | None:
        """Read the prompts whose ends the rows reach, where somebody asks about them."""
        asking = [
            (index, seat)
            for index, row in enumerate(rows)
            for seat in [self._batch_slots[row.batch_slot]]
            if seat.sampling.about_prompt and row.start < seat.prompt_length <= _end(row)
        ]
        return self._prompts.score(asking, self._alone) if asking else None

    def _alone(self, slot: int) -> RowAdapters | None:
        """Return the adapter of one sequence by itself."""
        return self._over([slot])

    def _step(
        self, rows: Sequence[StepRow], told: PromptScoresOnDevice | None, asking: Sequence[int]
    ) -> StepOutput:
        ends = [row.start + row.length for row in rows]
        going = self._running.going_on(
            [(row.batch_slot, end) for row, end in zip(rows, ends, strict=True) if row.length == 1]
        )
        fresh = [self._request(row) for row in rows if row.batch_slot not in going]
        computed, logits = self._running.compute(going, fresh)
        # From the batches' order to the plan's, and the tokens back again.
        at = {place: index for index, place in enumerate(computed)}
        order = _indices([at[row.batch_slot] for row in rows], self._device)
        asked = [self._batch_slots[row.batch_slot].sampling for row in rows]
        chosen = choose(
            logits[order], sampling_tensors(asked, ends, self._device, self._history(rows, ends))
        )
        places = _indices([row.batch_slot for row in rows], self._device)
        self._tokens[places, _indices(ends, self._device)] = chosen.tokens
        self._grammars.advance([row.batch_slot for row in rows], chosen.tokens)
        tokens = torch.empty_like(chosen.tokens)
        tokens[order] = chosen.tokens
        self._running.advance(tokens)
        return step_output(chosen, asked, told, faults=self._grammars.take_faults(asking))

    def _history(self, rows: Sequence[StepRow], ends: Sequence[int]) -> TokenHistory | None:
        """Where the rows' own tokens lie; None where no row looks at them."""
        seats = [self._batch_slots[row.batch_slot] for row in rows]
        if not any(seat.sampling.adjusted for seat in seats):
            return None
        places = np.array([row.batch_slot for row in rows], dtype=np.int64)
        prompts = np.array([seat.prompt_length for seat in seats], dtype=np.int64)
        targets = places * self._tokens.shape[1] + np.array(ends)
        return TokenHistory(self._tokens.view(-1), targets, prompts, places, self._grammars)

    def _request(self, row: StepRow) -> RequestJoin:
        """Return a row's request with all tokens up to the row's last."""
        seat, end = self._batch_slots[row.batch_slot], _end(row)
        tokens = seat.tokens[:end]
        if len(tokens) < end:
            # It paused, and only the device knows what it has sampled.
            tokens = self._tokens[row.batch_slot, :end].tolist()
        return replace(seat, tokens=tokens)

    def _adapters(self, batch: CausalLMBatch) -> RowAdapters | None:
        """Return a batch's adapters, None where all rows are the base model's."""
        return self._over([request.adapter_slot for request in batch.requests])

    def _over(self, slots: Sequence[int]) -> RowAdapters | None:
        if max(slots) < 0:
            return None
        return lambda length: self._kernel.batch(self._bank, slots, [length] * len(slots))

    def _on_device(self) -> AbstractContextManager[object]:
        """Make this rank's device the thread's own: pinning and events look at it."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _report(self, num_blocks: int) -> RunnerReport:
        loaded, size = self._loaded, self._bank.size
        model = loaded.model
        return RunnerReport(
            num_blocks=num_blocks,
            block_size=self._size.block_size,
            projections=tuple(p.name for p in model.projections),
            adapter_pages=size.pages,
            adapter_slots=size.slots,
            host_bytes=self._bank.host_capacity,
            max_total_tokens=self._size.max_total_tokens,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(self._device),
            attention="padded",
            attention_reason=f"{loaded.architecture.architecture} in transformers' own code",
            adapter_kernel=self._kernel.name,
            adapter_kernel_reason=self._kernel.reason,
            weight_bytes_read=loaded.bytes_read,
            weight_bytes_resident=loaded.bytes_resident,
            kv_bytes=num_blocks * self._size.block_size * model.bytes_per_token,
            adapter_pool_bytes=self._bank.pool_bytes,
            load_seconds=loaded.seconds,
        )


def _end(row: StepRow) -> int:
    return row.start + row.length


def _indices(values: Sequence[int], device: torch.device) -> Tensor:
    return to_device(np.array(values, dtype=np.int64), device)
