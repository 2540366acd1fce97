"""The folders that benchmarks serve: what is in them, and what is written twice."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from benchmarks import loading, workload
from benchmarks.adapter_steps import write_kind
from benchmarks.workload import MIXED_RANKS, adapter_parameters, config_of, recipes, write_adapters
from configs.engine import EngineConfig
from configs.model import LoadFormat, ModelConfig
from modeling.runner.adapter_check import adaptable, judge


def stamps(folder: Path) -> dict[str, int]:
    """When each adapter's weights were written."""
    files = folder.glob("adapters/*/adapter_model.safetensors")
    return {path.parent.name: path.stat().st_mtime_ns for path in files}


def test_mixed_ranks_beside_plain_adapters(tmp_path: Path) -> None:
    arguments = [str(tmp_path), "--shape", "tiny", "--adapters", "2", "--mixed-adapters", "5"]
    workload.main([*arguments, "--small-adapters", "1"])
    model = ModelConfig(id=str(tmp_path), load_format=LoadFormat.DUMMY)
    config = EngineConfig(model=model)
    projections = adaptable(config)
    found = {
        name: judge(tmp_path / "adapters" / name, projections, config.adapters, lambda *_: None)
        for name in stamps(tmp_path)
    }
    assert not any(verdict.reasons for verdict in found.values())
    ranks = {name: verdict.rank for name, verdict in found.items()}
    assert ranks == {"a0": 16, "a1": 16, "m0": 8, "m1": 16, "m2": 32, "m3": 64, "m4": 8, "s0": 4}
    modules = {name: verdict.num_modules for name, verdict in found.items()}
    assert modules["m3"] == 7 * 4
    assert modules["s0"] == 2 * 4


def test_adapters_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 32, "moe_intermediate_size": 24, "num_experts": 8, "vocab_size": 2048}
    small |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    small |= {"head_dim": 8, "num_experts_per_tok": 2, "bos_token_id": 2046, "eos_token_id": 2047}
    shape = "qwen3-30b-a3b"
    monkeypatch.setitem(workload.SHAPES, shape, {**workload.SHAPES[shape], **small})
    workload.main([str(tmp_path), "--shape", shape, "--adapters", "1", "--expert-adapters", "1"])
    write_kind(tmp_path / "adapters" / "few", shape, "few")
    model = ModelConfig(id=str(tmp_path), load_format=LoadFormat.DUMMY)
    config = EngineConfig(model=model)
    projections = adaptable(config)
    found = {
        name: judge(tmp_path / "adapters" / name, projections, config.adapters, lambda *_: None)
        for name in ("a0", "e0", "few")
    }
    assert not any(verdict.reasons for verdict in found.values()), found
    assert found["a0"].cost is not None
    assert found["a0"].cost.expert_pages == 0
    assert found["e0"].cost is not None
    assert found["e0"].cost.expert_pages == 2
    assert found["few"].cost is not None
    assert found["few"].cost.expert_bytes * 2 == found["e0"].cost.expert_bytes, "4 experts of 8"


def test_what_is_there_is_kept_unless_it_is_of_another_kind(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    assert write_adapters(folder, "tiny", recipes(2, 0, 0)) == 2
    before = stamps(tmp_path)
    assert write_adapters(folder, "tiny", recipes(3, 0, 0)) == 1
    assert before.items() <= stamps(tmp_path).items()
    assert write_adapters(folder, "tiny", recipes(1, 0, 0, ranks=[8])) == 1
    (folder / "a1" / "adapter_config.json").unlink()  # as when writing was interrupted
    assert write_adapters(folder, "tiny", recipes(3, 0, 0)) == 2


def test_adapters_differ_and_are_the_same_each_time(tmp_path: Path) -> None:
    wanted = recipes(2, len(MIXED_RANKS), 1)
    for name in ("once", "twice"):
        write_adapters(tmp_path / name, "tiny", wanted)
    contents = {}
    for each in wanted:
        once, twice = (
            (tmp_path / name / each.name / "adapter_model.safetensors").read_bytes()
            for name in ("once", "twice")
        )
        assert once == twice
        contents[once] = each.name
    assert len(contents) == len(wanted)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parameters_are_those_of_the_files(tmp_path: Path, ranks: int) -> None:
    write_adapters(tmp_path, "tiny", recipes(1, 0, 0))
    with safe_open(tmp_path / "a0" / "adapter_model.safetensors", framework="pt") as file:
        sizes = {name: file.get_tensor(name).numel() for name in file.keys()}  # noqa: SIM118
    # A is whole in layers that are cut by their output, B in those that are cut by their input.
    by_input = ("o_proj.lora_A.weight", "down_proj.lora_A.weight")
    by_output = tuple(f"{n}_proj.lora_B.weight" for n in ("q", "k", "v", "gate", "up"))
    held = sum(
        n // ranks if name.endswith(by_input + by_output) else n for name, n in sizes.items()
    )
    assert adapter_parameters("tiny", 16, ranks) == held


def test_a_word_is_a_token(tmp_path: Path) -> None:
    workload.write_model(tmp_path, "tiny", layers=2)
    assert config_of("tiny", 2) == json.loads((tmp_path / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    # As servers do that read tokenizer_config.json: no word may begin with one of these.
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    tokenizer.add_special_tokens([settings["bos_token"], settings["eos_token"]])
    assert tokenizer.encode("t7 t1999 t20").ids == [7, 1999, 20]


def test_weights_are_written_once_and_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path), "--shape", "tiny", "--dtype", "float32", "--device", "cpu"]
    loading.main([*arguments, "--layers", "3"])
    row = json.loads(capsys.readouterr().out)
    written = list(tmp_path.glob("*.safetensors"))
    for path in written:
        os.utime(path, (1, 1))
    size = sum(path.stat().st_size for path in written)
    assert row["checkpoint_gb"] == round(size / 1e9, 3)
    assert row["load_of_reading"] >= 0
    loading.main([*arguments, "--layers", "3", "--write-only"])
    assert all(path.stat().st_mtime == 1 for path in written)
    loading.main([*arguments, "--layers", "2", "--write-only"])
    assert all(path.stat().st_mtime != 1 for path in written)


def test_shards_are_a_model_without_gaps(tmp_path: Path) -> None:
    """`load_model` refuses names that are missing and names that are too many."""
    loading.write_weights(tmp_path, "tiny", 9, "float32")  # two shards of layers
    row = loading.measure(tmp_path, EngineConfig(model=ModelConfig(id=str(tmp_path))).device)
    assert row["load_s"] >= 0
    index = json.loads((tmp_path / loading.INDEX).read_text())
    assert len(set(index["weight_map"].values())) == 4
    assert all(torch.isfinite(t).all() for shard in loading.shards("tiny", 1, torch.float16)
               for t in shard.values())  # fmt: skip
