"""Adapters as training tools write them: the same factors under other names."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn

from configs.wire.adapters import AdapterError
from modeling.adapters.faults import Faults
from modeling.adapters.peft.config import check_fields
from modeling.adapters.peft.folder import open_adapter
from tests.modeling.adapters.lora_files import DOWN, UP, factors, parse_config, write_lora

PLAIN = {**factors(UP, [4, 4, 4]), **factors(DOWN, [4, 4, 4], seed=1)}

RENAMES: dict[str, Callable[[str], str]] = {
    "as PEFT writes it": lambda key: key,
    "with the adapter's name": lambda key: key.replace("weight", "default.weight"),
    "with a name of one's own": lambda key: key.replace("weight", "my-adapter.weight"),
    "without PEFT's model": lambda key: key.removeprefix("base_model.model."),
    "torch.compile around it": lambda key: f"_orig_mod.{key}",
    "torch.compile inside of PEFT's model": lambda key: key.replace(
        "base_model.", "base_model._orig_mod.", 1
    ),
    "torch.compile around layers": lambda key: key.replace(".up.", "._orig_mod.up."),
    "DDP around it": lambda key: f"module.{key}",
    "DDP around torch.compile": lambda key: f"module._orig_mod.{key}",
    "FSDP": lambda key: (
        "_fsdp_wrapped_module."
        + key.replace("layers.", "layers._fsdp_wrapped_module._checkpoint_wrapped_module.")
    ),
    "all of it": lambda key: "module." + key.replace("weight", "default.weight"),
}


@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES.keys())
def test_names_of_tools_are_read_as_peft_s(rename: Callable[[str], str], tmp_path: Path) -> None:
    folder = write_lora(tmp_path, PLAIN)
    expected = list(open_adapter(folder, (UP, DOWN), 64).read())
    save_file({rename(key): x for key, x in PLAIN.items()}, folder / "adapter_model.safetensors")
    found = list(open_adapter(folder, (UP, DOWN), 64).read())
    assert [m.position for m in found] == [m.position for m in expected]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.a, other.a)
        assert torch.equal(one.b, other.b)


def test_a_raw_state_of_peft_is_read_as_what_it_saves(tmp_path: Path) -> None:
    layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(6, 10, bias=False)}) for _ in range(3))
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": layers})})
    tuned = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["up"]))
    for name, weight in tuned.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    tuned.save_pretrained(str(tmp_path))
    expected = list(open_adapter(tmp_path, (UP,), 64).read())
    raw = {f"_orig_mod.{key}": x for key, x in tuned.state_dict().items() if "lora_" in key}
    assert all(key.endswith(".default.weight") for key in raw)
    save_file(raw, tmp_path / "adapter_model.safetensors")
    for one, other in zip(open_adapter(tmp_path, (UP,), 64).read(), expected, strict=True):
        assert torch.equal(one.a, other.a)
        assert torch.equal(one.b, other.b)


def refusal(folder: Path, tensors: dict[str, Tensor]) -> str:
    write_lora(folder, PLAIN)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError) as caught:
        open_adapter(folder, (UP, DOWN), 64)
    return caught.value.message


def test_a_file_of_several_adapters_is_refused(tmp_path: Path) -> None:
    names = {key: "one" if ".up." in key else "two" for key in PLAIN}
    split = {key.replace("weight", f"{name}.weight"): PLAIN[key] for key, name in names.items()}
    assert "several adapters (one, two)" in refusal(tmp_path / "a", split)
    twice = {**PLAIN, **{key.replace("weight", "one.weight"): x + 1 for key, x in PLAIN.items()}}
    assert "are names of one tensor" in refusal(tmp_path / "b", twice)


@pytest.mark.parametrize(
    ("key", "tool"),
    [
        ("layers.0.attn.q_proj.lora_a.weight", "tune_to_peft_adapter_weights"),
        ("decoder.layers.0.mlp.w1.lora_b.weight", "FullModelHFCheckpointer"),
        ("model.layers.0.self_attn.q_proj.lora_a", "adapters.safetensors"),
        ("module.decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight", "NeMo"),
        ("model.layers.0.self_attention.adapter_layer.lora_kqv_adapter.x", "export_adapter_ckpt"),
        ("lora_unet_down_blocks_0.lora_down.weight", "image model"),
    ],
)
def test_another_format_is_refused_with_what_converts_it(
    key: str, tool: str, tmp_path: Path
) -> None:
    assert tool in refusal(tmp_path, {key: torch.ones(4, 6)})


UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\."
    r"(?:(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj)))"
)


def test_the_pattern_that_unsloth_writes_is_matched() -> None:
    plan = parse_config(
        {
            "peft_type": "LORA",
            "target_modules": UNSLOTH,
            "auto_mapping": {"base_model_class": "X", "unsloth_fixed": True},
        }
    )
    for path in (
        "model.layers.31.self_attn.q_proj",
        "model.language_model.layers.3.mlp.down_proj",
        "language_model.model.layers.0.self_attn.o_proj",
    ):
        assert plan.left_out_by(path, is_linear=True) is None
    assert plan.left_out_by("model.embed_tokens", is_linear=False) == "target_modules"


def test_what_torchtune_and_ms_swift_write_is_served() -> None:
    torchtune = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "o_proj"]}
    swift = {"lora_dtype": "float32", "lorap_lr_ratio": 16.0, "lorap_emb_lr": 1e-6}
    for extra in ({}, swift, {"enable_lora": None, "merge_weights": False}):
        faults = Faults()
        plan = check_fields({"peft_type": "LORA", **torchtune, **extra}, faults)
        assert not faults
        assert plan is not None
        assert plan.scaling_of("model.layers.0.self_attn.q_proj") == 2
