"""What `quantization_config` may say; formats that nothing here was compared with are refused."""

from typing import Any

import pytest

from configs.architectures.base import ArchitectureError
from configs.architectures.quantisation import parse_quantisation
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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"quant_method": "gptq", "bits": 4, "format": "marlin"}, "format 'marlin' is not"),
        (compressed(num_bits=3), "weights of int with 3 bits by group is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not supported; served are .*4 or 8 bits"),
        ({"quant_method": "awq", "bits": 8}, "bits 8 is not supported"),
        ({"quant_method": "awq", "w_bit": 8}, "w_bit 8 is not supported"),
        ({"quant_method": "hqq"}, "this method is not supported"),
        (int8({"symmetric": False}), "input_activations .* with zero points is not supported"),
        (int8({"strategy": "tensor"}), "'tensor', 'dynamic': True} is not supported"),
        (int8({}, symmetric=False), "zero points and activations of 8 bits is not supported"),
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
    given["dynamic"] = {"-:.*down_proj": {}, "+:.*up_proj": {"bits": 8}}
    with pytest.raises(ArchitectureError, match=r"dynamic '\+:\.\*up_proj', other settings"):
        parse_quantisation({"quantization_config": given})
