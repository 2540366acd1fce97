"""Each field of config.json is computed as in transformers, has no effect there, or is refused."""

import dataclasses
import json
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from configs.architectures.base import ArchitectureError
from configs.architectures.select import load_architecture
from configs.rope_sets import SHORT
from sharding.group import SingleRank
from tests import solar
from tests.checkpoints import load_oracle, oracle_logits
from tests.config_fields import KINDS
from tests.modeling.models.stepping import Stepper, load

SEQUENCE = [(7 * i + i * i) % 80 for i in range(40)]


def config_class(kind: str) -> type[PretrainedConfig]:
    found: type[PretrainedConfig] = solar.find(f"{kind}Config")
    return found


def rewrite(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def logits(folder: Path) -> Tensor:
    sets = load_architecture(folder).rope_sets
    rope_set = SHORT if sets is None else sets.first(len(SEQUENCE), len(SEQUENCE))
    return Stepper(load(folder, SingleRank()), rope_set=rope_set).step([(0, SEQUENCE)])[0]


def check(folder: Path) -> Tensor:
    """Ours are transformers'; returns those."""
    expected = oracle_logits(load_oracle(folder), SEQUENCE)
    torch.testing.assert_close(logits(folder), expected, atol=1e-4, rtol=0)
    return expected


def check_moved(folder: Path, plain: Tensor) -> None:
    """As `check`, and a field that was ignored would show."""
    found = check(folder)
    assert found.shape != plain.shape or float((found - plain).abs().max()) > 1e-2


@pytest.fixture(scope="module")
def plains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Each kind's logits with nothing changed."""
    root = tmp_path_factory.mktemp("plain")
    return {
        name: oracle_logits(load_oracle(kind.write(root / name)), SEQUENCE)
        for name, kind in KINDS.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_decided(kind: str) -> None:
    fields = {field.name for field in dataclasses.fields(config_class(kind))}
    assert fields - KINDS[kind].decided == set()


@contextmanager
def watched() -> Iterator[set[str]]:
    """What transformers' code for models asks of configs meanwhile."""
    read: set[str] = set()
    plain: Any = PretrainedConfig.__getattribute__

    def note(self: PretrainedConfig, key: str) -> Any:
        if not sys._getframe(1).f_code.co_filename.endswith("configuration_utils.py"):
            read.add(key)
        return plain(self, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PretrainedConfig, "__getattribute__", note)
        yield read


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_that_transformers_looks_for_is_decided(tmp_path: Path, kind: str) -> None:
    KINDS[kind].write(tmp_path)
    auto: Any = transformers.AutoModelForCausalLM
    with watched() as read:
        model = auto.from_pretrained(tmp_path)
        model.generate(torch.tensor([SEQUENCE[:4]]), max_new_tokens=2, do_sample=False)
    own = config_class(kind)
    aliases = {"hidden_size", "max_position_embeddings", "num_hidden_layers", "num_attention_heads"}
    known = KINDS[kind].decided | set(own.attribute_map) & aliases | {"initializer_range"}
    asked = {key for key in read if not key.startswith("_") and not hasattr(own, key)}
    assert asked - known == set()


BY_LAYER = {"num_hidden_layers", "layer_types", "max_window_layers", "use_sliding_window"}
"""Fields that contradict each other where layers are named one by one."""

CASES = [(kind, field) for kind, made in KINDS.items() for field in made.counts]


@pytest.mark.parametrize(("kind", "field"), CASES)
def test_fields_that_count(
    tmp_path: Path, plains: dict[str, Tensor], kind: str, field: str
) -> None:
    changes = {field: KINDS[kind].counts[field]}
    if field in BY_LAYER and "layer_types" in KINDS[kind].counts:
        changes = {"layer_types": None, **changes}
    check_moved(KINDS[kind].write(tmp_path, **changes), plains[kind])


ROPE_CASES = [(kind, at) for kind, made in KINDS.items() for at in range(len(made.ropes))]


@pytest.mark.parametrize(("kind", "at"), ROPE_CASES)
def test_rope_parameters(tmp_path: Path, plains: dict[str, Tensor], kind: str, at: int) -> None:
    """As transformers writes them, and as files from before it had that name."""
    rope = dict(KINDS[kind].ropes[at])
    heads = {"head_dim": 8} if "short_factor" in rope and kind == "Qwen3" else {}
    folder = KINDS[kind].write(tmp_path, rope_parameters=rope, **heads)
    check_moved(folder, plains[kind])
    written = json.loads((folder / "config.json").read_text())["rope_parameters"]
    check_moved(rewrite(folder, rope_parameters=None, rope_scaling=written), plains[kind])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_many_fields_at_once(tmp_path: Path, kind: str, seed: int) -> None:
    made, chosen = KINDS[kind], random.Random(f"{kind} {seed}")
    fields = [name for name in made.counts if name not in BY_LAYER and chosen.random() < 0.5]
    changes = {name: made.counts[name] for name in fields}
    # The number of a longrope's factors says how wide heads are.
    ropes = [rope for rope in made.ropes if "short_factor" not in rope]
    if ropes:
        changes["rope_parameters"] = dict(chosen.choice(ropes))
    check(made.write(tmp_path, **changes))


@pytest.mark.parametrize("kind", KINDS)
def test_idle_fields(tmp_path: Path, plains: dict[str, Tensor], kind: str) -> None:
    """All at once: neither ours nor transformers' logits move."""
    folder = rewrite(KINDS[kind].write(tmp_path), **KINDS[kind].all_idle)
    torch.testing.assert_close(check(folder), plains[kind], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Phi3"])
def test_biases_that_the_class_does_not_have(
    tmp_path: Path, plains: dict[str, Tensor], kind: str
) -> None:
    """As older trainers save them, all zero or not; the config may speak of them."""
    folder = KINDS[kind].write(tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    weights = [name for name in tensors if name.endswith("weight") and "embed" not in name]
    biases = {
        f"{name.removesuffix('weight')}bias": torch.ones(len(tensors[name])) for name in weights
    }
    save_file({**biases, **tensors}, path, metadata={"format": "pt"})
    if kind != "Llama":
        rewrite(folder, attention_bias=True, mlp_bias=True)
    torch.testing.assert_close(check(folder), plains[kind], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_architecture(tmp_path: Path, plains: dict[str, Tensor], kind: str) -> None:
    """transformers goes by model_type."""
    folder = rewrite(KINDS[kind].write(tmp_path), architectures=None)
    torch.testing.assert_close(check(folder), plains[kind], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_outside_the_fields(tmp_path: Path, plains: dict[str, Tensor], kind: str) -> None:
    for key, value in KINDS[kind].keys.items():
        folder = KINDS[kind].write(tmp_path / key)
        rope = {"rope_parameters": None} if key != "head_dim" else {}
        check_moved(rewrite(folder, **rope, **{key: value}), plains[kind])


REFUSALS = [(kind, key) for kind, made in KINDS.items() for key in made.all_refused]


@pytest.mark.parametrize(("kind", "key"), REFUSALS)
def test_refusals_name_the_key(tmp_path: Path, kind: str, key: str) -> None:
    folder = rewrite(KINDS[kind].write(tmp_path), **{key: KINDS[kind].all_refused[key]})
    with pytest.raises(ArchitectureError, match=key):
        load_architecture(folder)
