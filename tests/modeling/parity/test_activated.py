"""Activated adapters (aLoRA): the base model up to their invocation, PEFT's answers behind it."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.wire.adapters import (
    NEVER_ACTIVE,
    AdapterError,
    AdapterKey,
    FetchedAdapter,
    active_from,
)
from configs.wire.merging import MergeRule
from configs.wire.sampling import Sampling
from modeling.adapters.peft.folder import open_adapter
from modeling.runner.adapter_check import adaptable
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank
from tests.checkpoints import AdapterRecipe, write_adapter
from tests.modeling.merges import fetched
from tests.modeling.parity.comparison import (
    BASE,
    BLOCK_SIZE,
    FAMILIES,
    Setting,
    World,
    answers_by_hand,
    answers_scheduled,
    engine_config,
    judge,
    place_all,
)
from tests.modeling.scheduled import Ranks
from tests.modeling.stepping import Asked
from tests.oracle import NUM_TOKENS, Truth, prompt_logits, truth

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of biases

INVOCATION = [7, 21, 7]
"""It overlaps itself, so that only a search for the last one is right."""

Case = tuple[str, int, int | None]
"""An adapter's name; tokens of the prompt; tokens before its last invocation, None without one."""

CASES: Sequence[Case] = [
    ("activated", 23, 11),
    (BASE, 17, None),
    ("activated", 30, 0),
    ("plain", 19, None),
    ("activated", 26, 23),
    ("activated", 21, None),
]


def recipes(family: str) -> dict[str, AdapterRecipe]:
    plain = replace(next(iter(FAMILIES[family].adapters.values())), seed=51, std=0.2)
    extra = {**plain.extra, "alora_invocation_tokens": INVOCATION}
    if family == "gpt2":
        # A bias of an activated adapter is added from the invocation on too, beside DoRA.
        extra["lora_bias"] = True
        plain = replace(plain, extra={**plain.extra, "use_dora": True})
    return {"plain": plain, "activated": replace(plain, seed=52, extra=extra)}


def prompt_of(vocab_size: int, length: int, before: int | None, seed: int) -> list[int]:
    """Random tokens, with an invocation first and, if asked for, another at `before`."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(30, vocab_size, (length,), generator=generator).tolist()
    if before is not None:
        tokens[: len(INVOCATION)] = INVOCATION
        tokens[before : before + len(INVOCATION)] = INVOCATION
        assert active_from(tokens, INVOCATION) == before
    return tokens


def clear_prompt(
    model: Path, adapter: Path | None, length: int, before: int | None
) -> tuple[list[int], Truth]:
    """A prompt on which rounding has no say, and the answer."""
    for seed in range(40):
        prompt = prompt_of(96, length, before, seed)
        try:
            return prompt, truth(model, adapter, prompt)
        except AssertionError:
            continue
    raise AssertionError("rounding has a say on all prompts: choose another seed")


def asked_and_told(
    world: World, setting: Setting, cases: Sequence[Case]
) -> tuple[Path, list[Path], list[Asked], list[Truth]]:
    family, again = setting.family, setting.rejoins_at
    model = world.model(family, setting.variant)
    own = recipes(family)
    folders = [model.parent / f"activation-{name}" for name in own]
    for folder, recipe in zip(folders, own.values(), strict=True):
        if not folder.exists():
            write_adapter(folder, model, recipe)
    slots = {BASE: -1, "plain": 0, "activated": 1}
    requests, told = [], []
    for i, (name, length, before) in enumerate(cases):
        slot, is_activated = slots[name], name == "activated"
        is_idle = is_activated and before is None
        adapter = None if slot < 0 or is_idle else folders[slot]
        prompt, answer = clear_prompt(model, adapter, length, before)
        if is_idle:
            found = prompt_logits(model, folders[slot], prompt)
            assert torch.equal(found, prompt_logits(model, None, prompt)), (
                "PEFT is of the same mind"
            )
        start = active_from(prompt, INVOCATION) if is_activated else 0
        whole = Sampling(logprobs=answer.logits.shape[1])
        rejoins = None if again is None else again + i
        when = (setting.chunk + i, 2 * i, rejoins, start)
        requests.append(Asked(prompt, NUM_TOKENS, slot, whole, *when))
        told.append(answer)
    return model, folders, requests, told


def compare_cases(
    world: World, model: tuple[str, str], ranks: int, cases: Sequence[Case], **more: Any
) -> None:
    """As `compare`, for prompts with invocations; more: of `Setting`."""
    setting = Setting(*model, ranks, [name for name, *_ in cases], **{"chunk": 4, **more})
    folder, adapters, requests, told = asked_and_told(world, setting, cases)
    answer = partial(answers_scheduled, setting) if setting.lengths else answers_by_hand
    seen = world.record.begin(setting, folder)
    found = world.run(ranks, partial(answer, engine_config(folder), adapters, requests))
    judge(seen, found, told)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("family", "variant"),
    [
        *(("llama", "gqa"), ("gpt2", "plain")),
        *(("generic", "olmo2"), ("generic", "lfm2"), ("generic", "zaya")),
    ],
)
def test_mixed_batches(world: World, family: str, variant: str, ranks: int) -> None:
    """In chunks that cut the invocation, beside the base and a plain adapter."""
    compare_cases(world, (family, variant), ranks, CASES)


@pytest.mark.parametrize("lost_at", [None, 14])
def test_under_the_scheduler(world: World, lost_at: int | None) -> None:
    """With its prefix cache, and after a loss of the ranks."""
    cases = [*CASES, ("activated", 23, 11), (BASE, 23, None)]
    compare_cases(world, ("llama", "gqa"), 1, cases, lengths=[8], lost_at=lost_at)


def run_one(ranks: Ranks, index: int, asked: Asked) -> int:
    """Run a request to its end; how many of its tokens came from the cache."""
    ranks.ask(index, asked)
    ranks.run()
    return ranks.ended["r", index].cached_tokens


def test_blocks_before_the_invocation_are_the_base_models(world: World) -> None:
    """They are shared in both directions, and with another activated adapter."""
    model = world.model("llama", "gqa")
    folders = [model.parent / f"check-{seed}" for seed in (1, 2)]
    for seed, folder in enumerate(folders):
        if not folder.exists():
            write_adapter(folder, model, replace(recipes("llama")["activated"], seed=seed))

    def start() -> ModelRunner:
        return load_paged(engine_config(model), SingleRank(), torch.device("cpu")).allocate()

    talk = prompt_of(96, 5 * BLOCK_SIZE, None, 3)
    check = [*talk, *INVOCATION, 40, 41]
    ranks = Ranks(start, folders)
    adapted = [Asked(check, 4, slot, active_from=len(talk)) for slot in (0, 1)]
    assert run_one(ranks, 0, adapted[0]) == 0
    assert run_one(ranks, 1, Asked([*talk, 50], 4)) == len(talk)
    assert run_one(ranks, 2, adapted[1]) == len(talk)
    # From the invocation on the blocks are each adapter's own.
    more = [*check, *range(30, 30 + 2 * BLOCK_SIZE)]
    longer = [Asked(more, 4, slot, active_from=len(talk)) for slot in (0, 1, 0)]
    found = [run_one(ranks, 3 + i, asked) for i, asked in enumerate(longer)]
    assert found == [len(talk), len(talk), len(more) // BLOCK_SIZE * BLOCK_SIZE]


def test_the_position_is_in_the_names(world: World) -> None:
    """A prompt that ends within a block leaves another invocation to its own answer."""
    model = world.model("llama", "gqa")
    folder = model.parent / "activation-activated"
    if not folder.exists():
        write_adapter(folder, model, recipes("llama")["activated"])

    def start() -> ModelRunner:
        return load_paged(engine_config(model), SingleRank(), torch.device("cpu")).allocate()

    ranks = Ranks(start, [folder])
    tokens = [*INVOCATION, *range(30, 30 + 2 * BLOCK_SIZE)]
    assert run_one(ranks, 0, Asked(tokens, 2, 0, active_from=0)) == 0
    assert run_one(ranks, 1, Asked(tokens, 2, 0, active_from=2)) == 0
    assert run_one(ranks, 2, Asked(tokens, 2, 0, active_from=2)) > 0


def test_merges_and_vocabulary_are_refused(world: World) -> None:
    model = world.model("llama", "gqa")
    config = engine_config(model)
    opened = config.adapters.model_copy(update={"vocabulary": True})
    runner = load_paged(
        config.model_copy(update={"adapters": opened}), SingleRank(), torch.device("cpu")
    ).allocate()
    folder = model.parent / "activation-activated"
    if not folder.exists():
        write_adapter(folder, model, recipes("llama")["activated"])
    place_all(runner, [folder])
    with pytest.raises(AdapterError, match=r"aLoRA.*use it alone"):
        runner.stage(fetched(9, [folder, folder], MergeRule((0.5, 0.5))))
    ends = write_adapter(
        model.parent / "activated-ends",
        model,
        AdapterRecipe(target_modules=("q_proj", "embed_tokens"), save_embeddings=False),
    )
    path = ends / "adapter_config.json"
    fields = json.loads(path.read_text()) | {"alora_invocation_tokens": INVOCATION}
    path.write_text(json.dumps(fields))
    with pytest.raises(AdapterError, match="linear modules inside the layers alone"):
        runner.stage(FetchedAdapter(AdapterKey(9), "ends", str(ends), "ends"))


def test_a_bias_before_the_first_token_is_refused(world: World, tmp_path: Path) -> None:
    """PEFT adds it wherever the invocation is, so the tokens before would not be the base's."""
    model = world.model("generic", "zaya")
    extra = {"alora_invocation_tokens": INVOCATION, "lora_bias": True}
    recipe = AdapterRecipe(target_modules=("o_proj", "v_proj_delayed"), extra=extra)
    folder = write_adapter(tmp_path / "it", model, recipe)
    prompt = prompt_of(96, 20, 9, 1)
    assert not torch.equal(
        prompt_logits(model, folder, prompt)[:9], prompt_logits(model, None, prompt)[:9]
    )
    projections = adaptable(engine_config(model))
    with pytest.raises(AdapterError, match=r"lora_bias .*v_proj_delayed: PEFT adds that bias"):
        open_adapter(folder, projections, 64)
    other = replace(recipe, target_modules=("o_proj", "v_proj_current"))
    open_adapter(write_adapter(tmp_path / "other", model, other), projections, 64)


@pytest.mark.parametrize("task", [None, "FEATURE_EXTRACTION"])
def test_adapters_that_peft_never_activates_are_refused(
    world: World, tmp_path: Path, task: str | None
) -> None:
    """PeftModelForCausalLM alone looks for the invocation: others compute the base model."""
    model = world.model("llama", "gqa")
    folder = write_adapter(tmp_path / "activated", model, recipes("llama")["activated"])
    prompt = prompt_of(96, 20, 3, 1)
    of_base = prompt_logits(model, None, prompt)
    assert not torch.equal(prompt_logits(model, folder, prompt), of_base)
    idle = Path(shutil.copytree(folder, tmp_path / "idle"))
    path = idle / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task_type": task}))
    assert torch.equal(prompt_logits(model, idle, prompt), of_base)
    runner = load_paged(engine_config(model), SingleRank(), torch.device("cpu")).allocate()
    with pytest.raises(AdapterError, match=f"task_type {task}: .* set task_type to CAUSAL_LM"):
        runner.stage(FetchedAdapter(AdapterKey(9), "idle", str(idle), "idle"))


def test_the_last_invocation_counts() -> None:
    assert active_from([1, 2, 3], ()) == 0
    assert active_from([7, 21, 7, 21, 7], INVOCATION) == 2
    assert active_from([7, 21], INVOCATION) == NEVER_ACTIVE
    assert active_from([], INVOCATION) == NEVER_ACTIVE
    assert active_from([1, *INVOCATION, 2], INVOCATION) == 1
