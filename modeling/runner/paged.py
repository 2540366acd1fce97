"""ModelRunner: one rank's door. Numbers in, tensors inside, sampled tokens out.

Life: `measure` loads and says how many cache blocks would fit, `allocate` is given the minimum
over ranks, then `step` as often as wanted. `step`, `place` and `drop` belong to one thread, in
the order of the plans; `stage` may run beside them on another.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from configs.engine import EngineConfig
from configs.wire.adapters import (
    AdapterError,
    AdapterKey,
    AdapterRefusal,
    AdapterShape,
    FetchedAdapter,
)
from modeling.adapters.bank import AdapterBank, BankSize, copy_bytes, page_bytes
from modeling.adapters.device_copies import CopyEvent
from modeling.adapters.kernels.select import AdapterStepPlan, select_kernel
from modeling.adapters.product import AdapterData
from modeling.adapters.vocabulary import VocabularyAdapters, adapts_vocabulary
from modeling.attention.base import AttentionStep
from modeling.attention.clamping import ClampWatch
from modeling.attention.kv_cache import CacheSpec, LayerCache, allocate
from modeling.attention.select import AttentionChoice
from modeling.batch import ForwardBatch, StepOutput
from modeling.runner.cache import choose_cache
from modeling.runner.captures import GraphSizes, StepGraphs, capture, graph_sizes_of
from modeling.runner.cuda_graphs import DecodeGraphs, GraphParts
from modeling.runner.input_batch import (
    BatchSize,
    InputBatch,
    Ints,
    StepInputs,
    StepLayout,
    StepTensors,
)
from modeling.runner.loading import LoadedModel, load_model, total_tokens
from modeling.runner.memory import (
    adapter_pages,
    cpu_blocks,
    cuda_blocks,
    device_memory,
    vocabulary_copies,
)
from modeling.runner.outputs import step_output
from modeling.runner.piecewise import PiecewiseGraphs
from modeling.runner.report import RunnerReport
from modeling.runner.warmup import warmup_batches, widest_step
from modeling.sampling.grammars import Grammars
from modeling.sampling.prompt_scores import PromptReader, PromptScoresOnDevice
from modeling.sampling.sampler import SampledStep, choose, no_rows
from modeling.sampling.tensors import SamplingTensors, sampling_tensors
from modeling.transfer import StepClock
from sharding.group import TensorParallel
from sources.model import fetch_model


class ModelRunner:
    """One rank of a model: weights, cache pages, adapter rows, and the places' tokens.

    Matrix products of float32 models are in full float32: TF32, torch's switch for less, stays
    off as torch starts with it. num_steps, num_captured: steps launched with rows in them, and
    how many of those were replays.
    """

    def __init__(self, config: EngineConfig, group: TensorParallel, device: torch.device) -> None:
        """Load nothing yet; `device` as pick_device returns it."""
        self._config = config
        self._group = group
        self._device = device
        self._clock = StepClock(device)
        self._kernel = select_kernel(device)
        self._loaded: LoadedModel
        self._attention: AttentionChoice
        self._bank: AdapterBank
        self._cache_spec: CacheSpec
        self._size: BatchSize
        self._grammars: Grammars
        self._input_batch: InputBatch
        self._prompts: PromptReader
        self._cache: list[LayerCache]
        self._clamp_watch: ClampWatch
        self._adapter_plan: AdapterStepPlan | None = None
        self._decode_graphs: DecodeGraphs | None = None
        self._piecewise_graphs: PiecewiseGraphs | None = None
        self.num_steps = 0
        self.num_captured = 0

    def load(self) -> RunnerReport:
        """Measure and allocate at once, for a group whose ranks need not agree."""
        return self.allocate(self.measure())

    def measure(self) -> int:
        """Load the weights, make the adapter pools, and return how many cache blocks fit.

        All ranks call it together: on CUDA it runs the largest step once to see its peak.
        """
        with self._on_device():
            return self._measure()

    def allocate(self, num_blocks: int) -> RunnerReport:
        """Take the cache and the places' buffers; `num_blocks` is the same on every rank.

        All ranks call it together: on CUDA, decode steps are captured and every kernel is run
        once, so that no request waits for a compiler.
        """
        with self._on_device():
            self._allocate(num_blocks)
            if self._device.type == "cuda":
                self._warm_up(num_blocks)
                self._decode_graphs, self._piecewise_graphs = self._capture(
                    self._sizes(), num_blocks
                )
            self.num_steps = self.num_captured = 0
        return self._report(num_blocks)

    @torch.inference_mode()
    def step(self, batch: ForwardBatch) -> StepOutput:
        """Launch one step; every rank calls it with the same batch, in the same order.

        The next step may be launched before `wait` is called on this one's output.
        """
        with self._on_device():
            start = self._clock.begin()
            self._input_batch.join(batch.joins)
            if not batch.rows:
                return step_output(no_rows(self._device), [])
            self.num_steps += 1
            layout = self._input_batch.layout(batch.rows)
            with self._bank.in_use(layout.adapter_slots):
                before = self.num_captured
                chosen, told = None if layout.prompt_rows else self._replay(layout), None
                if chosen is None:
                    chosen, told = self._compute(layout)
            captured = self.num_captured > before
            self._clamp_watch.stepped()
            faults = self._grammars.take_faults([row.batch_slot for row in batch.rows])
            return step_output(chosen, layout.sampling, told, start, captured, faults)

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

    def _measure(self) -> int:
        config, device = self._config, self._device
        self._loaded = load_model(config, self._group, device)
        model = self._loaded.model
        self._grammars = Grammars(lambda: fetch_model(config.model), model.vocab_size)
        self._cache_spec, self._attention = choose_cache(config, self._loaded, self._group)
        longest = total_tokens(config, self._loaded.architecture)
        self._size = BatchSize(config.limits.max_running, longest, config.cache.block_size)
        memory = device_memory(device) if device.type == "cuda" else None
        pages = adapter_pages(config.adapters, page_bytes(model.projections, model.dtype), memory)
        size = BankSize(
            pages=pages,
            slots=config.adapters.max_device_adapters if pages else 0,
            max_rank=config.adapters.max_rank,
            host_bytes=config.adapters.host_bytes,
            copies=vocabulary_copies(
                config.adapters, copy_bytes(model.projections, model.dtype), memory
            ),
        )
        self._bank = AdapterBank(model.projections, size, model.dtype, device, model.base_tensors())
        if self._kernel.plan is not None and pages:
            self._adapter_plan = self._kernel.plan(self._bank, config.limits.max_step_tokens)
        if config.cache.num_blocks is not None:
            return config.cache.num_blocks
        if device.type == "cpu":
            return cpu_blocks(self._size, self._cache_spec.bytes_per_page)
        taken = self._step_peak() + self._graph_bytes()
        memory = device_memory(device)
        return cuda_blocks(config, memory, taken, self._cache_spec.bytes_per_page)

    def _allocate(self, num_blocks: int) -> None:
        """Allocate the cache and the places' state; a CUDA cache has one page more, for padding."""
        spare = 1 if self._device.type == "cuda" else 0
        self._cache = allocate(self._cache_spec, num_blocks + spare, self._device)
        self._clamp_watch = ClampWatch(self._cache)
        self._input_batch = InputBatch(self._size, self._device, self._grammars)
        self._prompts = PromptReader(self._loaded.model.vocab_size, self._device)

    def _step_peak(self) -> int:
        """Return the bytes that the widest step takes beyond weights, pools and cache."""
        batch = widest_step(self._size, self._config.limits.max_step_tokens)
        self._allocate(1 + max(block for row in batch.rows for block in row.blocks))
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        self.step(batch).wait()
        peak = torch.cuda.max_memory_allocated(self._device) - before
        del self._cache, self._input_batch
        return peak

    def _sizes(self) -> GraphSizes:
        """What is captured; no decode steps where the attention has no captured form."""
        config, backend = self._config, self._attention.backend
        has_form = backend.graph_words(1, self._size.max_blocks) is not None
        return graph_sizes_of(config.cuda_graphs, config.limits, has_form)

    def _graph_bytes(self) -> int:
        """Return what captured steps will take: the largest is tried, the others share with it."""
        sizes = self._sizes()
        if not sizes:
            return 0
        self._allocate(1)
        before = device_memory(self._device).free
        captured = self._capture(sizes.largest, 1)
        taken = before - device_memory(self._device).free
        del captured, self._cache, self._input_batch
        kinds = 1 if self._adapter_plan is None else 2
        return max(0, taken) + kinds * sizes.others_bytes(self._loaded.model.num_layers)

    @torch.inference_mode()
    def _capture(self, sizes: GraphSizes, scratch_page: int) -> StepGraphs:
        model = self._loaded.model
        parts = GraphParts(
            forward=self._forward,
            backend=self._attention.backend,
            state=self._input_batch,
            dummy_block=scratch_page,
            vocab_size=model.vocab_size,
            dtype=model.dtype,
            adapters=self._adapter_plan,
        )
        return capture(parts, sizes, self._device, partial(self._forward, skip_head=True))

    def _warm_up(self, scratch_page: int) -> None:
        """Run steps for every kernel, all of them in a page that nobody owns."""
        slots = [-1] if self._adapter_plan is None else [-1, 0]
        most = self._config.limits.max_step_tokens
        for batch in warmup_batches(self._size, most, scratch_page, slots):
            self.step(batch).wait()

    def _replay(self, layout: StepLayout) -> SampledStep | None:
        """Run a captured step; None when this is none."""
        if self._decode_graphs is None or adapts_vocabulary(self._bank, layout.adapter_slots):
            return None
        found = self._decode_graphs.run(layout)
        if found is None:
            return None
        self.num_captured += 1
        params = self._sampling(layout)
        if params.plain:
            return SampledStep(found.tokens, None)
        chosen = choose(found.logits, params)
        self._input_batch.sampled(layout, found.targets, chosen.tokens)
        return chosen

    def _compute(self, layout: StepLayout) -> tuple[SampledStep, PromptScoresOnDevice | None]:
        """Run a step launch by launch, or in captured segments with launches between them.

        The head reads single tokens, or whole prompts in slices.
        """
        inputs = self._input_batch.inputs(layout)
        attention = self._attention.backend.prepare(
            inputs.query_lengths, inputs.key_lengths, inputs.block_tables
        )
        hidden, layers = self._replay_piecewise(inputs, attention), None
        if hidden is None:
            layers = self._adapters(inputs)
            adapters = self._with_vocabulary(layers, layout)
            if inputs.sampling and not layout.prompt_rows:
                logits = self._forward(inputs, attention, adapters)
                return self._choose(layout, inputs, logits), None
            hidden = self._forward(inputs, attention, adapters, skip_head=True)
        head, told = partial(self._head, layout, layers), None
        if layout.prompt_rows:
            told = self._prompts.read(layout.prompt_rows, hidden, self._input_batch.tokens, head)
        if not inputs.sampling:
            return no_rows(self._device), told
        logits = head(hidden[inputs.last_tokens], layout.last_tokens)
        return self._choose(layout, inputs, logits), told

    def _replay_piecewise(self, inputs: StepInputs, attention: AttentionStep) -> Tensor | None:
        """Return the hidden states of a step in captured segments; None when it has no such."""
        if self._piecewise_graphs is None or adapts_vocabulary(self._bank, inputs.adapter_slots):
            return None
        hidden = self._piecewise_graphs.run(inputs, attention)
        self.num_captured += hidden is not None
        return hidden

    def _head(
        self, layout: StepLayout, layers: AdapterData | None, hidden: Tensor, at: Ints
    ) -> Tensor:
        """Return the logits of those of a step's tokens that lie `at` these indices."""
        adapters = self._with_vocabulary(layers, replace(layout, last_tokens=at))
        return self._loaded.model.head(hidden, adapters)

    def _choose(self, layout: StepLayout, inputs: StepInputs, logits: Tensor) -> SampledStep:
        chosen = choose(logits, self._sampling(layout))
        self._input_batch.sampled(layout, inputs.targets, chosen.tokens)
        return chosen

    def _sampling(self, layout: StepLayout) -> SamplingTensors:
        """Return how the step's samples are chosen."""
        history = self._input_batch.history(layout)
        return sampling_tensors(layout.sampling, layout.sample_positions, self._device, history)

    def _forward(
        self,
        tensors: StepTensors,
        attention: AttentionStep,
        adapters: AdapterData | None,
        skip_head: bool = False,
    ) -> Tensor:
        """Return logits [sampling rows, vocab]; all tokens' hidden states without the head."""
        logits, _ = self._loaded.model.paged(
            tensors.input_ids,
            tensors.positions,
            tensors.cu_seqlens,
            self._cache,
            tensors.block_tables,
            tensors.slots,
            attention,
            attention.max_key_length,
            adapters,
            lm_head_indices=None if skip_head else tensors.last_tokens,
            skip_lm_head=skip_head,
        )
        return logits

    def _adapters(self, inputs: StepInputs) -> AdapterData | None:
        """Return the step's adapters, None where all rows are the base model's."""
        slots, lengths = inputs.adapter_slots, inputs.query_lengths
        if max(slots) < 0:
            return None
        if self._adapter_plan is None:
            return self._kernel.batch(self._bank, slots, lengths)
        return self._adapter_plan.batch(sum(lengths), self._adapter_plan.update(slots, lengths))

    def _with_vocabulary(
        self, adapters: AdapterData | None, layout: StepLayout
    ) -> AdapterData | None:
        """Join what the step's adapters change of embedding and head, where some do."""
        if adapters is None or not adapts_vocabulary(self._bank, layout.adapter_slots):
            return adapters
        slots = np.repeat(np.array(layout.adapter_slots), np.diff(layout.bounds))
        return VocabularyAdapters(adapters, self._bank, slots, slots[layout.last_tokens])

    def _on_device(self) -> AbstractContextManager[object]:
        """Make this rank's device the thread's own: pinning and events look at it."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _report(self, num_blocks: int) -> RunnerReport:
        loaded, size = self._loaded, self._bank.size
        return RunnerReport(
            num_blocks=num_blocks,
            block_size=self._size.block_size,
            projections=tuple(p.name for p in loaded.model.projections),
            adapter_pages=size.pages,
            pool_pages=self._bank.pool_pages,
            rope_sets=loaded.architecture.rope_sets,
            adapter_slots=size.slots,
            host_bytes=self._bank.host_capacity,
            max_total_tokens=self._size.max_total_tokens,
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            device=str(self._device),
            attention=self._attention.backend.name,
            attention_reason=self._attention.reason,
            adapter_kernel=self._kernel.name,
            adapter_kernel_reason=self._kernel.reason,
            weight_bytes_read=loaded.bytes_read,
            weight_bytes_resident=loaded.bytes_resident,
            kv_bytes=num_blocks * self._cache_spec.bytes_per_page,
            adapter_pool_bytes=self._bank.pool_bytes,
            load_seconds=loaded.seconds,
            captured_rows=self._decode_graphs.sizes if self._decode_graphs is not None else (),
            captured_tokens=self._piecewise_graphs.sizes
            if self._piecewise_graphs is not None
            else (),
        )
