"""The start of a paged runner: load the weights, measure the memory, allocate, warm up, capture."""

import logging
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn

from configs.adapters import AdaptersConfig
from configs.engine import EngineConfig
from modeling.adapters.bank import (
    AdapterBank,
    BankSize,
    copy_bytes,
    linear_bytes,
    page_bytes,
)
from modeling.adapters.kernels.select import select_kernel
from modeling.adapters.linear import base_linears
from modeling.adapters.norms import AdaptedNorms
from modeling.adapters.projection import WHOLE_KINDS, ProjectionKind
from modeling.adapters.score import ScoreHeads
from modeling.attention.base import AttentionBackend
from modeling.attention.clamping import ClampWatch
from modeling.attention.kv_layout import allocate_blocks
from modeling.attention.select import select_checking
from modeling.models.base import PagedModel
from modeling.quantisation.coded import codes_alone, keep_dequantised
from modeling.runner.block_tables import BatchSize
from modeling.runner.cache import choose_cache
from modeling.runner.captures import GraphSizes, StepGraphs, capture, graph_sizes_of
from modeling.runner.cuda_graphs import GraphParts
from modeling.runner.fitting import smaller_form, weight_sizes
from modeling.runner.forward import PagedForward
from modeling.runner.input_batch import InputBatch
from modeling.runner.layer_guesses import LayerDrafter
from modeling.runner.loading import (
    LoadedModel,
    load_model,
    read_draft_layer,
    read_heads,
    total_tokens,
)
from modeling.runner.memory import (
    CACHE_SETTINGS,
    POOL_SETTINGS,
    STATE_SETTINGS,
    NoCacheRoomError,
    adapter_pages,
    bank_size,
    check_linears,
    check_states,
    cpu_blocks,
    cuda_blocks,
    dequantised_bytes,
    device_memory,
    empty_blocks,
    expert_pages,
    fitting,
    vocabulary_copies,
)
from modeling.runner.paged import ModelRunner, PagedParts, StepBuffers
from modeling.runner.report import RunnerReport
from modeling.runner.shared import LoadedRunner, on_device
from modeling.runner.warmup import INTEGER_TOKENS, warmup_batches, widest_step
from modeling.sampling.grammars import Grammars
from modeling.sampling.prompt_scores import PromptReader
from modeling.transfer import StepClock
from sharding.group import TensorParallel
from sharding.progress import counted, timed
from sources.model import fetch_model

logger = logging.getLogger("loray.modeling")

NO_GRAPHS = StepGraphs(None, None)


def load_paged(config: EngineConfig, group: TensorParallel, device: torch.device) -> "LoadedPaged":
    """Load this rank's share of the weights and make its adapter pools.

    device: as pick_device returns it. All ranks call it together: an fp8 cache's scales may be
    measured, and are agreed upon.
    """
    with on_device(device):
        kernel = select_kernel(device)
        weights = load_model(config, group, device)
        model = weights.model
        grammars = Grammars(lambda: fetch_model(config.model), model.vocab_size)
        cache, attention = choose_cache(config, weights, group)
        longest = total_tokens(config, weights.architecture)
        _allocate_states(config, model)
        # Read behind the weights, so that the pools get their fraction of what is left.
        memory = device_memory(device) if device.type == "cuda" else None
        own, of_experts = _page_bytes(config.adapters, model)
        experts = expert_pages(config.adapters, of_experts, memory)
        pages = adapter_pages(config.adapters, own, memory, experts * of_experts)
        check_linears(linear_bytes(model.projections, model.dtype), memory)
        whole = copy_bytes(model.projections, model.dtype)
        copies = vocabulary_copies(config.adapters, whole, memory)
        size = bank_size(config.adapters, pages, copies, experts)
        bank = _bank(weights, size, device)
        weights = _with_dequantised(config, weights, cache.bytes_per_block)
        plan = kernel.plan(bank, config.limits.max_step_tokens) if kernel.plan and pages else None
    return LoadedPaged(
        PagedParts(
            config=config,
            device=device,
            weights=weights,
            kernel=kernel,
            bank=bank,
            size=BatchSize(
                config.limits.max_running,
                longest,
                min(group.kv.block_size for group in cache.groups),
                kv_groups=tuple(group.kv for group in cache.groups),
                strides=tuple(group.stride for group in cache.groups),
            ),
            grammars=grammars,
            cache=cache,
            attention=attention,
            adapter_plan=plan,
            norms=AdaptedNorms(bank, model.norms()),
            heads=read_heads(config, model, group),
            drafter=LayerDrafter.of(read_draft_layer(config, weights, group), config, cache),
        )
    )


def _with_dequantised(config: EngineConfig, weights: LoadedModel, block_bytes: int) -> LoadedModel:
    """Keep numbers beside integers, behind the pools, as far as the config allows."""
    model = weights.model
    memory = device_memory(model.device) if model.device.type == "cuda" else None
    most = dequantised_bytes(config, memory, block_bytes)
    kept = keep_dequantised(cast(nn.Module, model), most)
    if not kept:
        return weights
    name = str(model.dtype).removeprefix("torch.")
    forms = dict(weights.weight_forms) | {f"dequantised {name}": kept}
    return replace(weights, weight_forms=forms, bytes_resident=weights.bytes_resident + kept)


def _allocate_states(config: EngineConfig, model: PagedModel) -> None:
    """Take the memory of recurrent layers' states, for each batch slot; ValueError for heads."""
    states, count, kind = model.states, config.limits.max_running, config.speculation.kind
    if states is None:
        return
    if kind.reads_heads or kind.is_layer:
        raise ValueError(
            f"engine.speculation.kind {kind.value}: this model has recurrent layers, of which no "
            "state can go back behind wrong guesses: set it to none"
        )
    memory = device_memory(model.device) if model.device.type == "cuda" else None
    kept = config.kept_states
    check_states(count + kept, states.bytes_per_slot, memory)
    with fitting(STATE_SETTINGS):
        states.allocate(count, kept)
    logger.info(
        "recurrent layers keep %.1f MB of each sequence, %d of them at most, and copies behind %d "
        "prefixes: no tokens are guessed, and no steps with prompts captured",
        states.bytes_per_slot / 1e6,
        count,
        kept,
    )


@timed("adapter pools")
def _bank(weights: LoadedModel, size: BankSize, device: torch.device) -> AdapterBank:
    model, rows = weights.model, weights.base_tensors()
    linears = base_linears(cast(nn.Module, model))
    with fitting(POOL_SETTINGS):
        return AdapterBank(model.projections, size, model.dtype, device, rows, linears)


def _page_bytes(config: AdaptersConfig, model: PagedModel) -> tuple[int, int]:
    """Return the bytes of one page of every pool that has as many as all others, and of experts'.

    Those of embedding and head are left out where they have fewer.
    """
    alike = [p for p in model.projections if config.vocabulary or p.kind not in WHOLE_KINDS]
    experts = [p for p in alike if p.kind is ProjectionKind.EXPERTS]
    others = [p for p in alike if p.kind is not ProjectionKind.EXPERTS]
    return page_bytes(others, model.dtype), page_bytes(experts, model.dtype)


@dataclass(frozen=True)
class LoadedPaged(LoadedRunner):
    """A paged model on its device with its adapter pools; its cache is not allocated yet."""

    parts: PagedParts

    def measure(self) -> int:
        """Return how many cache blocks fit; all ranks call it together."""
        parts = self.parts
        config, block_bytes = parts.config, parts.bytes_per_block
        if config.cache.num_blocks is not None:
            return config.cache.num_blocks
        empty = empty_blocks(parts.size, config.kept_states)
        if parts.device.type == "cpu":
            return cpu_blocks(parts.size, block_bytes) if block_bytes else empty
        with on_device(parts.device):
            # Free memory is read last: the two measurements have freed what they took by then.
            with timed("largest step"):
                taken = self._step_peak()
            with timed("largest graphs"):
                taken += self._graph_bytes()
            if parts.drafter is not None:
                taken += parts.drafter.scratch_bytes
            taken += max(backend.scratch_bytes for backend in parts.backends)
            try:
                return cuda_blocks(config, device_memory(parts.device), taken, block_bytes, empty)
            except NoCacheRoomError as error:
                raise ValueError(f"{error}{self._smaller(error.lacking)}") from error

    @property
    def _state_bytes(self) -> int:
        states = self.parts.weights.model.states
        count = self.parts.size.max_running + self.parts.config.kept_states
        return 0 if states is None else states.bytes_per_slot * count

    @property
    def _kept_states(self) -> int | None:
        states = self.parts.weights.model.states
        return None if states is None else self.parts.config.kept_states

    def _smaller(self, lacking: int) -> str:
        """Return the forms of weights that would leave so many bytes more."""
        model = self.parts.weights.model
        sizes = weight_sizes(cast(nn.Module, model))
        smaller = smaller_form(sizes, model.dtype, sizes.dense_bytes(model.dtype) - lacking)
        return f"; or use another form: {smaller}" if smaller else ""

    def allocate(self, num_blocks: int | None = None, record: bool = True) -> ModelRunner:
        """Take the cache and the batch slots' buffers; all ranks call it together.

        On CUDA every kernel is run once, so that no request waits for a compiler, and steps are
        captured; record: at once, all of them.
        """
        if num_blocks is None:
            num_blocks = self.measure()
        with on_device(self.parts.device):
            buffers, graphs = self._buffers(num_blocks), NO_GRAPHS
            if self.parts.device.type == "cuda":
                # Warm up first: a capture must not meet a kernel that is still to be compiled.
                with timed("warm-up steps"):
                    self._warm_up(self._runner(num_blocks, buffers), num_blocks)
                graphs = self._capture(buffers, self._graph_sizes(), num_blocks)
                if record:
                    with timed("CUDA graphs"):
                        _record_all(graphs)
            return self._runner(num_blocks, buffers, graphs)

    def _runner(
        self, num_blocks: int, buffers: StepBuffers, graphs: StepGraphs = NO_GRAPHS
    ) -> ModelRunner:
        return ModelRunner(self.parts, buffers, graphs, self._report(num_blocks, graphs))

    def _buffers(self, num_blocks: int) -> StepBuffers:
        """Allocate the cache and the batch slots; a CUDA cache has one dummy block more."""
        parts = self.parts
        # Padding rows of captured steps write into the dummy block, number num_blocks.
        dummies = 1 if parts.device.type == "cuda" else 0
        with fitting(CACHE_SETTINGS):
            cache = allocate_blocks(parts.cache, num_blocks + dummies, parts.device)
        return StepBuffers(
            forward=PagedForward(parts.weights.model, cache, parts.norms, parts.split),
            input_batch=InputBatch(parts.size, parts.device, parts.grammars),
            prompts=PromptReader(
                parts.weights.model.vocab_size,
                parts.device,
                ScoreHeads(parts.bank, parts.weights.model.score).logits,
            ),
            clamp_watch=ClampWatch(cache),
            clock=StepClock(parts.device),
            drafts=parts.drafter.allocate(num_blocks + dummies) if parts.drafter else None,
        )

    def _step_peak(self) -> int:
        """Return the bytes that the widest step takes beyond weights, pools and cache."""
        device = self.parts.device
        config = self.parts.config
        batch = widest_step(self.parts.size, config.limits.max_step_tokens, config.speculation)
        num_blocks = 1 + max(block for row in batch.rows for block in row.blocks)
        # This runner and its buffers live until the method returns, so `before` counts them.
        runner = self._runner(num_blocks, self._buffers(num_blocks))
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        runner.step(batch).wait()
        return torch.cuda.max_memory_allocated(device) - before

    def _graph_sizes(self) -> GraphSizes:
        """What is captured; no decode steps where the attention cannot be captured."""
        config, groups = self.parts.config, self.parts.size.groups
        if not self.parts.weights.model.capturable:
            logger.info("no steps are captured: those of this model in this type cannot be")
            return GraphSizes()
        has_form = all(
            backend.graph_words(1, group.blocks(1)) is not None
            for backend, group in zip(self.parts.backends, groups, strict=True)
        )
        found = graph_sizes_of(config, has_form, bool(self._checking()))
        if self.parts.weights.model.states is not None:
            # Recurrent layers compute each row of a prompt by itself, and check no drafts.
            return GraphSizes(found.decode)
        # Graph pieces keep no states of inner layers.
        return found if self.parts.drafter is None else replace(found, mixed=())

    def _checking(self) -> tuple[AttentionBackend, ...]:
        """Return the attention of captured steps that check drafts; () where one has none."""
        found = tuple(map(select_checking, self.parts.backends))
        return tuple(each for each in found if each) if all(found) else ()

    def _graph_bytes(self) -> int:
        """Return what captured steps will take: the largest is tried, the others share with it."""
        sizes = self._graph_sizes()
        if not sizes:
            return 0
        buffers = self._buffers(1)
        before = device_memory(self.parts.device).free
        # Held until the memory is read again: a graph gives its memory back when it goes.
        captured = self._capture(buffers, sizes.largest, 1)
        _record_all(captured)
        taken = before - device_memory(self.parts.device).free
        del captured
        kinds = 1 if self.parts.adapter_plan is None else 2 + self.parts.has_expert_kernels
        # Entries of each size, and of most sizes the first guess and those behind it.
        kinds += 0 if self.parts.drafter is None else 3
        count = len(self.parts.weights.model.attention_layers)
        return max(0, taken) + kinds * sizes.others_bytes(count)

    def _capture(self, buffers: StepBuffers, sizes: GraphSizes, dummy_block: int) -> StepGraphs:
        model = self.parts.weights.model
        forward, width = self.parts.graph_forward(buffers.forward)
        parts = GraphParts(
            forward=forward,
            width=width,
            backends=self.parts.backends,
            state=buffers.input_batch,
            dummy_block=dummy_block,
            vocab_size=model.vocab_size,
            logits_dtype=model.logits_dtype,
            adapters=self.parts.adapter_plan,
            has_experts=self.parts.has_expert_kernels,
            is_recurrent=model.states is not None,
        )
        checking = self._checking() if sizes.checked else ()
        return capture(parts, sizes, self.parts.device, buffers.forward, checking, buffers.drafts)

    def _warm_up(self, runner: ModelRunner, dummy_block: int) -> None:
        """Run steps for every kernel, all of them in the dummy block."""
        slots = [-1] if self.parts.adapter_plan is None else [-1, 0]
        most = self.parts.config.limits.max_step_tokens
        more = INTEGER_TOKENS if codes_alone(cast(nn.Module, self.parts.weights.model)) else ()
        batches = list(warmup_batches(self.parts.size, most, dummy_block, slots, more))
        guesses, guessing = self.parts.draft_heads or 0, self.parts.config.speculation.max_running
        for batch in counted("warm-up steps, with what they compile", batches):
            own = guesses if len(batch.rows) <= guessing else 0
            runner.step(replace(batch, guesses=own)).wait()

    def _report(self, num_blocks: int, graphs: StepGraphs) -> RunnerReport:
        parts, attention = self.parts, self.parts.attention
        names = dict.fromkeys(choice.backend.name for choice in attention)
        reasons = dict.fromkeys(choice.reason for choice in attention)
        report = parts.report(
            num_blocks, parts.bytes_per_block, " + ".join(names), "; ".join(reasons)
        )
        return replace(
            report,
            weight_forms=parts.weights.weight_forms,
            paged=True,
            state_bytes=self._state_bytes,
            kept_states=self._kept_states,
            pool_pages=parts.bank.pool_pages,
            rope_sets=parts.weights.architecture.rope_sets,
            kv_groups=parts.size.kv_groups,
            captured_rows=() if graphs.decode is None else graphs.decode.sizes,
            draft_heads=parts.draft_heads,
        )


@torch.inference_mode()
def _record_all(graphs: StepGraphs) -> None:
    graphs.record_all()
