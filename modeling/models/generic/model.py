"""Any decoder of transformers over the paged cache, tensor-parallel, with adapters.

transformers builds the modules and runs them: what a family computes is written there once. Its
linear layers, embedding and head are replaced by ours, its attention goes to the paged cache, and
weights are cut while they are read.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.architectures.base import ArchitectureError
from configs.architectures.generic import GenericArchitecture
from modeling.adapters.norms import NormModule
from modeling.adapters.peft.tokens import token_projections
from modeling.adapters.product import AdapterData
from modeling.adapters.projection import BaseRows, Projection
from modeling.adapters.vocabulary import EndNames, vocabulary_projections
from modeling.models.base import AttentionLayer
from modeling.models.cache_name import cache_name
from modeling.models.context import PagedContext, StateRows
from modeling.models.generic.building import NOT_TAKEN, build
from modeling.models.generic.cuts import CutPlan
from modeling.models.generic.experts import RoutedLayers
from modeling.models.generic.found_norms import find_norms, input_shapes
from modeling.models.generic.fusions import fuse, norm_heads_alone
from modeling.models.generic.head_alone import without_decoder
from modeling.models.generic.indexed import MARKS, take_over_indexes
from modeling.models.generic.latents import keep_latents
from modeling.models.generic.layer_calls import Call, LayerCall, LayerForms, PagedLayers
from modeling.models.generic.linears import replace_linears, share_bases
from modeling.models.generic.modules import (
    CLEARS_PADDING,
    GenericEmbedding,
    GenericHead,
    embedding_norm,
    embedding_scale,
    head_scale,
    keep_inside,
)
from modeling.models.generic.names import SourceNames, find_sources, unread
from modeling.models.generic.outer_rows import OuterRows
from modeling.models.generic.own_attention import take_over
from modeling.models.generic.reading import read_rest
from modeling.models.generic.recurrent import RecurrentLayers
from modeling.models.generic.shared_tail import TYPES, SharedTail, first_shared
from modeling.models.generic.step import (
    MASKS,
    CurrentStep,
    PositionsAsLength,
    RotationLostError,
)
from modeling.models.generic.waits import HostNumbers, groups_can_be_captured, host_waits
from modeling.models.generic.windows import check_windows, chunks, marked_masks
from modeling.models.paged_base import read_score
from sharding.embedding import ParallelHead, VocabParallelEmbedding
from sharding.loader import Weights

logger = logging.getLogger("loray.modeling")

PROBE = (1, 2, 3, 4, 5, 6, 7)
"""Tokens of the forward that shows what each layer's attention is."""


class GenericForCausalLM(nn.Module):
    """A causal model of transformers; a `PagedModel`."""

    tail_attends = True
    _shared_tail: SharedTail | None = None
    unread: tuple[str, ...] = (
        r".*\.rotary_emb\.inv_freq",
        r".*\.att(n|ention)\.(causal_mask|(masked_)?bias)",
    )

    def __init__(self, architecture: GenericArchitecture, weights: Weights) -> None:
        """Read this rank's share; ArchitectureError and ValueError say what cannot be served."""
        super().__init__()
        self.dtype: torch.dtype = weights.dtype
        self.device: torch.device = weights.device
        self.vocab_size = architecture.vocab_size
        self.num_layers = architecture.num_layers
        self._step = CurrentStep()
        self._numbers: HostNumbers | None = None
        self.causal = build(architecture, weights.dtype)
        self.unread = (*self.unread, *unread(self.causal, architecture))
        # Llama 4 scales queries by positions that it counts itself.
        self._counts_positions = bool(getattr(self.causal.config, "attn_temperature_tuning", False))
        # MPT's decoder needs a mask, and hands on one of four dimensions as it is.
        makes_mask = self.causal.config.model_type == "mpt"
        self._mask = torch.ones(1, 1, 1, 1, device=self.device) if makes_mask else None
        padded = architecture.padded_tokens
        self._padded = torch.tensor(padded, device=self.device) if padded else None
        self._pad_token = architecture.pad_token
        self._idle_layers = architecture.idle_layers
        prefix = _prefix(self.causal)
        names = SourceNames(self.causal, weights.names())
        shared = find_sources(self.causal, names, weights)
        self._add_ends(weights, architecture)
        self.score: Tensor | None = read_score(architecture, weights, self.width)
        self._plan = plan = CutPlan(self.causal.config, prefix, weights.group)
        idle = architecture.idle_modules
        linears = replace_linears(self.causal, plan, weights, self._step, idle)
        share_bases(self.causal, shared)
        self.projections: tuple[Projection, ...] = tuple(
            replace(each, is_lost=names.are_lost(each.module.format(layer=0))) for each in linears
        )
        on_gpu = self.device.type == "cuda"
        over = weights.group if architecture.expert_parallel else None
        routed = RoutedLayers(self.causal, plan, len(self.projections), on_gpu, over)
        read_rest(self.causal, plan, weights, names, routed.own)
        if self.device.type == "meta":
            # It is built to be counted: nothing can be tried without values.
            return
        routed.leave_stored(on_gpu, weights.dtype)
        self.projections = (*self.projections, *routed.projections)
        self.adapts_experts_on_gpus = routed.on_gpus
        routed.install(self._step, self.device)
        self.has_expert_kernels = weights.dtype is torch.bfloat16 and routed.have_kernels
        self._longest = architecture.max_total_tokens
        self._finish(prefix)

    def _finish(self, prefix: str) -> None:
        """Put in what is computed otherwise than by transformers, and try the model."""
        self.causal.requires_grad_(False).train(False)
        take_over(self.causal, self._plan, self._step)
        fuse(self.causal, self._step, self.dtype)
        self._decoder = cast(nn.Module, getattr(self.causal, prefix))
        keep_inside(getattr(self._decoder, "embed_tokens_per_layer", None), self.vocab_size)
        self._cache_name = cache_name(self._decoder.forward)
        # Not among the submodules: its parameters would be found twice.
        self._tail = (without_decoder(self.causal, prefix),)
        for module in self.causal.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, "loray_step", self._step)  # noqa: B010 - modules are not ours
        self._recurrent = RecurrentLayers(self.causal, self._step, self._decoder.config)
        self._has_index = take_over_indexes(self.causal)
        self.projections = keep_latents(self.causal, self.projections)
        self._forms = self._learn_layers()
        # Whether a row chooses by an index follows from its length, which a graph does not know.
        has_form = not self._has_index and groups_can_be_captured(self.causal, self.dtype)
        self._shared_tail = self._find_tail()
        self.capturable = has_form and self._recurrent.can_be_captured() and self._never_waits()

    @classmethod
    def build(cls, config: GenericArchitecture, weights: Weights) -> "GenericForCausalLM":
        """The model of a checkpoint that holds nothing else."""
        return cls(config, weights)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """What attention is on this rank in each layer that attends."""
        return tuple(call.form for call in self._forms.values())

    @property
    def embedding(self) -> VocabParallelEmbedding:
        """The tokens' embedding, without adapters."""
        return self._embedding.base

    @property
    def decoder(self) -> nn.Module:
        """transformers' decoder: what it returns ends in what the head reads."""
        return self._decoder

    @property
    def states(self) -> RecurrentLayers | None:
        """The states of its recurrent layers; None without any."""
        return self._recurrent if self._recurrent.layers else None

    @property
    def split(self) -> "GenericForCausalLM | None":
        """The model, if it ends in layers that store nothing; see `shared_tail`."""
        return None if self._shared_tail is None else self

    @property
    def decoder_layers(self) -> Sequence[nn.Module]:
        """The decoder's layers; see `PagedModel`."""
        # With an index they return more than the stream; those that run again return several.
        is_plain = not self._has_index and not any(again for _, again in self._forms)
        return tuple(getattr(self._decoder, "layers", ())) if is_plain else ()

    @torch.inference_mode()
    def paged(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        context: PagedContext,
        lm_head_indices: Tensor | None = None,
        skip_lm_head: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """(logits [n, vocab_size] or what the head reads, None); see `PagedModel`."""
        layers = PagedLayers(context, self._forms)
        with self._step.using(layers, context.adapter_data, context.state_rows):
            hidden = self._decode(input_ids, position_ids)
        if lm_head_indices is not None:
            hidden = hidden[lm_head_indices]
        return (hidden if skip_lm_head else self.head(hidden, context.adapter_data)), None

    @torch.inference_mode()
    def trunk(
        self, input_ids: Tensor, position_ids: Tensor, context: PagedContext
    ) -> tuple[Tensor, ...]:
        """The stream behind the last layer that stores keys and values; see `SplitModel`."""
        assert self._shared_tail is not None
        layers = PagedLayers(context, self._forms)
        with self._shared_tail.before(), self._step.using(layers, context.adapter_data):
            self._decode(input_ids, position_ids)
            return (self._shared_tail.left(),)

    @torch.inference_mode()
    def tail(
        self,
        left: Sequence[Tensor],
        input_ids: Tensor,
        position_ids: Tensor,
        context: PagedContext,
    ) -> Tensor:
        """From that of some tokens to what the head reads; see `SplitModel`."""
        assert self._shared_tail is not None
        layers = PagedLayers(context, self._forms)
        with self._shared_tail.behind(*left), self._step.using(layers, context.adapter_data):
            return self._decode(input_ids, position_ids)

    @torch.inference_mode()
    def head(self, hidden: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """[n, hidden] to logits [n, vocab_size]; see `PagedModel`."""
        with self._step.using(None, adapter_data):
            logits: Tensor = self._tail[0](inputs_embeds=hidden[None]).logits[0]
        return logits

    def adapt_vocabulary(self, whole_ends: bool = False) -> None:
        """Let adapters change the embedding and the head too; see `PagedModel`."""
        if not self._has_plain_ends:
            logger.info("adapters cannot change this model's embedding and head")
            return
        ends = vocabulary_projections(self._ends, self._embedding.base, self._head.base, whole_ends)
        self.projections = (*self.projections, *ends)

    def token_projections(self) -> tuple[Projection, ...]:
        """What adapters change of single tokens; see `PagedModel`."""
        if not self._has_plain_ends:
            return ()
        ends = vocabulary_projections(self._ends, self._embedding.base, self._head.base)
        return token_projections(ends, head_has_bias=self._head.bias is not None)

    def norms(self) -> Sequence[NormModule]:
        """The decoder's norms that are whole on every rank; see `PagedModel`."""
        return self._norms

    def base_tensors(self) -> Mapping[str, BaseRows]:
        """Embedding and head, each under all of its names; see `PagedModel`."""
        ends = vocabulary_projections(self._ends, self._embedding.base, self._head.base)
        found = {f"{path}.weight": end.base_rows for end in ends for path in end.modules(0)}
        if (bias := self._head.bias) is not None:
            found[f"{self._ends.head}.bias"] = BaseRows(bias.detach(), 0, (len(bias),))
        if (scale := self._head.scale) is not None:
            path = f"{self._ends.head}.logit_scale"
            found[path] = BaseRows(scale.stored, 0, (len(scale.stored),))
        return found

    def _add_ends(self, weights: Weights, architecture: GenericArchitecture) -> None:
        """Replace embedding and head."""
        causal: Any = self.causal
        embed, head = causal.get_input_embeddings(), causal.get_output_embeddings()
        paths = {module: path for path, module in causal.named_modules()}
        self._ends = names = EndNames(paths[embed], paths[head])
        tied = causal.config.get_text_config(decoder=True).tie_word_embeddings
        is_listed = weights.lists(f"{names.embedding}.weight")
        is_cleared = embed.padding_idx is not None and causal.config.model_type in CLEARS_PADDING
        if tied:
            weights.stand_in(f"{names.embedding}.weight", f"{names.head}.weight")
        vocab_size, self.width = embed.weight.shape
        width = self.width
        base = VocabParallelEmbedding(names.embedding, vocab_size, width, weights)
        if is_listed and is_cleared:
            # Before a head that the checkpoint holds too is compared, as transformers does it.
            base.clear(embed.padding_idx)
        factor = embedding_scale(embed, self.device)
        outer = architecture.outer_tokens
        rows = OuterRows(outer, width, weights) if outer else None
        self._embedding = GenericEmbedding(base, self._step, factor, embedding_norm(embed), rows)
        num_logits = head.out_features
        whole_head = ParallelHead(names.head, num_logits, width, weights, base if tied else None)
        bias = None
        if head.bias is not None and not architecture.num_labels:
            bias = weights.parameter(f"{names.head}.bias", (num_logits,))
        scale = head_scale(head, names.head, weights)
        self._head = GenericHead(whole_head, self._step, bias, scale)
        self.logits_dtype = self.dtype if scale is None else torch.float32
        # PEFT's adapters leave out an embedding's norm and a head's scale, and ours count both
        # ends' rows alike.
        is_plain = self._embedding.norm is None and scale is None
        self._has_plain_ends = is_plain and num_logits == vocab_size
        causal.set_submodule(names.embedding, self._embedding)
        causal.set_submodule(names.head, self._head)

    def _decode(
        self, input_ids: Tensor | None, position_ids: Tensor, embeds: Tensor | None = None
    ) -> Tensor:
        """Tokens int64 [tokens], or instead embeds [tokens, hidden], to [tokens, hidden]."""
        options: dict[str, Any] = {"use_cache": False}
        if self._padded is not None and input_ids is not None:
            is_padded = (input_ids[:, None] == self._padded).any(1)
            input_ids = torch.where(is_padded, self._pad_token, input_ids)
        if self._mask is not None:
            options["attention_mask"] = self._mask
        if self._counts_positions:
            options["attention_mask"] = MASKS
            options[self._cache_name] = PositionsAsLength(position_ids)
        if self._has_index:
            options["attention_mask"] = MARKS
        given = {"input_ids": input_ids, "inputs_embeds": embeds, "position_ids": position_ids}
        own = {name: each[None] for name, each in given.items() if each is not None}
        with self._numbers or nullcontext():
            out = self._decoder(**own, **options)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _find_tail(self) -> SharedTail | None:
        """Return the layers at the end that store nothing; None without any."""
        layers, count, decoder = self.decoder_layers, self.num_layers, cast(Any, self._decoder)
        if decoder.config.model_type not in TYPES or len(layers) != count:
            return None
        first = first_shared(self._forms, count)
        return None if first == count else SharedTail(layers, first, self._forms)

    @torch.inference_mode()
    def _learn_layers(self) -> dict[Call, LayerCall]:
        """Compute a few tokens to see what each layer's attention is; all ranks do it together."""
        forms = LayerForms(chunks(self.causal.config))
        shapes: dict[str, tuple[int, ...]] = {}
        tokens = self._probe()
        rows = StateRows(slice(0, len(PROBE)), single=False, begins=True, slots=None)
        try:
            with (
                self._step.using(forms, None, (rows,)),
                input_shapes(self.causal, self._step, shapes),
                marked_masks(self._decoder.config),
            ):
                self._decode(*tokens)
        except RotationLostError as error:
            logger.info("q and k are rotated before they are stored: %s", error)
            norm_heads_alone(self.causal)
            self._step.rotates_at_once = True
            return self._learn_layers()
        except (ArchitectureError, torch.OutOfMemoryError):
            raise
        except NOT_TAKEN as error:
            raise ArchitectureError(
                f"transformers' {self.causal.config.model_type} cannot be computed by this "
                f"config.json, as its fields do not fit each other: {error!r}"
            ) from error
        self._norms = find_norms(self.causal, self._plan, shapes, len(PROBE))
        # Beside recurrent layers some are feed-forwards alone.
        all_attend = not self._recurrent.layers and not self._idle_layers
        layers = forms.layers(self.num_layers, all_attend)
        check_windows(self._decoder.config, layers, self._longest)
        return layers

    def _probe(self) -> tuple[Tensor, Tensor]:
        """A few tokens and their positions."""
        ids = torch.tensor(PROBE, device=self.device) % self.vocab_size
        return ids, torch.arange(len(PROBE), device=self.device)

    @torch.inference_mode()
    def _never_waits(self) -> bool:
        """Whether the host waits for the GPU nowhere, with HostNumbers or without."""
        if self.device.type != "cuda" or self._recurrent.layers:
            return True
        tokens = self._probe()

        def compute() -> None:
            with self._step.using(LayerForms({}), None, ()):
                self._decode(*tokens)

        if not host_waits(compute):
            return True
        self._numbers = HostNumbers(self.device)
        if not host_waits(compute):
            return True
        self._numbers = None
        name = type(self._decoder).__name__
        logger.info("transformers' %s cannot be captured: the host waits in it", name)
        return False


def _prefix(causal: PreTrainedModel) -> str:
    """Where the decoder is; a class may name its path inside of a larger model."""
    named: str = causal.base_model_prefix
    return named if hasattr(causal, named) else "model"
