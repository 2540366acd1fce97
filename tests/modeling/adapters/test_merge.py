"""The arithmetic of merges against PEFT's own functions, and what cannot be merged."""

import json
from collections.abc import Sequence
from math import sqrt
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from peft.utils import merge_utils
from torch import Tensor

from configs.wire.adapters import AdapterError, AdapterKey, AdapterRefusal
from configs.wire.merging import MergeRule, MergeStrategy, SignMethod
from modeling.adapters import merge
from modeling.adapters.host_cache import HostAdapterCache, HostCacheSize
from modeling.adapters.merge import combine, open_fetched, prune
from modeling.adapters.peft.folder import open_adapter
from modeling.adapters.projection import ModulePosition
from modeling.adapters.stacks import LoraModule
from sources.files import fingerprint
from tests.modeling.adapters.lora_files import DOWN, UP, factors, write_lora
from tests.modeling.adapters.peft.test_ends import HEAD, ROWS, ends
from tests.modeling.merges import fetched

PROJECTIONS = (UP, DOWN)
TIES = MergeStrategy.TIES
DARE_LINEAR, DARE_TIES = MergeStrategy.DARE_LINEAR, MergeStrategy.DARE_TIES
SCALES = [0.9, -0.4, 1.3]
PEFT_WARNS_OF_DENSITY = pytest.mark.filterwarnings("ignore:The density 1.0:UserWarning")


def tensors(count: int = 3, shape: tuple[int, ...] = (5, 12)) -> list[Tensor]:
    """Values of which many are zeros, and some of equal size."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=generator) for _ in range(count)]
    return [(4 * v).round() / 4 for v in values]


def by_peft(parts: Sequence[Tensor], rule: MergeRule, seeds: Sequence[int]) -> Tensor:
    """The same by PEFT, which uses torch's global random generator."""
    weights, method = torch.tensor(SCALES), rule.sign_method.value
    pruned = list(parts)
    with torch.random.fork_rng(devices=[]):
        for i, seed in enumerate(seeds if rule.strategy in (DARE_LINEAR, DARE_TIES) else ()):
            torch.manual_seed(seed)
            pruned[i] = merge_utils.prune(parts[i], rule.density, "random", rescale=True)
    whole: Tensor
    if rule.strategy is TIES:
        whole = merge_utils.ties(pruned, weights, rule.density, method)
    elif rule.strategy is DARE_TIES:
        stacked = torch.stack(pruned)
        mask = merge_utils.calculate_majority_sign_mask(stacked, method)
        whole = merge_utils.disjoint_merge(stacked * weights.view(-1, 1, 1), mask)
    else:
        whole = merge_utils.task_arithmetic(pruned, weights)
    return whole


@PEFT_WARNS_OF_DENSITY
@pytest.mark.parametrize("density", [0.001, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("sign_method", SignMethod)
@pytest.mark.parametrize("strategy", MergeStrategy)
def test_every_rule_equals_pefts(
    strategy: MergeStrategy, sign_method: SignMethod, density: float
) -> None:
    rule = MergeRule(tuple(SCALES), strategy, density, sign_method)
    parts, seeds = tensors(), [5, 6, 7]
    found = combine(parts, SCALES, rule, seeds)
    assert torch.equal(found, by_peft(parts, rule, seeds))
    assert found.dtype == torch.float32


def test_dare_keeps_what_its_density_says_and_the_mean() -> None:
    rule = MergeRule((1.0, 1.0), DARE_LINEAR, 0.25)
    value = torch.full((200, 200), 3.0)
    kept = prune(value, rule, 9)
    assert set(kept.flatten().tolist()) == {0.0, 12.0}
    assert float(kept.mean()) == pytest.approx(3.0, rel=0.05)
    assert torch.equal(kept, prune(value, rule, 9))
    assert not torch.equal(kept, prune(value, rule, 10))


def test_nothing_draws_from_the_global_generator() -> None:
    state = torch.get_rng_state()
    prune(torch.ones(9, 9), MergeRule((1.0, 1.0), DARE_TIES, 0.5), 9)
    assert torch.equal(torch.get_rng_state(), state)


def merged(folders: Sequence[Path], rule: MergeRule) -> dict[ModulePosition, LoraModule]:
    """What is read of a merge."""
    opened = open_fetched(fetched(1, folders, rule), PROJECTIONS, 64)
    modules = list(opened.read())
    assert [module.position for module in modules] == list(opened.ranks)
    for module in modules:
        assert module.a.shape[0] == module.b.shape[1] == opened.ranks[module.position]
    return {module.position: module for module in modules}


def test_positions_and_ranks_are_those_of_all_parts(tmp_path: Path) -> None:
    one, two = factors(UP, [4, 4, 0]), {**factors(UP, [0, 7, 4], seed=1), **factors(DOWN, [4], 2)}
    folders = [
        write_lora(tmp_path / "one", one),
        write_lora(tmp_path / "two", two, rank_pattern={"layers.1.up": 7}),
    ]
    found = merged(folders, MergeRule((0.5, 2.0)))
    assert {position: len(m.a) for position, m in found.items()} == {
        ModulePosition(0, 0): 4,
        ModulePosition(0, 1): 7,
        ModulePosition(0, 2): 4,
        ModulePosition(1, 0): 4,
    }
    # alpha 8: scalings 2, and 8 / 7 where the rank is 7.
    name = "base_model.model.model.layers.{}.up.lora_{}.weight"
    a_one, a_two = one[name.format(1, "A")], two[name.format(1, "A")]
    expected = sqrt(2.0 * 8 / 7) * a_two
    expected[:4] += sqrt(0.5 * 2) * a_one
    torch.testing.assert_close(found[ModulePosition(0, 1)].a, expected, atol=1e-5, rtol=0)
    alone = found[ModulePosition(0, 0)]
    product = one[name.format(0, "B")] @ one[name.format(0, "A")]
    torch.testing.assert_close(alone.b @ alone.a, 0.5 * 2 * product, atol=1e-5, rtol=0)


def test_every_tensor_of_a_merge_has_its_own_seed(tmp_path: Path) -> None:
    ones = {name: torch.ones_like(t) for name, t in factors(UP, [4, 4, 4]).items()}
    folders = [write_lora(tmp_path / name, ones) for name in ("one", "two")]
    rule = MergeRule((1.0, 1.0), DARE_LINEAR, 0.5)
    first, again = (merged(folders, rule) for _ in range(2))
    for position, module in first.items():
        assert torch.equal(module.a, again[position].a)
        assert torch.equal(module.b, again[position].b)
    assert not torch.equal(first[ModulePosition(0, 0)].a, first[ModulePosition(0, 1)].a), (
        "another position"
    )
    values = set((first[ModulePosition(0, 0)].a / sqrt(2)).round(decimals=4).flatten().tolist())
    assert values == {0.0, 2.0, 4.0}, "each part has a mask of its own"
    other = merged(folders, MergeRule((1.0, 1.0 + 1e-9), DARE_LINEAR, 0.5))
    assert not torch.equal(first[ModulePosition(0, 0)].a, other[ModulePosition(0, 0)].a), (
        "another recipe"
    )


def refusal(*parts: Path, rule: MergeRule | None = None) -> AdapterError:
    rule = rule or MergeRule((1.0,) * len(parts))
    with pytest.raises(AdapterError) as caught:
        list(open_fetched(fetched(1, parts, rule), PROJECTIONS, 8).read())
    return caught.value


def test_a_fault_of_a_part_is_reported_with_its_name(tmp_path: Path) -> None:
    good = write_lora(tmp_path / "good", factors(UP, [4]))
    magnitudes = {"base_model.model.model.layers.0.up.lora_magnitude_vector": torch.ones(10)}
    dora = write_lora(tmp_path / "dora", factors(UP, [4]) | magnitudes, use_dora=True)
    bare = {"target_modules": [], "target_parameters": ["up.weight"]}
    bare_part = write_lora(tmp_path / "bare", factors(UP, [4]), **bare)
    wide = write_lora(tmp_path / "wide", factors(UP, [9]), r=9)
    broken = write_lora(tmp_path / "broken", {k: t / 0 for k, t in factors(UP, [4]).items()})
    for part, words, kind in (
        (dora, "use_dora=True: magnitudes of DoRA cannot be merged", AdapterRefusal.UNSUPPORTED),
        (bare_part, "PEFT does not merge adapters of bare", AdapterRefusal.UNSUPPORTED),
        (wide, "rank 9", AdapterRefusal.TOO_LARGE),
        (broken, "not finite", AdapterRefusal.UNSUPPORTED),
    ):
        error = refusal(good, part)
        assert error.message.startswith(f"adapter '{part.name}' of the merge: ")
        assert words in error.message
        assert error.refusal is kind


def test_whole_matrices_are_not_merged(tmp_path: Path) -> None:
    saved = {**factors(UP, [4]), f"{HEAD}.weight": ROWS}
    part = write_lora(tmp_path / "whole", saved, modules_to_save=["lm_head"])
    with pytest.raises(AdapterError, match=r"'whole' of the merge: it holds whole matrices"):
        open_fetched(fetched(1, [part, part], MergeRule((1.0, 1.0))), ends(), 64)


def test_weights_that_overflow_are_refused(tmp_path: Path) -> None:
    part = write_lora(tmp_path / "p", factors(UP, [4]))
    error = refusal(part, part, rule=MergeRule((1e300, 1.0)))
    assert "are its weights too large?" in error.message


def test_a_part_that_changed_while_it_was_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [write_lora(tmp_path / name, factors(UP, [4])) for name in ("one", "two")]
    adapter = fetched(1, folders, MergeRule((1.0, 1.0)))
    parts = tuple(replace(p, fingerprint=fingerprint(Path(p.folder))) for p in adapter.parts)
    adapter = replace(adapter, parts=parts)
    tier = HostAdapterCache(
        PROJECTIONS, HostCacheSize((8, 8), 64, 2**20), torch.float32, pinned=False
    )
    assert tier.stage(adapter).num_pages == (1, 0)
    tier.drop(AdapterKey(1))

    def late(folder: Path, *others: object, **more: object) -> object:
        opened = open_adapter(folder, *others, **more)  # type: ignore[arg-type]
        if folder.name == "two":
            (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
        return opened

    monkeypatch.setattr(merge, "open_adapter", late)
    with pytest.raises(AdapterError, match="'two' changed while it was read"):
        tier.stage(adapter)
    tier.check()
