"""A runner against the oracle: the same tokens, the same logits, on every rank."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.adapters import AdaptersConfig
from configs.engine import CacheConfig, Device, EngineConfig, LimitsConfig
from configs.model import ModelConfig
from configs.wire.adapters import AdapterKey, FetchedAdapter
from configs.wire.sampling import Sampling
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from modeling.runner.paged import ModelRunner
from sharding.group import TensorParallel
from tests.checkpoints import (
    FUSED_LINEARS,
    LINEARS,
    SHARED,
    AdapterRecipe,
    write_adapter,
    write_llama,
    write_relative,
)
from tests.checkpoints_experts import EXPERT_ADAPTERS, converted, write_mixture
from tests.checkpoints_generic import (
    GENERIC_ADAPTERS,
    GENERIC_ENDS,
    INDEX_ADAPTERS,
    MIXER_ADAPTERS,
    MIXER_ENDS,
    write_generic,
    write_headless,
)
from tests.checkpoints_others import (
    GPT2_ADAPTERS,
    GPT2_ENDS,
    GPT_NEOX_ADAPTERS,
    GPT_NEOX_ENDS,
    LLAMA_ENDS,
    OPT_ADAPTERS,
    OPT_ENDS,
    write_gpt2,
    write_gpt_neox,
    write_opt,
)
from tests.checkpoints_own import OWN_ADAPTERS, write_own
from tests.checkpoints_stacks import OUTER_ADAPTERS, STACK_ADAPTERS, write_stack
from tests.modeling.scheduled import Ranks, generate_scheduled
from tests.modeling.staging import stage
from tests.modeling.stepping import Answer, Asked, generate
from tests.oracle import NUM_TOKENS, TOLERANCE, Truth, prompt_truth
from tests.ranks import run_in_memory

BASE = "base"
NUM_BLOCKS = 64
BLOCK_SIZE = 16
FLASH_ATTN_BLOCK_SIZE = 256
"""The smallest that flash-attn has kernels for."""
WHOLE = 10**6
"""A chunk that holds any prompt."""

RANKS = ("r1", "r16", "r64")
"""Adapters that every paged family has: the smallest rank, a common one, the largest permitted."""

ADAPTERS: dict[str, AdapterRecipe] = {
    "r4": AdapterRecipe(r=4, seed=11),
    "r8": AdapterRecipe(r=8, alpha=16.0, seed=12),
    "r24": AdapterRecipe(r=24, alpha=32.0, seed=13),
    "rslora": AdapterRecipe(r=8, alpha=6.0, use_rslora=True, seed=14),
    "last_layer": AdapterRecipe(r=4, layers_to_transform=[1], std=0.2, seed=15),
    "columns": AdapterRecipe(r=5, target_modules=("q_proj", "v_proj"), std=0.2, seed=16),
    "rows": AdapterRecipe(r=6, target_modules=("o_proj", "down_proj"), std=0.2, seed=17),
    "patterns": AdapterRecipe(
        r=4,
        seed=18,
        extra={
            "rank_pattern": {"v_proj": 12, r"layers\.0\.mlp\..*": 2},
            "alpha_pattern": {"o_proj": 3, "layers.1.self_attn.q_proj": 20},
        },
    ),
}


def _ranks(targets: tuple[str, ...]) -> dict[str, AdapterRecipe]:
    def recipe(r: int) -> AdapterRecipe:
        # The wider the rank, the smaller its entries: the logits move about as much.
        std = 0.2 * r**-0.5
        return AdapterRecipe(r=r, alpha=2.0 * r, target_modules=targets, std=std, seed=30 + r)

    return {name: recipe(r) for name, r in zip(RANKS, (1, 16, 64), strict=True)}


FUSED_ADAPTERS: dict[str, AdapterRecipe] = {
    "r8": AdapterRecipe(r=8, alpha=16.0, target_modules=FUSED_LINEARS, seed=12),
    "columns": AdapterRecipe(r=5, target_modules=("qkv_proj", "gate_up_proj"), std=0.2, seed=16),
    "rows": AdapterRecipe(r=6, target_modules=("o_proj", "down_proj"), std=0.2, seed=17),
    "patterns": AdapterRecipe(
        r=4,
        target_modules=FUSED_LINEARS,
        seed=18,
        extra={"rank_pattern": {"qkv_proj": 12}, "alpha_pattern": {"gate_up_proj": 3}},
    ),
    **_ranks(FUSED_LINEARS),
}
"""For models whose checkpoint fuses q, k, v and gate, up."""

VOCABULARY_ADAPTERS: dict[str, AdapterRecipe] = {
    "r8": ADAPTERS["r8"],
    "head": AdapterRecipe(r=5, target_modules=("lm_head",), std=0.2, seed=21, save_embeddings=True),
    "embedding": AdapterRecipe(
        r=6, target_modules=("embed_tokens",), std=0.2, seed=22, save_embeddings=False
    ),
    "everything": AdapterRecipe(
        r=12,
        use_rslora=True,
        target_modules=(*LINEARS, "embed_tokens", "lm_head"),
        seed=23,
        std=0.05,
        save_embeddings=True,
    ),
    "ends": AdapterRecipe(
        target_modules=("embed_tokens", "q_proj", "lm_head"),
        seed=24,
        extra={
            "rank_pattern": {"lm_head": 11, "embed_tokens": 3},
            "alpha_pattern": {"model.embed_tokens": 5},
        },
        save_embeddings=True,
    ),
}
"""For servers whose adapters may change the vocabulary's two ends."""


COPIES = ("plain", "saved")
"""Adapters inside the layers, of which one file holds copies of embedding and head too."""


def _copies(targets: tuple[str, ...]) -> dict[str, AdapterRecipe]:
    plain = AdapterRecipe(target_modules=targets, seed=40)
    return dict(zip(COPIES, (plain, replace(plain, save_embeddings=True)), strict=True))


OPT_DORA = replace(
    OPT_ADAPTERS["r4"],
    target_modules=(*OPT_ADAPTERS["r4"].target_modules, "project_in", "project_out"),
)


def _dora(recipe: AdapterRecipe) -> dict[str, AdapterRecipe]:
    """Adapters of DoRA and with biases, and a plain one.

    some: leaves modules out, and its scales lie on a page of their own. biased: B has a bias.
    trained: the base model's biases were trained too.
    """
    dora = {**recipe.extra, "use_dora": True}
    targets = tuple(recipe.target_modules)
    return {
        "plain": replace(recipe, seed=61),
        "dora": replace(recipe, seed=62, extra=dora),
        "some": replace(recipe, r=8, seed=63, target_modules=targets[1::2], extra=dora),
        "biased": replace(recipe, seed=64, extra={**recipe.extra, "lora_bias": True}),
        "trained": replace(recipe, seed=65, extra={**dora, "bias": "lora_only"}),
    }


def _parameters(*names: str, beside: int = 1) -> dict[str, AdapterRecipe]:
    """Adapters of bare parameters, and a plain one of the same modules.

    parameters: all of them, of which one has a rank of its own. some: the first in one layer,
    beside so many modules.
    """
    modules = tuple(name.removesuffix(".weight") for name in names)
    ranks: dict[str, Any] = {"rank_pattern": {names[1]: 7, modules[0]: 9}}
    ranks |= {"alpha_pattern": {names[2]: 3}}
    plain = {"fan_in_fan_out": not beside}
    bare = AdapterRecipe(target_modules=(), seed=71, extra={"target_parameters": [*names], **ranks})
    return {
        "plain": AdapterRecipe(target_modules=modules, seed=72, extra=plain),
        "parameters": bare,
        "some": replace(
            bare,
            seed=73,
            target_modules=modules[1 : 1 + beside],
            use_rslora=True,
            extra={"target_parameters": [f"1.{names[0]}"]},
        ),
    }


def _tokens(
    *targets: str, ends: tuple[str, str] = ("embed_tokens", "lm_head"), **extra: Any
) -> dict[str, AdapterRecipe]:
    """Adapters that set single tokens' rows, and a plain one.

    tokens: a list of many, on several pages. embedding: by name. both: other
    tokens of the embedding than of the head. head: of the head alone.
    """
    plain = AdapterRecipe(target_modules=targets, seed=81, extra=extra)

    def recipe(seed: int, rows: object, targets: tuple[str, ...] = targets) -> AdapterRecipe:
        fields = {**extra, "trainable_token_indices": rows}
        return replace(plain, seed=seed, target_modules=targets, extra=fields)

    embedding, head = ends
    return {
        "plain": plain,
        "tokens": recipe(82, [95, *range(3, 90, 3)]),
        "embedding": recipe(83, {embedding: [*range(2, 90, 2)]}, targets[:1]),
        "both": recipe(84, {embedding: [7, 5, 11], head: [*range(20, 50)]}, targets[:1]),
        "head": recipe(85, {head: [*range(0, 90, 4)]}, targets[:1]),
    }


def _norms(targets: tuple[str, ...], *entries: str, **extra: Any) -> dict[str, AdapterRecipe]:
    """Adapters that bring norms, and a plain one.

    norms: all entries of modules_to_save. last: the last of them, beside DoRA. scarce: nothing
    else but one module.
    """
    plain = AdapterRecipe(target_modules=targets, seed=91, extra=extra)

    def recipe(seed: int, entries: Sequence[str], **more: Any) -> AdapterRecipe:
        return replace(
            plain, seed=seed, extra={**extra, "modules_to_save": [*entries, "absent"], **more}
        )

    return {
        "plain": plain,
        "norms": recipe(92, entries),
        "last": recipe(93, entries[-1:], use_dora=True),
        "scarce": replace(recipe(94, entries[:1]), target_modules=targets[:1], r=1),
    }


def _whole(targets: tuple[str, ...], *entries: str, **extra: Any) -> dict[str, AdapterRecipe]:
    """Adapters that bring whole linear maps, and a plain one.

    whole: all entries of modules_to_save. one: the first, in one layer, beside DoRA. biased: all,
    beside the biases of all other modules.
    """
    plain = AdapterRecipe(target_modules=targets, seed=101, extra=extra)
    saved = {**extra, "modules_to_save": [*entries]}
    alone = {**extra, "modules_to_save": [entries[0]], "use_dora": True}
    return {
        "plain": plain,
        "whole": replace(plain, seed=102, extra=saved),
        "one": replace(plain, seed=103, extra=alone),
        "biased": replace(plain, seed=104, extra={**saved, "bias": "all"}),
    }


@dataclass(frozen=True)
class Family:
    """One kind of model: how to write a tiny one of a variant, and an adapter for it."""

    write: Callable[..., Path]
    adapters: dict[str, AdapterRecipe] = field(
        default_factory=lambda: {**ADAPTERS, **_ranks(LINEARS)}
    )


FAMILIES: dict[str, Family] = {
    "llama": Family(write_llama),
    "relative": Family(write_relative),
    "fused": Family(write_relative, FUSED_ADAPTERS),
    "vocabulary": Family(write_llama, VOCABULARY_ADAPTERS),
    "vocabulary_relative": Family(write_relative, VOCABULARY_ADAPTERS),
    "generic": Family(write_generic, GENERIC_ADAPTERS),
    "mixers": Family(write_generic, MIXER_ADAPTERS),
    "mixers_ends": Family(write_generic, MIXER_ENDS),
    "indexed": Family(write_generic, INDEX_ADAPTERS),
    "mixture": Family(write_mixture, EXPERT_ADAPTERS),
    "headless": Family(write_headless, EXPERT_ADAPTERS),
    "converted": Family(write_generic, converted("qwen3_moe")),
    "converted_mixtral": Family(write_generic, converted("mixtral")),
    "own": Family(write_own, OWN_ADAPTERS),
    "stack": Family(write_stack, STACK_ADAPTERS),
    "decoder": Family(write_stack, GENERIC_ADAPTERS),
    "outer": Family(write_stack, OUTER_ADAPTERS),
    "generic_ends": Family(write_generic, GENERIC_ENDS),
    "gpt2": Family(write_gpt2, GPT2_ADAPTERS),
    "opt": Family(write_opt, OPT_ADAPTERS),
    "gpt_neox": Family(write_gpt_neox, GPT_NEOX_ADAPTERS),
    "llama_ends": Family(write_llama, LLAMA_ENDS),
    "gpt2_ends": Family(write_gpt2, GPT2_ENDS),
    "opt_ends": Family(write_opt, OPT_ENDS),
    "gpt_neox_ends": Family(write_gpt_neox, GPT_NEOX_ENDS),
    "llama_copies": Family(write_llama, _copies(LINEARS)),
    "gpt2_copies": Family(write_gpt2, _copies(("c_attn", "c_fc"))),
    "opt_copies": Family(write_opt, _copies(("q_proj", "fc1"))),
    "llama_dora": Family(write_llama, _dora(AdapterRecipe(use_rslora=True))),
    "fused_dora": Family(write_relative, _dora(FUSED_ADAPTERS["r8"])),
    "gpt2_dora": Family(write_gpt2, _dora(GPT2_ADAPTERS["r4"])),
    "opt_dora": Family(write_opt, _dora(OPT_DORA)),
    "gpt_neox_dora": Family(write_gpt_neox, _dora(GPT_NEOX_ADAPTERS["r4"])),
    "generic_dora": Family(write_generic, _dora(GENERIC_ADAPTERS["r8"])),
    "llama_parameters": Family(
        write_llama,
        _parameters("self_attn.o_proj.weight", "self_attn.v_proj.weight", "mlp.up_proj.weight"),
    ),
    "ends_parameters": Family(
        write_llama,
        {
            "bare": AdapterRecipe(
                target_modules=("q_proj",),
                std=0.2,
                seed=74,
                extra={"target_parameters": ["embed_tokens.weight", "lm_head.weight"]},
            )
        },
    ),
    "gpt2_parameters": Family(
        write_gpt2,
        # PEFT has none of both over Conv1D.
        _parameters("attn.c_proj.weight", "attn.c_attn.weight", "mlp.c_fc.weight", beside=0),
    ),
    "generic_parameters": Family(
        write_generic,
        _parameters("self_attn.o_proj.weight", "self_attn.v_proj.weight", "mlp.up_proj.weight"),
    ),
    "llama_tokens": Family(write_llama, _tokens("q_proj", "down_proj")),
    "gpt2_tokens": Family(
        write_gpt2, _tokens("c_attn", "mlp.c_proj", ends=("wte", "lm_head"), fan_in_fan_out=True)
    ),
    "llama_norms": Family(write_llama, _norms(("q_proj", "down_proj"), "norm", "model.norm")),
    "gpt2_norms": Family(
        write_gpt2,
        {
            **_norms(("c_attn", "mlp.c_proj"), "ln_1", "ln_2", "ln_f", fan_in_fan_out=True),
            "biases": AdapterRecipe(
                target_modules=("c_attn",),
                seed=95,
                extra={"bias": "all", "modules_to_save": ["ln_f"], "fan_in_fan_out": True},
            ),
        },
    ),
    "llama_whole": Family(
        write_llama, _whole(("q_proj",), "layers.1.self_attn.k_proj", "o_proj", "down_proj")
    ),
    "gpt2_whole": Family(
        write_gpt2, _whole(("c_fc",), "h.1.mlp.c_proj", "c_attn", fan_in_fan_out=True)
    ),
    "generic_whole": Family(
        write_generic, _whole(("q_proj",), "layers.1.mlp.gate_proj", "v_proj", "down_proj")
    ),
    "mixers_whole": Family(
        write_generic, _whole(("o_proj",), "layers.0.linear_attn.out_proj", "in_proj_qkvz")
    ),
    "latents": Family(
        write_mixture,
        {
            **_dora(AdapterRecipe(r=4, target_modules=("q_b_proj", "kv_b_proj"), std=0.2)),
            "wide": AdapterRecipe(r=24, target_modules=("kv_b_proj", "o_proj"), seed=66),
            "whole": AdapterRecipe(
                target_modules=("o_proj",), seed=67, extra={"modules_to_save": ["kv_b_proj"]}
            ),
        },
    ),
    "longlora": Family(
        write_generic,
        {
            "plain": AdapterRecipe(seed=96),
            "longlora": AdapterRecipe(
                target_modules=("q_proj", "k_proj", "v_proj", "o_proj"),
                seed=97,
                extra={"modules_to_save": ["embed_tokens", "norm"]},
            ),
        },
    ),
    "generic_norms": Family(
        write_generic,
        _norms(("q_proj", "down_proj"), "q_norm", "k_norm", "layernorm", "model.norm"),
    ),
    "mixer_norms": Family(
        write_generic, _norms(("q_proj", "out_proj"), "input_layernorm", "model.norm")
    ),
    "generic_tokens": Family(write_generic, _tokens("q_proj", "down_proj")),
    "gpt_neox_copies": Family(write_gpt_neox, _copies(("query_key_value", "dense_h_to_4h"))),
}
"""Another model is another row; its adapters name its own modules."""


Run = Callable[[int, Callable[[TensorParallel], list[Answer]]], list[list[Answer]]]
"""`run_ranks` or `run_in_memory`."""


class Mismatch(AssertionError):
    """The runner and the oracle do not say the same."""


@dataclass(frozen=True)
class Setting:
    """One comparison: a model on some ranks, and the adapters that share its batch.

    vocabulary: whether adapters may change embedding and head. copies: places on the device for
    whole ones. rejoins_at: after how many tokens
    the first request is preempted, each other one token later; None for never. lengths: of the
    prompts, in tokens, under the real scheduler, its prefix cache and all; (): hand-made batches of
    other lengths. lost_at: after how many turns of that the ranks are lost and rebuilt. blocks: of
    the cache; None: more than are needed. linears: of which adapters may bring whole maps.
    hits: prompts that the prefix cache must know, at least. spread: whether ranks have whole
    experts.
    """

    family: str
    variant: str
    ranks: int
    names: Sequence[str]
    chunk: int = 5
    vocabulary: bool = False
    rejoins_at: int | None = None
    copies: int = 0
    lengths: Sequence[int] = ()
    lost_at: int | None = None
    blocks: int | None = None
    linears: Sequence[str] = ()
    hits: int = 0
    spread: bool = False


@dataclass
class Comparison:
    """A setting that is tried, of which nothing is right until it was judged.

    faulty: the code was broken on purpose. right: the adapters whose answers are the oracle's on
    every rank. error: the largest difference of a logprob among them.
    """

    setting: Setting
    architecture: str
    faulty: bool = False
    right: set[str] = field(default_factory=set)
    error: float = 0.0


class Record:
    """What was compared, in order, for whoever wants a report of it."""

    def __init__(self) -> None:
        self.comparisons: list[Comparison] = []

    def begin(self, setting: Setting, model: Path, *, faulty: bool = False) -> Comparison:
        """Note that a setting is about to be tried on the model of that folder."""
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self.comparisons.append(Comparison(setting, config["architectures"][0], faulty))
        return self.comparisons[-1]


class World:
    """Tiny models and adapters on disk, written when first asked for; run: how ranks meet."""

    def __init__(self, root: Path, run: Run = run_in_memory) -> None:
        self._root = root
        self.run = run
        self.record = Record()

    def model(self, family: str, variant: str) -> Path:
        """The folder of a model."""
        folder = self._root / family / variant / "model"
        if not folder.exists():
            FAMILIES[family].write(folder, variant)
        return folder

    def adapter(self, family: str, variant: str, name: str) -> Path | None:
        """The folder of an adapter for that model; None for the base."""
        if name == BASE:
            return None
        folder = self._root / family / variant / name
        if not folder.exists():
            write_adapter(folder, self.model(family, variant), FAMILIES[family].adapters[name])
        return folder


def engine_config(model: Path, /, **changes: Any) -> EngineConfig:
    """A small engine on the CPU."""
    fields: dict[str, Any] = {
        "model": ModelConfig(id=str(model)),
        "device": Device.CPU,
        "cache": CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        "limits": LimitsConfig(max_running=16, max_step_tokens=256),
        "adapters": AdaptersConfig(
            device_pages=40, max_device_adapters=10, max_rank=64, host_bytes=2**26
        ),
    }
    return EngineConfig(**{**fields, **changes})


def poison(runner: ModelRunner) -> None:
    """Leave NaN wherever a request or an adapter before might have left anything."""
    for pool in runner._bank.pools:
        pool.a.fill_(float("nan"))
        pool.bt.fill_(float("nan"))
    for layer in runner._forward.cache:
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    states = runner._parts.weights.model.states
    for state in () if states is None else states.tensors():
        state.fill_(float("nan"))
    if torch.cuda.is_available():
        # Fills go by another stream, and this one may still wait for another rank.
        torch.cuda.synchronize()


def place_all(
    runner: ModelRunner, folders: Sequence[Path], group: TensorParallel | None = None
) -> None:
    """Stage the adapters and place each at its index, on pages that interleave."""
    pages = [list(range(count)) for count in runner._bank.pool_pages]
    for free in pages:
        random.Random(1).shuffle(free)
    for slot, folder in enumerate(folders):
        key = AdapterKey(slot + 1)
        fetched = FetchedAdapter(key, folder.name, str(folder), folder.name)
        shape = stage(runner, fetched, group)
        pools = [(pages[key_], count) for key_, count in enumerate(shape.num_pages)]
        runner.load_adapter(key, slot, [[free.pop() for _ in range(n)] for free, n in pools])


def compare(
    world: World, setting: Setting, *, faulty: bool = False, run: Run | None = None
) -> None:
    """Generate for every adapter of the setting in one batch; Mismatch where the oracle differs.

    run: what brings the ranks together, where that is not the world's choice.
    """
    model = world.model(setting.family, setting.variant)
    seen = world.record.begin(setting, model, faulty=faulty)
    folders = [world.adapter(setting.family, setting.variant, name) for name in setting.names]
    lengths = setting.lengths or [7 + 4 * i for i in range(len(folders))]
    told = [prompt_truth(model, *one) for one in zip(folders, lengths, strict=True)]
    vocab_size = told[0][1].logits.shape[1]
    adapters = [folder for folder in folders if folder is not None]
    served = [each / SHARED if (each / SHARED).exists() else each for each in adapters]
    requests = [
        Asked(
            prompt=prompt,
            num_tokens=NUM_TOKENS,
            slot=-1 if folder is None else adapters.index(folder),
            sampling=Sampling(logprobs=vocab_size),
            chunk=setting.chunk + i,
            joins_at=2 * i,
            rejoins_at=None if setting.rejoins_at is None else setting.rejoins_at + i,
        )
        for i, (folder, (prompt, _)) in enumerate(zip(folders, told, strict=True))
    ]
    config = engine_config(model)
    opened = config.adapters.model_copy(update=_opened(setting))
    config = config.model_copy(update={"adapters": opened, "expert_parallel": setting.spread})
    if setting.blocks is not None:
        cache = config.cache.model_copy(update={"num_blocks": setting.blocks})
        config = config.model_copy(update={"cache": cache})
    answer = partial(answers_scheduled, setting) if setting.lengths else answers_by_hand
    results = (run or world.run)(setting.ranks, partial(answer, config, served, requests))
    judge(seen, results, [truth for _, truth in told])


def _opened(setting: Setting) -> dict[str, Any]:
    """What adapters of the setting may change, as the server's config says it."""
    return {
        "vocabulary": setting.vocabulary,
        "vocabulary_copies": setting.copies,
        "whole_linears": dict.fromkeys(setting.linears, 5),
    }


def answers_by_hand(
    config: EngineConfig, adapters: list[Path], requests: list[Asked], group: TensorParallel
) -> list[Answer]:
    runner = load_paged(config, group, pick_device(config.device)).allocate()
    poison(runner)
    place_all(runner, adapters, group)
    answers = generate(runner, requests, NUM_BLOCKS, BLOCK_SIZE)
    runner.check()
    return answers


def answers_scheduled(
    setting: Setting,
    config: EngineConfig,
    adapters: list[Path],
    requests: list[Asked],
    group: TensorParallel,
) -> list[Answer]:
    def start() -> ModelRunner:
        return load_paged(config, group, torch.device("cpu")).allocate()

    chunk = min(setting.chunk, config.limits.max_step_tokens // 2)
    ranks = Ranks(start, adapters, chunk, group)
    answers = generate_scheduled(ranks, requests, setting.lost_at)
    assert sum(ended.cached_tokens > 0 for ended in ranks.ended.values()) >= setting.hits
    return answers


def judge(seen: Comparison, results: Sequence[Sequence[Answer]], truths: Sequence[Truth]) -> None:
    """Note which answers are right on every rank; Mismatch tells of all that are not.

    A name that has several answers is right when all of them are.
    """
    wrong, faulty = [], set()
    for i, (name, truth) in enumerate(zip(seen.setting.names, truths, strict=True)):
        found = [_difference(answers[i], truth) for answers in results]
        faults = [f"rank {rank}: {fault}" for rank, (fault, _) in enumerate(found) if fault]
        if faults:
            wrong.append(f"{name}: {'; '.join(faults)}")
            faulty.add(name)
        else:
            seen.right.add(name)
            seen.error = max(seen.error, *(error for _, error in found))
    seen.right -= faulty
    if wrong:
        where = f"{seen.architecture}, {seen.setting.variant}, {seen.setting.ranks} ranks"
        raise Mismatch("\n".join([where, *wrong]))


def _difference(answer: Answer, truth: Truth) -> tuple[str, float]:
    """What is wrong with an answer, empty if nothing, and how far its logprobs are off."""
    found = full_logprobs(answer)
    # Where a token differs, later rows answer another question.
    equal = [a == b for a, b in zip(answer.tokens, truth.tokens, strict=True)]
    same = equal.index(False) if False in equal else len(equal)
    error = float((found - truth.logprobs)[: same + 1].abs().max())
    if answer.tokens != truth.tokens or not error <= TOLERANCE:
        return f"{same} tokens are equal, logprobs differ by {error}", error
    return "", error


def full_logprobs(answer: Answer) -> Tensor:
    """[tokens, vocab], where every row asked for the whole vocabulary."""
    rows = []
    for own in answer.logprobs:
        assert own is not None
        row = torch.full((len(own.top_ids),), float("nan"), dtype=torch.float64)
        row[own.top_ids] = torch.tensor(own.top_logprobs, dtype=torch.float64)
        rows.append(row)
    return torch.stack(rows)


def expect_mismatch(world: World, setting: Setting) -> None:
    """The comparison must notice; only a Mismatch counts, never an accident."""
    with pytest.raises(Mismatch):
        compare(world, setting, faulty=True)
