"""Latent attention: what adapters do to the map that is multiplied where latents are read."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.engine import CacheConfig, CacheDType
from configs.wire.adapters import AdapterError
from modeling.adapters import latents as adapted_latents
from modeling.adapters.kernels.reference import ReferenceBatch
from modeling.adapters.latents import LatentMap
from modeling.adapters.peft.folder import open_adapter
from modeling.adapters.projection import ModulePosition
from modeling.layers.angles import Angles
from modeling.models.base import AttentionLayer
from modeling.models.generic.latents import LatentProjection
from modeling.models.generic.step import Heads, RotationLostError
from modeling.runner.adapter_check import adaptable
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank
from tests.checkpoints import AdapterRecipe, write_adapter
from tests.modeling.parity.comparison import (
    BASE,
    BLOCK_SIZE,
    Setting,
    World,
    compare,
    engine_config,
    expect_mismatch,
)
from tests.sweeps import swept_rows

# PEFT's, of biases.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NAMES = ["dora", BASE, "plain", "biased", "wide"]
TYPES = ("deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash")
MODELS = [(name, n) for name in TYPES for n in (1, 2)]
ALONE = Setting("latents", "deepseek_v3", 1, ["dora", BASE])


def runner(world: World, **changes: Any) -> ModelRunner:
    config = engine_config(world.model("latents", "deepseek_v3"), **changes)
    return load_paged(config, SingleRank(), torch.device("cpu")).allocate()


@pytest.mark.parametrize(
    ("variant", "ranks"),
    swept_rows(MODELS, lambda *row: row in (("deepseek_v3", 2), ("longcat_flash", 2))),
)
def test_together(world: World, variant: str, ranks: int) -> None:
    """Prompts in chunks beside rows that decode; each request is preempted once."""
    names = [each for each in NAMES if variant != "kimi_linear" or each in (BASE, "wide")]
    compare(world, Setting("latents", variant, ranks, names, rejoins_at=3))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_whole_map(world: World, ranks: int) -> None:
    names = ["whole", BASE, "plain"]
    compare(world, Setting("latents", "deepseek_v3", ranks, names, linears=("kv_b_proj",)))


def test_under_the_scheduler(world: World) -> None:
    """With prefix hits, and after a loss of the ranks."""
    asked = Setting("latents", "deepseek_v3", 1, ["dora", BASE, "dora", "wide"], lost_at=14)
    compare(world, replace(asked, lengths=[35, 35, 35, 20]))


def test_a_token_takes_its_latent_and_its_rotated_part(world: World) -> None:
    own = runner(world)
    config = json.loads((world.model("latents", "deepseek_v3") / "config.json").read_text())
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    cache = own._forward.cache[0]
    assert cache.keys.shape[1:] == (BLOCK_SIZE, 1, width)
    assert cache.values is cache.keys
    assert own._parts.cache.bytes_per_block == BLOCK_SIZE * width * 4 * len(own._forward.cache)


def test_an_fp8_cache_comes_near(world: World) -> None:
    """Its scales are measured: those of heads' keys and values in a checkpoint are of others."""
    cache = CacheConfig(num_blocks=8, block_size=BLOCK_SIZE, dtype=CacheDType.FP8)
    own = runner(world, cache=cache)._forward.cache[0]
    assert own.quantised
    assert own.scales.keys == own.scales.values
    latents = torch.randn(4, 1, own.keys.shape[-1])
    own.store(latents, latents, torch.arange(4))
    found, values = own.read(torch.arange(4), torch.float32)
    assert values is found
    assert (found - latents).norm() < 0.05 * latents.norm()


@pytest.mark.parametrize("fault", ["queries", "values", "scales", "head by head"])
def test_a_map_that_is_wrong(world: World, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault in ("queries", "values"):
        monkeypatch.setattr(ReferenceBatch, f"latent_{fault}", lambda *args: None)
    elif fault == "scales":
        plain: Any = adapted_latents.query_deltas

        def unscaled(adapter: Any, x: Any, latents: Any) -> Any:
            monkeypatch.setattr(type(adapter), "output_vectors", lambda *_: (None, None))
            return plain(adapter, x, latents)

        monkeypatch.setattr("modeling.adapters.kernels.reference.query_deltas", unscaled)
    else:
        own: Any = vars(LatentProjection)["map"].fget

        def turned(self: LatentProjection) -> LatentMap:
            found: LatentMap = own(self)
            return replace(found, weight=found.weight.roll(1, 0))

        monkeypatch.setattr(LatentProjection, "map", property(turned))
    expect_mismatch(world, ALONE)


def test_an_activated_adapter_of_the_map_is_refused(world: World, tmp_path: Path) -> None:
    """It would change the keys of the tokens before its invocation."""
    model = world.model("latents", "deepseek_v3")
    extra = {"alora_invocation_tokens": [7, 8]}
    recipe = AdapterRecipe(target_modules=("q_b_proj", "kv_b_proj"), extra=extra)
    projections = adaptable(engine_config(model))
    folder = write_adapter(tmp_path / "it", model, recipe)
    with pytest.raises(AdapterError, match=r"kv_b_proj.*retrain it without that module"):
        open_adapter(folder, projections, 64)
    other = replace(recipe, target_modules=("q_b_proj", "o_proj"))
    open_adapter(write_adapter(tmp_path / "other", model, other), projections, 64)


def test_a_rotation_of_a_part_is_left_to_the_layer() -> None:
    """The store rotates all of what heads share, or nothing."""
    weight, narrow = torch.zeros(2 * 7, 8), torch.zeros(3, 1, 4)
    linear: Any = SimpleNamespace(
        base=SimpleNamespace(matrix=weight), position=ModulePosition(0, 0)
    )
    own = LatentProjection.__new__(LatentProjection)
    torch.nn.Module.__init__(own)
    object.__setattr__(own, "linear", linear)
    own.keys, own.values = 4, 3
    own(torch.zeros(1, 3, 8))
    step: Any = SimpleNamespace(adapter_data=None, take_rotations=lambda: Angles(narrow, narrow))
    q, k = torch.zeros(3, 2, 4 + 6), torch.zeros(3, 1, 4 + 6)
    with pytest.raises(RotationLostError, match="rotates a part"):
        own.attend(step, 0, Heads(q, k, k, None), AttentionLayer(2, 1, 10, 0.5))
