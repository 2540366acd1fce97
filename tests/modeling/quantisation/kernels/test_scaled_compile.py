"""Products in int8 and fp8 become code for Hopper's tensor cores."""

from pathlib import Path
from typing import Any

import pytest

from tests.modeling.layers.kernels import test_experts_compile
from tests.modeling.quantisation.kernels.test_tiled_integers_compile import stack_of

pytestmark = test_experts_compile.pytestmark


def compile_for_hopper(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int
) -> Any:
    """Return what Triton makes of a kernel whose pointers are aligned, by kind."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = types | dict.fromkeys(constants, "constexpr")
    values = {(names.index(own),): value for own, value in constants.items()}
    aligned = {
        (names.index(own),): [["tt.divisibility", 16]] for own in types if types[own][0] == "*"
    }
    source = ASTSource(kernel, {name: signature[name] for name in names}, values, aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


def test_many_tokens() -> None:
    pytest.importorskip("triton")
    from modeling.quantisation.kernels import int8_product

    for tile in int8_product.TILES:
        types = {
            "x": f"tensordesc<i8[{tile.tokens}, {tile.inputs}]>",
            "codes": f"tensordesc<i8[{tile.outputs}, {tile.inputs}]>",
            **{"x_scales": "*fp32", "scales": "*fp32", "bias": "*bf16", "y": "*bf16"},
            **dict.fromkeys(("num_rows", "num_outputs", "y_stride"), "i32"),
        }
        constants = {
            "INPUTS": 4096, "BLOCK_M": tile.tokens, "BLOCK_N": tile.outputs,
            "BLOCK_K": tile.inputs, "NEIGHBOURS": 8, "HAS_BIAS": False,
        }  # fmt: skip
        made = compile_for_hopper(int8_product._int8, types, constants, tile.warps, tile.stages)
        assert ".s32.s8.s8" in made["ptx"]


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(
    ("codes", "group", "product"),
    [("*i8", 0, ".s32.s8.s8"), ("*fp8e4nv", 0, ".f32.e4m3"), ("*fp8e4nv", 128, ".f32.e4m3")],
)
def test_few_tokens(rows: int, codes: str, group: int, product: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from modeling.kernels.tiles import SCALED_CUTS
    from modeling.quantisation.kernels import scaled_product

    cut = next(each for each in SCALED_CUTS if rows <= each.rows)
    types = {
        **{"x": codes, "codes": codes, "x_scales": "*fp32", "scales": "*fp32", "bias": "*bf16"},
        **{"y": "*bf16", "sums": "*fp32", "arrived": "*i32"},
        **dict.fromkeys(("num_rows", "num_outputs", "y_stride"), "i32"),
    }
    constants = {
        "INPUTS": 4096, "ROWS": rows, "BLOCK_N": cut.outputs, "BLOCK_K": group or cut.inputs,
        "GROUP": group, "SHARES": 2, "HAS_BIAS": False, "PDL": True,
    }  # fmt: skip
    made = compile_for_hopper(scaled_product._scaled, types, constants, cut.warps, cut.stages)
    assert product in made["ptx"]
    assert not stack_of(made["cubin"], tmp_path)
