"""Every family that is paged by transformers' own modules, against transformers + PEFT."""

import pytest
import transformers

from configs.wire.adapters import AdapterError
from modeling.adapters.peft import open_adapter
from modeling.runner.adapter_check import adaptable
from tests.checkpoints_generic import GENERIC, MIXTURES
from tests.checkpoints_stacks import STACKS
from tests.modeling.parity import BASE, Setting, World, compare, engine_config

# PEFT looks for patterns of parameters among modules, and warns that it found none.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

TOWERS = ("gemma3", "llava", "smolvlm")
"""Models whose adapters change what reads images too."""

EVERYONE = [BASE, "r8", "columns", "rows"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("variant", GENERIC)
def test_together(world: World, variant: str, ranks: int) -> None:
    """Base and adapters in one batch, prompts in chunks beside rows that decode."""
    compare(world, Setting("generic", variant, ranks, EVERYONE))


@pytest.mark.parametrize("variant", ["gemma2", "olmo3", "deepseek_v3", "gpt_oss"])
def test_scheduled(world: World, variant: str) -> None:
    """Under the real scheduler: prefix hits, and requests that are preempted and lost."""
    lengths = (37, 37, 21)
    family = "mixture" if variant in MIXTURES else "generic"
    compare(world, Setting(family, variant, 1, [BASE, BASE, "r8"], lengths=lengths, lost_at=9))


@pytest.mark.parametrize("variant", ["gemma3_text", "ministral", "gemma4_text", "llama4_text"])
def test_blocks_behind_windows_serve_other_tokens(world: World, variant: str) -> None:
    """Four requests of up to 94 tokens, in memory that holds one of them whole."""
    lengths = (70, 61, 53, 70)
    names = [BASE, "r8", BASE, BASE]
    compare(world, Setting("generic", variant, 1, names, lengths=lengths, blocks=12))


@pytest.mark.parametrize("variant", ["gemma2_untied", "cohere_untied", "glm4"])
def test_vocabulary(world: World, variant: str) -> None:
    """Adapters on embedding and head too."""
    names = [BASE, "everything"]
    compare(world, Setting("generic_ends", variant, 2, names, vocabulary=True))


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(
            variant,
            marks=pytest.mark.skipif(
                variant == "llama4" and transformers.__version__ == "5.24.0",
                reason="this transformers fails on it itself: no image_outputs",
            ),
        )
        for variant in STACKS
    ],
)
def test_text_of_larger_models(world: World, variant: str) -> None:
    """Decoders of models that read images, with adapters that were trained on the whole model."""
    adapter = "everywhere" if variant in TOWERS else "r8"
    compare(world, Setting("stack", variant, 2, [BASE, adapter]))


def test_an_adapter_that_text_does_not_reach_is_refused(world: World) -> None:
    config = engine_config(world.model("stack", "gemma3"))
    folder = world.adapter("stack", "gemma3", "tower")
    assert folder is not None
    with pytest.raises(AdapterError, match=r"vision_tower.* adapt what reads images or sound"):
        open_adapter(folder, adaptable(config), 64)
