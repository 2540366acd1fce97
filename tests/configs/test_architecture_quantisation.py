"""What `quantization_config` may say; formats that nothing here was compared with are refused."""

from typing import Any

import pytest

from configs.architectures.base import ArchitectureError
from configs.architectures.quantisation import parse_quantisation
from configs.quantisation import WeightFormat

PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"weights": {**PACKED, **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (compressed(symmetric=False), "weights with zero points is not supported"),
        (compressed(num_bits=3), "weights of int with 3 bits by group is not supported"),
        ({"quant_method": "gptq", "bits": 8}, "bits 8 is not supported; served are .*4 bits"),
        ({"quant_method": "awq", "bits": 8}, "bits 8 is not supported"),
        ({"quant_method": "awq", "w_bit": 8}, "w_bit 8 is not supported"),
        ({"quant_method": "hqq"}, "this method is not supported"),
    ],
)
def test_what_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ArchitectureError, match=words):
        parse_quantisation({"quantization_config": given})


def test_packed_integers_are_served() -> None:
    found = parse_quantisation({"quantization_config": compressed(num_bits=8)})
    assert found is not None
    assert (found.format, found.bits, found.group_size) == (WeightFormat.PACKED, 8, 128)
