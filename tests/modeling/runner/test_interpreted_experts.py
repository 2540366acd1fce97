"""A whole runner with adapters of experts by the kernels of a GPU, in Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4. Few experts and many pages for
each: what one counts by the other is out of bounds.
"""

import os
from dataclasses import replace

import pytest
import torch

from modeling.adapters.bank import AdapterBank
from modeling.adapters.kernels.select import AdapterStepPlan, KernelChoice
from modeling.runner import load_paged
from sharding.group import SingleRank
from tests.modeling.adapters.kernels.test_interpreted import FORM
from tests.modeling.attention.triton.test_interpreted import Interpreted
from tests.modeling.parity.comparison import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    World,
    engine_config,
    full_logprobs,
    place_all,
    poison,
)
from tests.modeling.stepping import generate
from tests.modeling.test_cuda_generic import EXPERTS, ROUTED, agree, batch
from tests.modeling.watched_memory import spoil_new_memory, watch_bounds

pytestmark = [
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
    ),
    # PEFT looks for patterns of parameters among modules, and warns that it found none.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]


@pytest.mark.parametrize(("variant", "names"), [("qwen3_moe", ROUTED), ("gpt_oss", EXPERTS)])
def test_tokens_within_bounds(
    world: World, variant: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from modeling.adapters.kernels import buffers
    from modeling.adapters.kernels.plan import TritonPlan, triton_batch
    from modeling.kernels import pairs

    monkeypatch.setattr(buffers, "Launcher", Interpreted)
    for name in ("_SHRINK", "_EXPAND"):
        monkeypatch.setattr(pairs, name, Interpreted(getattr(pairs, name)._kernel))

    def plan(bank: AdapterBank, most_tokens: int) -> AdapterStepPlan:
        return TritonPlan(bank, most_tokens, [replace(FORM, max_tokens=most_tokens)])

    kernel = KernelChoice("triton", "", triton_batch, plan)
    monkeypatch.setattr(load_paged, "select_kernel", lambda device: kernel)
    watch_bounds(monkeypatch)
    spoil_new_memory(monkeypatch)
    told = batch(world, "mixture", variant, names)
    loaded = load_paged.load_paged(engine_config(told.model), SingleRank(), torch.device("cpu"))
    loaded.parts.weights.model.has_expert_kernels = True
    runner = loaded.allocate()
    assert runner._bank.expert_table.shape[2] < runner._bank.expert_table.shape[3]
    poison(runner)
    place_all(runner, told.adapters)
    answers = generate(runner, told.asked, NUM_BLOCKS, BLOCK_SIZE)
    assert all(len(full_logprobs(each)) for each in answers)
    agree(answers, told.truths)
