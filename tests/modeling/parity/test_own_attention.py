"""Types whose attention transformers computes in code of their own, against transformers + PEFT."""

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.wire.adapters import AdapterError
from configs.wire.sampling import Sampling
from modeling.models.generic import cuts, own_attention
from modeling.models.generic.own_attention import OWN as CLASSES
from modeling.models.generic.own_attention import OwnAttention
from modeling.runner.load_paged import load_paged
from sharding.group import SingleRank
from sharding.slicing import Segments, fused_heads
from tests.checkpoints import load_oracle, oracle_logits
from tests.checkpoints_own import OWN, publish, write_own
from tests.modeling.parity.comparison import (
    BASE,
    BLOCK_SIZE,
    NUM_BLOCKS,
    Setting,
    World,
    compare,
    engine_config,
    expect_mismatch,
    full_logprobs,
    place_all,
)
from tests.modeling.stepping import Asked, generate
from tests.oracle import TOLERANCE
from tests.sweeps import swept, swept_rows

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")

PROMPT = [5, 9, 7, 33, 60, 21, 4, 90, 11]
EVERYONE = [BASE, "r8", "columns", "rows"]

MAIN = {
    *(("bloom_uneven", 2), ("codegen", 2), ("falcon", 2), ("falcon_groups", 4)),
    ("mpt_bounded", 2),
}
"""Slopes of no power of two, KV heads of several ranks, one KV head, blocks, three parts."""


@pytest.mark.parametrize(
    ("variant", "ranks"), swept_rows(product(OWN, (1, 2, 4)), lambda *row: row in MAIN)
)
def test_together(world: World, variant: str, ranks: int) -> None:
    """Base and adapters in one batch, prompts in chunks; each request is preempted once."""
    compare(world, Setting("own", variant, ranks, EVERYONE, rejoins_at=3))


@pytest.mark.parametrize("variant", swept(OWN, lambda variant: variant in ("bloom", "gpt_neo")))
def test_scheduled(world: World, variant: str) -> None:
    """Under the real scheduler: prefix hits, and requests that are preempted and lost."""
    names, lengths = [BASE, BASE, "r8"], (37, 37, 21)
    compare(world, Setting("own", variant, 2, names, lengths=lengths, lost_at=9))


def test_blocks_behind_windows_serve_other_tokens(world: World) -> None:
    names, lengths = [BASE, "r8", BASE, BASE], (70, 61, 53, 70)
    compare(world, Setting("own", "gpt_neo", 1, names, lengths=lengths, blocks=12))


@pytest.mark.parametrize(
    "variant", swept(OWN, lambda variant: variant in ("bloom", "falcon_eleven", "gptj"))
)
def test_vocabulary(world: World, variant: str) -> None:
    """Adapters on embedding and head too, which are one matrix or two, the head with a bias."""
    compare(world, Setting("own", variant, 2, [BASE, "everything"], vocabulary=True))


def test_a_heads_bias_that_was_trained_is_refused(world: World, tmp_path: Path) -> None:
    source = world.adapter("own", "gptj", "everything")
    assert source is not None
    file = Path(shutil.copytree(source, tmp_path / "trained")) / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.lm_head.base_layer.bias"][3] += 1
    save_file(tensors, file)
    config = engine_config(world.model("own", "gptj"))
    opened = config.adapters.model_copy(update={"vocabulary": True})
    config = config.model_copy(update={"adapters": opened})
    runner = load_paged(config, SingleRank(), torch.device("cpu")).allocate()
    with pytest.raises(AdapterError, match=r"lm_head\.base_layer\.bias is not this model's bias"):
        place_all(runner, [file.parent])


@pytest.mark.parametrize("variant", swept(OWN, lambda variant: variant == "falcon_groups"))
def test_dora(world: World, variant: str) -> None:
    compare(world, Setting("own", variant, 2, [BASE, "dora"]))


def error(model: Path, prompt: list[int], told_by: Path | None = None) -> float:
    """How far the first token's logprobs are from transformers', of the same or another folder."""
    runner = load_paged(engine_config(model), SingleRank(), torch.device("cpu")).allocate()
    asked = Asked(prompt, 1, sampling=Sampling(logprobs=96), chunk=7)
    (answer,) = generate(runner, [asked], NUM_BLOCKS, BLOCK_SIZE)
    told = oracle_logits(load_oracle(told_by or model), prompt)[-1].double().log_softmax(-1)
    return float((full_logprobs(answer)[0] - told).abs().max())


PUBLISHED: dict[str, tuple[str, ...]] = {
    "bloom": ("transformer.",),
    "codegen": ("", "transformer.h.0.attn.causal_mask"),
    "falcon": ("", "lm_head.weight"),
    "gpt_neo": ("", "transformer.h.1.attn.attention.bias"),
    "gpt_neox_japanese": ("", "gpt_neox_japanese.layers.0.attention.bias", "embed_out.weight"),
    "gptj": ("", "transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"),
}
"""What names lack in published files, and what these hold besides: masks, heads that are tied."""


@pytest.mark.parametrize("variant", PUBLISHED)
def test_published_names(tmp_path: Path, variant: str) -> None:
    model = write_own(tmp_path, variant)
    publish(model, *PUBLISHED[variant])
    assert error(model, PROMPT) <= TOLERANCE


@pytest.mark.parametrize(
    ("variant", "kind"), [("falcon", "RefinedWebModel"), ("falcon_groups", "RefinedWeb")]
)
def test_falcons_that_transformers_did_not_know(tmp_path: Path, variant: str, kind: str) -> None:
    """Files as they were published first, of 7B and 40B."""
    modern = write_own(tmp_path / "modern", variant)
    model = shutil.copytree(modern, tmp_path / "model")
    fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
    kept = ("vocab_size", "hidden_size", "alibi", "bias", "multi_query", "parallel_attn", "dtype")
    older = {
        **{key: fields[key] for key in kept},
        **{"n_head": fields["num_attention_heads"], "n_layer": fields["num_hidden_layers"]},
        **({"n_head_kv": fields["num_kv_heads"]} if kind == "RefinedWeb" else {}),
        **{"model_type": kind, "architectures": ["RWForCausalLM"]},
        "auto_map": {"AutoModelForCausalLM": "modelling_RW.RWForCausalLM"},
    }
    (model / "config.json").write_text(json.dumps(older), encoding="utf-8")
    assert error(model, PROMPT, modern) <= TOLERANCE


def test_alibi_far_behind_its_chunk(tmp_path: Path) -> None:
    """Where a type rounded its biases by the key's position, they would differ."""
    prompt = [3 + 7 * index % 90 for index in range(300)]
    assert error(write_own(tmp_path, "bloom_uneven"), prompt) <= TOLERANCE


def first_slopes(self: OwnAttention, config: Any, head_dim: int) -> tuple[float, ...] | None:
    """Those of the first rank's heads."""
    found = self.slopes(config)
    return None if found is None else tuple(found[: self._heads.num_heads].tolist())


def test_slopes_of_another_ranks_heads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnAttention, "_own_slopes", first_slopes)
    expect_mismatch(world, Setting("own", "bloom_uneven", 2, [BASE]))


CUTS: dict[str, dict[str, Any]] = {
    "codegen": {"order": "qkv"},
    "falcon_groups": {"sizes": (8, 2)},
    "mpt": {"sizes": (1, 1)},
}
"""What another type's product would be."""


@pytest.mark.parametrize("variant", swept(CUTS, lambda variant: variant == "codegen"))
def test_products_cut_as_another_types(
    world: World, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    def fused(
        queries: Segments, keys: Segments, head_dim: int, sizes: tuple[int, int], order: str
    ) -> Segments:
        fields = {"sizes": sizes, "order": order, **CUTS[variant]}
        return fused_heads(queries, keys, head_dim, **fields)

    monkeypatch.setattr(cuts, "fused_heads", fused)
    expect_mismatch(world, Setting("own", variant, 2, [BASE]))


FAULTS: dict[str, tuple[str, Any]] = {
    "mpt_bounded": ("bounded", OwnAttention.bounded),
    "gpt_neo": ("scale", OwnAttention.scale),
    "gptj": ("angles", OwnAttention.angles),
    "gpt_neox_japanese": ("result", lambda *given: (given[1], None, None)),
}
"""A part of each class that is left out."""


@pytest.mark.parametrize("variant", swept(FAULTS, lambda variant: variant == "mpt_bounded"))
def test_parts_left_out(world: World, monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    kind = variant.removesuffix("_bounded")
    monkeypatch.setattr(CLASSES[kind], *FAULTS[variant])
    expect_mismatch(world, Setting("own", variant, 1, [BASE]))


@pytest.mark.sweep
def test_neighbours_rotated_as_halves(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = own_attention._of_neighbours
    monkeypatch.setattr(
        own_attention, "_of_neighbours", lambda *given: real(*given)._replace(neighbours=False)
    )
    expect_mismatch(world, Setting("own", "codegen", 1, [BASE]))
