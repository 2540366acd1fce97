"""Attention that transformers computes in a type's own code, not behind AttentionInterface.

A class here replaces a type's module: it says how the product of q, k and v lies, what rotates
heads or is added to scores, and what the module returns. The rest is alike.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.architectures.rope import Rope
from modeling.layers.angles import Angles
from modeling.layers.attention import split_heads
from modeling.layers.rotary import Rotary
from modeling.models.base import AttentionLayer
from modeling.models.generic.cuts import CutPlan
from modeling.models.generic.own_products import own_product
from modeling.models.generic.rotations import Layout, RotationForm
from modeling.models.generic.step import CurrentStep, Heads
from sharding.slicing import HeadCut

EMBEDDINGS = "position_embeddings"
"""The option in which a decoder hands its layers cosines and sines."""

HALVES = RotationForm(Layout.HALVES, neighbours=False, backwards=False, heads_at=1)


class OwnAttention(nn.Module):
    """Attention of one layer over the paged cache, which any type's forward calls by its names."""

    def __init__(
        self, module: Any, config: Any, heads: HeadCut, step: CurrentStep, rotary: Rotary | None
    ) -> None:
        """module: transformers', with linear maps of ours. rotary: as `rotary` made it."""
        super().__init__()
        product = own_product(config)
        assert product is not None
        self._product, self._heads, self._step, self._rotary = product, heads, step, rotary
        for name in (*product.inputs, product.output):
            self.add_module(name, getattr(module, name))
        self._layer: int = getattr(module, "layer_idx", getattr(module, "layer_id", 0))
        head_dim = product.head_dim(config)
        self._form = AttentionLayer(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=head_dim,
            scale=self.scale(module, head_dim),
            window=self.window(module, config),
            slopes=self._own_slopes(config, head_dim),
        )

    def forward(
        self, hidden_states: Tensor, *others: Tensor, **options: Any
    ) -> tuple[Tensor | None, ...]:
        """[1, tokens, hidden] to the same, and what else the type returns."""
        made = [getattr(self, name)(hidden_states)[0] for name in self._product.inputs]
        if len(made) == 1:
            q, k, v = split_heads(self.bounded(made[0]), self._heads)
        else:
            q, k, v = (each.unflatten(1, (-1, self._form.head_dim)) for each in made)
        angles = self.angles(options)
        heads = Heads(q, k, v, None, (angles, angles))
        attended = self._step.attend_whole(self._layer, heads, self._form)
        out: Tensor = getattr(self, self._product.output)(attended.flatten(1)[None])
        return self.result(out, *others)

    @classmethod
    def rotary(cls, config: Any, like: Tensor) -> Rotary | None:
        """What makes all layers' angles of positions; None where the decoder does, or none are."""
        return None

    def scale(self, module: Any, head_dim: int) -> float:
        """Of the scores."""
        return float(head_dim**-0.5)

    def window(self, module: Any, config: Any) -> int | None:
        """How many of the last tokens a token sees; None: all."""
        return None

    def slopes(self, config: Any) -> Tensor | None:
        """By which scores of all heads grow with the key's position; None: they do not."""
        return None

    def bounded(self, qkv: Tensor) -> Tensor:
        """The product with what is done to it before heads are cut."""
        return qkv

    def angles(self, options: Mapping[str, Any]) -> Angles | None:
        """By which q and k are rotated; options: of the call."""
        return None

    def result(self, out: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        """What the module returns; others: that its layer gave by position."""
        return out, None

    def _own_slopes(self, config: Any, head_dim: int) -> tuple[float, ...] | None:
        """Those of this rank's heads."""
        found = self.slopes(config)
        if found is None:
            return None
        ((start, stop),) = self._heads.queries
        return tuple(found[start // head_dim : stop // head_dim].tolist())


def _code(config: Any) -> Any:
    """transformers' module with the type's functions."""
    return import_module(type(config).__module__.replace(".configuration_", ".modeling_"))


def _slopes(biases: Tensor) -> Tensor:
    """[heads, 1, 2], of two neighbouring keys, to [heads]."""
    return (biases[:, 0, 1] - biases[:, 0, 0]).float()


class BloomAttention(OwnAttention):
    """BLOOM's, which adds the stream itself."""

    def slopes(self, config: Any) -> Tensor:
        """ALiBi's."""
        mask = torch.ones(1, 2)
        heads = config.num_attention_heads
        return _slopes(_code(config).build_alibi_tensor(mask, heads, torch.float32))

    def result(self, out: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        """The sum with the stream."""
        return out + others[0], None


class RotatedAttention(OwnAttention):
    """Falcon's: halves of heads are rotated, by what the decoder hands down."""

    def angles(self, options: Mapping[str, Any]) -> Angles:
        """Of the step's positions."""
        found: Angles = self._step.once(HALVES.angles, *options[EMBEDDINGS])
        return found


class GPTJAttention(OwnAttention):
    """GPT-J's and CodeGen's: neighbours are rotated, of a head's first part."""

    @classmethod
    def rotary(cls, config: Any, like: Tensor) -> Rotary:
        """CodeGen rotates in float32."""
        width = config.rotary_dim or config.hidden_size
        dtype = torch.float32 if config.model_type == "codegen" else like.dtype
        return Rotary(Rope(), width, dtype, like.device)

    def angles(self, options: Mapping[str, Any]) -> Angles:
        """Of the step's positions."""
        found: Angles = self._step.once(_of_neighbours, self._rotary, options["position_ids"])
        return found


def _of_neighbours(rotary: Rotary, position_ids: Tensor) -> Angles:
    return rotary.angles(position_ids[0])._replace(neighbours=True)


class GPTNeoAttention(OwnAttention):
    """GPT-Neo's: scores are not scaled, and every other layer has a window."""

    def scale(self, module: Any, head_dim: int) -> float:
        """None."""
        return 1.0

    def window(self, module: Any, config: Any) -> int | None:
        """Of layers that are local."""
        window: int = config.window_size
        return window if module.attention_type == "local" else None


class GPTNeoXJapaneseAttention(RotatedAttention):
    """GPT-NeoX Japanese's, which leaves adding its last bias to the layer."""

    def __init__(self, module: Any, *args: Any) -> None:
        super().__init__(module, *args)
        self.dense_bias = module.dense_bias

    def result(self, out: Tensor, *_others: Tensor) -> tuple[Tensor | None, ...]:
        """With the bias, of the last layer alone."""
        return out, None, self.dense_bias


class MptAttention(OwnAttention):
    """MPT's."""

    def __init__(self, module: Any, *args: Any) -> None:
        super().__init__(module, *args)
        self._bound: float | None = module.clip_qkv

    def scale(self, module: Any, head_dim: int) -> float:
        """The config's own, if it has one."""
        scale: float = module.softmax_scale
        return scale

    def slopes(self, config: Any) -> Tensor:
        """ALiBi's."""
        return _slopes(_code(config).build_mpt_alibi_tensor(config.num_attention_heads, 2))

    def bounded(self, qkv: Tensor) -> Tensor:
        """Kept inside of the config's bound."""
        return qkv.clamp_(-self._bound, self._bound) if self._bound else qkv


OWN: dict[str, type[OwnAttention]] = {
    "bloom": BloomAttention,
    "codegen": GPTJAttention,
    "falcon": RotatedAttention,
    "gpt_neo": GPTNeoAttention,
    "gpt_neox_japanese": GPTNeoXJapaneseAttention,
    "gptj": GPTJAttention,
    "mpt": MptAttention,
    "xglm": OwnAttention,
}
"""By model_type."""


def take_over(causal: PreTrainedModel, plan: CutPlan, step: CurrentStep) -> None:
    """Replace the modules that attend, of types in the table, once their linear maps are ours."""
    config: Any = causal.config
    product = own_product(config)
    if product is None:
        return
    names = {*product.inputs, product.output}
    own = OWN[config.model_type]
    rotary = own.rotary(config, cast(Any, causal).get_input_embeddings().weight)
    for path, module in list(causal.named_modules()):
        if names <= {name for name, _ in module.named_children()}:
            heads = plan.heads(path, product.head_dim(config))
            causal.set_submodule(path, own(module, config, heads, step, rotary))
