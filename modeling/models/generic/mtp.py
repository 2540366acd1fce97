"""The layer behind a model's last one that predicts a further token (MTP, arXiv:2412.19437, 2.2).

    g_p = norm(layer(W [norm(embed(t_{p+1})); norm(h_p)]))        h: what the model's head reads
    guess of t_{p+2} = head(g_p)

The layer is one of the model's own class, and attends to the entries of positions 0 .. p. Entries
of guessed tokens take g of the position before in place of h. Checkpoints have it under the number
behind the last layer's, with copies of embedding and head that are not read.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from configs.architectures.base import ArchitectureError, ModelArchitecture
from configs.architectures.generic import GenericArchitecture
from configs.architectures.rope import POSITIONS_PER_SET
from modeling.adapters.vocabulary import EndNames
from modeling.attention.base import AttentionSpec
from modeling.attention.scales import STORED_SCALE
from modeling.layers.norm import RMSNorm
from modeling.models.base import PagedModel
from modeling.models.context import GroupStep, PagedContext
from modeling.models.draft_layer import DraftStep
from modeling.models.generic.layer_calls import PagedLayers
from modeling.models.generic.model import GenericForCausalLM
from modeling.models.generic.modules import GenericEmbedding
from modeling.models.kv_groups import attention_specs, kv_layout
from sharding.checkpoint import Checkpoint, CheckpointError, TensorSource
from sharding.group import TensorParallel
from sharding.loader import LinearFormat, Weights

TYPES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""The `model_type`s of which such layers were compared with transformers' own."""

OTHER = "set engine.speculation.kind to prompt_lookup or none"

_OWN = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
_COUNT = "num_nextn_predict_layers"


class MtpLayer(GenericForCausalLM):
    """The layer, on one rank: a decoder of one layer that is given states beside tokens."""

    def __init__(
        self, target: GenericForCausalLM, architecture: GenericArchitecture, weights: Weights
    ) -> None:
        """architecture: as `_alone` returns it."""
        # In a tuple what is the target's is no module of this one.
        self._target = (target,)
        super().__init__(architecture, weights)
        size, eps = self.width, float(cast(Any, self.causal.config).rms_norm_eps)
        self.enorm, self.hnorm = (
            RMSNorm(f"mtp.{name}", size, eps, weights) for name in ("enorm", "hnorm")
        )
        self.eh_proj = weights.parameter("mtp.eh_proj.weight", (size, 2 * size))
        self.states_width = size

    @property
    def sources(self) -> Sequence[nn.Module]:
        """The target's decoder; see `DraftLayer`."""
        return (self._target[0].decoder,)

    def attention_spec(self, page_size: int) -> AttentionSpec:
        """What a backend must serve; page_size: tokens of a page."""
        (spec,) = attention_specs(self, kv_layout(self, page_size))
        return spec

    def from_target(self, inner: Tensor) -> Tensor:
        """The target's last hidden states are what it begins with."""
        return inner

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, positions: Tensor, states: Tensor, step: DraftStep
    ) -> Tensor:
        """Tokens beside states or g [tokens, width] to g; see `DraftLayer`."""
        embeds = self._target[0].embedding(input_ids)
        parts = self.enorm(embeds)[0], self.hnorm(states.contiguous())[0]
        x = F.linear(torch.cat(parts, dim=-1), self.eh_proj)
        group = GroupStep(step.cu_seqlens, step.tables, step.slots, step.attention)
        layers = PagedLayers(PagedContext([step.cache], (group,)), self._forms)
        with self._step.using(layers, None):
            return self._decode(None, positions % POSITIONS_PER_SET, x)

    def logits(self, g: Tensor) -> Tensor:
        """[n, width] to [n, vocab_size], by the target's head."""
        return self._target[0].head(g, None)

    def _add_ends(self, weights: Weights, architecture: GenericArchitecture) -> None:
        """Take the target's embedding; its head is the target's own."""
        causal: Any = self.causal
        paths = {module: path for path, module in causal.named_modules()}
        found = causal.get_input_embeddings(), causal.get_output_embeddings()
        self._ends = EndNames(*(paths[each] for each in found))
        target = self._target[0]
        self.width, self.logits_dtype = target.width, target.logits_dtype
        self._has_plain_ends = False
        self._embedding = GenericEmbedding(target.embedding, self._step, None, None, None)
        causal.set_submodule(self._ends.embedding, self._embedding)
        causal.set_submodule(self._ends.head, nn.Identity())


def load_mtp(
    target: PagedModel,
    architecture: ModelArchitecture,
    source: TensorSource,
    group: TensorParallel,
    form: LinearFormat | None,
) -> MtpLayer:
    """Read this rank's share of the layer in the target's own files.

    architecture: the target's. form: how its linear maps are stored. ArchitectureError and
    CheckpointError say why there is none, or none that is served.
    """
    if not isinstance(target, GenericForCausalLM):
        raise ArchitectureError(
            f"engine.speculation.kind mtp is served for {', '.join(TYPES)}, and "
            f"{architecture.architecture} is none of these: {OTHER}"
        )
    assert isinstance(architecture, GenericArchitecture)
    alone, first = _alone(architecture), architecture.num_layers
    if isinstance(source, Checkpoint):
        source.keep_part(lambda name: _own_name(name, f"model.layers.{first}."))
        if not source.names():
            raise CheckpointError(
                f"config.json gives {_COUNT}, and the files have no tensor of "
                f"model.layers.{first}: take files that have it, or {OTHER}"
            )
    weights = Weights(source, group, target.dtype, target.device, form)
    layer = MtpLayer(target, alone, weights)
    weights.finish((*layer.unread, STORED_SCALE))
    return layer


def _own_name(name: str, prefix: str) -> str | None:
    """From a checkpoint's name to the one in a model of this layer alone; None for what is not."""
    rest = name.removeprefix(prefix)
    if rest == name or rest in _COPIES:
        return None
    if rest in _OWN:
        return f"mtp.{rest}"
    return "model.norm.weight" if rest == "shared_head.norm.weight" else f"model.layers.0.{rest}"


def _alone(architecture: GenericArchitecture) -> GenericArchitecture:
    """A model of the layer alone; ArchitectureError where there is none that is served."""
    settings = architecture.settings
    kind, count = settings["model_type"], settings.get(_COUNT)
    if kind not in TYPES:
        raise ArchitectureError(
            f"engine.speculation.kind mtp is served for {', '.join(TYPES)}; this is a {kind}: "
            f"{OTHER}"
        )
    if count != 1:
        raise ArchitectureError(
            f"engine.speculation.kind mtp needs {_COUNT} 1 in config.json, which has {count}: "
            f"{OTHER}"
        )
    if architecture.quantisation is not None and architecture.quantisation.others:
        raise ArchitectureError(
            "engine.speculation.kind mtp is not served where quantization_config has several "
            f"schemes, which name layers by their numbers: {OTHER}"
        )
    # It is a mixture, whatever the model's first layers are.
    alone = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]}
    left = {key: value for key, value in settings.items() if key not in (_COUNT, "layer_types")}
    return architecture.model_copy(update={"settings": {**left, **alone}, "num_layers": 1})
