"""What `quantization_config` may say; formats that nothing here was compared with are refused."""

from typing import Any

import pytest

from configs.architectures.base import ArchitectureError
from configs.architectures.quantisation import parse_quantisation
from configs.architectures.select import parse_architecture
from configs.quantisation import Activations, WeightFormat

PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"weights": {**PACKED, **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def int8(inputs: dict[str, Any], **weights: Any) -> dict[str, Any]:
    """Weights and activations of 8 bits."""
    given = compressed(num_bits=8, strategy="channel", group_size=None, **weights)
    own = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    given["config_groups"]["group_0"]["input_activations"] = own | inputs
    return given


def fp4(size: int, symmetric: bool = True, **inputs: Any) -> dict[str, Any]:
    """nvfp4 with other inputs that share a scale, and activations as given."""
    kind = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": size}
    given = compressed(**kind, symmetric=symmetric)
    if inputs:
        own = kind | {"dynamic": "local", "symmetric": True} | inputs
        given["config_groups"]["group_0"]["input_activations"] = own
    return given


def gptq(**dynamic: Any) -> dict[str, Any]:
    """GPTQ with settings of its own for modules that a pattern finds."""
    return {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up_proj": dynamic}}


def several(*targets: list[str]) -> dict[str, Any]:
    """compressed-tensors with groups of 4 bits, of 32 inputs, 64 and so on, and their targets."""
    groups = {}
    for index, own in enumerate(targets):
        (group,) = compressed(num_bits=4, group_size=32 << index)["config_groups"].values()
        groups[f"group_{index}"] = group | {"targets": own}
    return {**compressed(num_bits=4), "config_groups": groups}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "format 'marlin' is not"),
        (compressed(num_bits=3), "weights of int with 3 bits by group is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not supported; served are .*4 or 8 bits"),
        ({"quant_method": "awq", "bits": 8}, "bits 8 is not supported"),
        ({"quant_method": "awq", "w_bit": 8}, "w_bit 8 is not supported"),
        (gptq(bits=3), "bits 3 is not supported"),
        (gptq(adapter={"rank": 8}), r"dynamic '\+:\.\*up_proj' with adapter is not supported"),
        (several(["Linear"], ["re:("]), r"expression '\(' .* is not supported"),
        ({"quant_method": "hqq"}, "this method is not supported"),
        (int8({"symmetric": False}), "input_activations .* with zero points is not supported"),
        (int8({"strategy": "tensor"}), "'tensor', 'dynamic': True} is not supported"),
        (int8({}, symmetric=False), "zero points and activations of 8 bits is not supported"),
        (fp4(32), "weights of float with 4 bits by tensor_group is not supported"),
        (fp4(16, symmetric=False), "weights of float with 4 bits by tensor_group is not"),
        (fp4(16, num_bits=8, dynamic=True), "input_activations .*'num_bits': 8.* is not supported"),
        (fp4(16, dynamic=True), "input_activations .*'dynamic': True.* is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED"}, "quant_algo MIXED is not supported"),
        ({"quant_method": "modelopt"}, "quant_algo None is not supported"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
            "group_size 32 is not supported",
        ),
    ],
)
def test_what_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ArchitectureError, match=words):
        parse_quantisation({"quantization_config": given})


def test_packed_integers_are_served() -> None:
    found = parse_quantisation({"quantization_config": compressed(num_bits=8)})
    assert found is not None
    assert (found.format, found.bits, found.group_size) == (WeightFormat.PACKED, 8, 128)


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        (compressed(symmetric=False), {"zero_points": True}),
        (compressed(), {"zero_points": False}),
        ({"quant_method": "gptq", "bits": 4}, {"offset_zeros": True}),
        ({"quant_method": "gptq", "bits": 4, "format": "gptq_v2"}, {"offset_zeros": False}),
        ({"quant_method": "gptq", "bits": 8}, {"bits": 8}),
        ({"load_in_4bit": True}, {"format": WeightFormat.NF4}),
        (int8({}), {"format": WeightFormat.ROUNDED_INT8, "activations": Activations.TOKEN}),
        (int8({"strategy": "tensor", "dynamic": False}), {"activations": Activations.STATIC}),
        ({"load_in_8bit": True}, {"format": WeightFormat.INT8}),
        (fp4(16), {"format": WeightFormat.FP4, "activations": Activations.NONE}),
        (fp4(16, dynamic="local"), {"group_size": 16, "activations": Activations.GROUP}),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
            {"format": WeightFormat.FP8, "activations": Activations.TOKEN},
        ),
        (
            {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]},
            {"format": WeightFormat.FP8_BLOCKS},
        ),
        (
            compressed(
                num_bits=8, type="float", strategy="block", block_structure="128x64", group_size=0
            ),
            {"format": WeightFormat.FP8_BLOCKS, "block": (128, 64)},
        ),
    ],
)
def test_forms_that_files_have(given: dict[str, Any], fields: dict[str, Any]) -> None:
    """As their makers' releases wrote them."""
    found = parse_quantisation({"quantization_config": given})
    assert found is not None
    assert {key: getattr(found, key) for key in fields} == fields


def test_modules_that_gptq_left_out_may_be_named() -> None:
    given = {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*down_proj": {}}}
    found = parse_quantisation({"quantization_config": given})
    assert found is not None
    assert found.format is WeightFormat.GPTQ
    assert found.others == ()


def test_modules_may_have_settings_of_their_own() -> None:
    given = gptq(bits=8, group_size=-1, desc_act=True)
    found = parse_quantisation({"quantization_config": given})
    assert found is not None
    assert (found.bits, found.group_size) == (4, 128)
    ((begins, other),) = found.others
    assert (begins, other.bits, other.group_size) == (".*up_proj", 8, None)


def test_names_go_before_expressions_and_both_before_classes() -> None:
    given = several(["Linear", "re:.*b_proj"], ["re:.*a_proj"], ["lm_head", "re:.*c_proj"])
    found = parse_quantisation({"quantization_config": given})
    assert found is not None
    assert found.group_size == 32
    ordered = [(begins, other.group_size) for begins, other in found.others]
    assert ordered == [("lm_head$", 128), (".*a_proj", 64), (".*b_proj", 32), (".*c_proj", 128)]


def test_a_larger_model_has_one_scheme() -> None:
    text = {"model_type": "llama", "num_hidden_layers": 1}
    fields = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    given = several(["Linear"], ["re:.*a_proj"])
    with pytest.raises(ArchitectureError, match=r"several schemes, .* in models that read more"):
        parse_architecture({**fields, "quantization_config": given})
