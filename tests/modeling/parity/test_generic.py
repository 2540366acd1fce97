"""Every family that is paged by transformers' own modules, against transformers + PEFT."""

from functools import partial
from itertools import product

import pytest
import torch
import transformers

from configs.architectures.text_stack import decoder_name, is_other_part
from configs.wire.adapters import AdapterError
from configs.wire.sampling import Sampling
from modeling.adapters.peft.folder import open_adapter
from modeling.runner.adapter_check import adaptable
from tests.checkpoints import load_oracle, oracle_logits
from tests.checkpoints_generic import GENERIC, MAMBAS, MIXTURES
from tests.checkpoints_stacks import IMAGE, STACKS, larger_model
from tests.modeling.parity.comparison import (
    BASE,
    Setting,
    World,
    answers_by_hand,
    compare,
    engine_config,
    full_logprobs,
)
from tests.modeling.stepping import Asked
from tests.oracle import TOLERANCE
from tests.ranks import run_in_memory
from tests.sweeps import swept, swept_rows

# PEFT looks for patterns of parameters among modules, and warns that it found none.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

TOWERS = ("gemma3", "llava", "smolvlm")
"""Models whose adapters change what reads images too."""

EVERYONE = [BASE, "r8", "columns", "rows"]


MAIN = {
    *("dory", "gemma2", "gemma4_text", "glm4", "granite_hybrid", "hrm_text", "jamba", "lfm2"),
    *("llama4_text", "minimax", "olmo2", "olmoe_clipped", "qwen3_5_text", "zaya"),
}
"""Those whose layers differ most; every type has its own cell in `models/test_generic_types.py`."""

CUT = {"gemma2", "hrm_text", "llama4_text", "qwen3_5_text"}


@pytest.mark.parametrize(
    ("variant", "ranks"),
    swept_rows(product(GENERIC, (1, 2)), lambda name, n: name in (MAIN if n == 1 else CUT)),
)
def test_together(world: World, variant: str, ranks: int) -> None:
    """Base and adapters in one batch, prompts in chunks beside rows that decode."""
    compare(world, Setting("generic", variant, ranks, EVERYONE))


@pytest.mark.parametrize(
    ("variant", "ranks"), swept_rows(product(MAMBAS, (1, 2)), lambda *row: row == ("mamba", 2))
)
def test_models_without_attention(world: World, variant: str, ranks: int) -> None:
    """Base and adapter in one batch, a prompt in chunks, requests that are preempted."""
    names = [BASE, "r8", BASE]
    compare(world, Setting("mixers", variant, ranks, names, rejoins_at=2))


@pytest.mark.sweep
def test_an_embedding_of_a_model_without_attention(world: World) -> None:
    """Tied to the head, whose rows stay."""
    names = [BASE, "embedding", "r8"]
    compare(world, Setting("mixers_ends", "mamba", 2, names, vocabulary=True))


def test_an_embedding_that_the_server_does_not_adapt(world: World) -> None:
    folder = world.adapter("mixers_ends", "mamba", "embedding")
    assert folder is not None
    config = engine_config(world.model("mixers_ends", "mamba"))
    closed = config.adapters.model_copy(update={"vocabulary": False})
    config = config.model_copy(update={"adapters": closed})
    with pytest.raises(AdapterError, match=r"embeddings.* adapters\.vocabulary true"):
        open_adapter(folder, adaptable(config), 64)


@pytest.mark.parametrize("variant", swept(["mamba", "mamba2"], lambda variant: variant == "mamba"))
def test_models_without_attention_scheduled(world: World, variant: str) -> None:
    """Under the real scheduler: blocks without memory are given out, and their ranks are lost."""
    names, lengths = [BASE, BASE, "r8"], (37, 37, 21)
    compare(world, Setting("mixers", variant, 1, names, lengths=lengths, lost_at=9))


@pytest.mark.parametrize(
    "variant",
    swept(
        [
            *("gemma2", "olmo3", "deepseek_v3", "gpt_oss", "qwen3_5_text", "granite_hybrid"),
            *("jamba", "hrm_text", "zaya"),
        ],
        lambda variant: variant in ("gemma2", "gpt_oss", "qwen3_5_text", "hrm_text"),
    ),
)
def test_scheduled(world: World, variant: str) -> None:
    """Under the real scheduler: prefix hits, and requests that are preempted and lost."""
    lengths = (37, 37, 21)
    family = "mixture" if variant in MIXTURES else "generic"
    compare(world, Setting(family, variant, 1, [BASE, BASE, "r8"], lengths=lengths, lost_at=9))


@pytest.mark.parametrize(
    "variant",
    swept(
        ["gemma3_text", "ministral", "gemma4_text", "llama4_text", "dory"],
        lambda variant: variant in ("gemma4_text", "dory"),
    ),
)
def test_blocks_behind_windows_serve_other_tokens(world: World, variant: str) -> None:
    """Four requests of up to 94 tokens, in memory that holds one of them whole."""
    lengths = (70, 61, 53, 70)
    names = [BASE, "r8", BASE, BASE]
    compare(world, Setting("generic", variant, 1, names, lengths=lengths, blocks=12))


@pytest.mark.parametrize(
    "variant",
    swept(["gemma2_untied", "cohere_untied", "glm4"], lambda variant: variant == "gemma2_untied"),
)
def test_vocabulary(world: World, variant: str) -> None:
    """Adapters on embedding and head too."""
    names = [BASE, "everything"]
    compare(world, Setting("generic_ends", variant, 2, names, vocabulary=True))


SEEN = {"gemma3", "llava", "mllama", "muse_glimmer", "qwen3_5", "qwen3_vl"}
"""A tower whose adapters reach it, one whose do not, layers for images alone, a head and an
embedding of their own kind, recurrent layers, states between layers."""

LLAMA4_FAILS = (
    "this transformers fails on it itself: no image_outputs"
    if transformers.__version__ == "5.24.0"
    else ""
)

LARGER = [
    pytest.param(
        variant,
        marks=(
            pytest.mark.skipif(
                variant == "llama4" and bool(LLAMA4_FAILS),
                reason=LLAMA4_FAILS,
            ),
            *(() if variant in SEEN else (pytest.mark.sweep,)),
        ),
    )
    for variant in (
        *(
            "cohere2_vision",
            "gemma3",
            "gemma3n",
            "gemma4",
            "glm46v",
            "glm4v_moe",
            "granite4_vision",
        ),
        *("hyperclovax_vision_v2", "internvl_gpt_oss", "janus", "kimi_k25", "lfm2_vl", "llama4"),
        *("hunyuan_vl", "mistral4", "mllama", "muse_glimmer", "paddleocr_vl"),
        *("fast_vlm", "perception_lm"),
        *("llava", "mistral3", "ovis2", "qwen2_5_omni_thinker", "qwen2_5_vl_flat", "qwen2_vl"),
        *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe_turned", "smolvlm", "voxtral"),
    )
]
"""Of STACKS those with code or names of their own; the others are alike, and have cells."""


@pytest.mark.parametrize("variant", LARGER)
def test_text_of_larger_models(world: World, variant: str) -> None:
    """Decoders of models that read images, with adapters that were trained on the whole model."""
    compare_stack(world, variant)


def compare_stack(world: World, variant: str) -> None:
    """Base and an adapter on two ranks."""
    adapter = "everywhere" if variant in TOWERS else "r8"
    compare(world, Setting("stack", variant, 2, [BASE, adapter]))


@pytest.mark.parametrize(
    "stack", swept(STACKS, lambda stack: stack in ("granite4_vision", "ovis2"))
)
def test_each_module_is_the_decoders_or_of_no_text(stack: str) -> None:
    """So of an adapter that was trained on all modules each tensor is read or left out."""
    with torch.device("meta"):
        model = larger_model(stack)
    adaptable = (torch.nn.Linear, torch.nn.Embedding, torch.nn.Conv1d, torch.nn.Conv2d)
    found = model.named_modules()
    names = [f"{path}.weight" for path, each in found if isinstance(each, adaptable)]
    assert not [n for n in names if decoder_name(n) is None and not is_other_part(n)]


@pytest.mark.parametrize(
    "variant",
    swept(
        ["llama4_causal", "qwen3_5_causal", "qwen3_5_moe_causal"],
        lambda variant: variant == "qwen3_5_causal",
    ),
)
def test_decoders_by_their_own_class_in_a_larger_models_config(world: World, variant: str) -> None:
    """With adapters that were trained on the decoder alone."""
    compare(world, Setting("decoder", variant, 2, EVERYONE))


@pytest.mark.sweep
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("variant", ["glm4v_moe", "qwen3_omni_moe_whole", "qwen3_vl_moe_turned"])
def test_experts_of_larger_models(world: World, variant: str, spread: bool) -> None:
    """spread: over whole experts on each rank."""
    compare(world, Setting("stack", variant, 2, [BASE, "experts"], spread=spread))


@pytest.mark.parametrize("variant", LARGER)
def test_tokens_of_images_without_an_image(world: World, variant: str) -> None:
    """Gemma 4 and Kimi embed them as padding, in prompts and in answers, Gemma 3n by a table of
    its own; others as they are."""
    model = world.model("stack", variant)
    config = engine_config(model)
    requests = [
        Asked(prompt, 6, sampling=Sampling(logprobs=96, logit_bias=bias), chunk=3)
        for prompt, bias in (([5, IMAGE, 33, IMAGE, IMAGE, 60], ()), ([7, 8], ((IMAGE, 99.0),)))
    ]
    (found,) = run_in_memory(1, partial(answers_by_hand, config, [], requests))
    assert found[1].tokens[0] == IMAGE
    oracle = load_oracle(model)
    for asked, answer in zip(requests, found, strict=True):
        logits = oracle_logits(oracle, [*asked.prompt, *answer.tokens])
        wanted = logits[len(asked.prompt) - 1 : -1].log_softmax(-1)
        assert torch.allclose(full_logprobs(answer).float(), wanted, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("variant", "adapter", "module"),
    [("gemma3", "tower", "vision_tower"), ("mllama", "images", "layers.1.cross_attn")],
)
def test_an_adapter_that_text_does_not_reach_is_refused(
    world: World, variant: str, adapter: str, module: str
) -> None:
    config = engine_config(world.model("stack", variant))
    folder = world.adapter("stack", variant, adapter)
    assert folder is not None
    with pytest.raises(AdapterError, match=rf"{module}.* adapt what reads images or sound"):
        open_adapter(folder, adaptable(config), 64)
