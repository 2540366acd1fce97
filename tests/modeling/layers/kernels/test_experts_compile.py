"""The kernels of experts with adapters become code for Hopper; Triton needs no GPU for that.

What the interpreter takes need not compile: Triton's passes fail on some layouts.
"""

import os
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled"
)

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
HIDDEN, INNER, EXPERTS, LAYERS, POOL = 2048, 768, 32, 2, 64
STEPS: list[tuple[int, int]] = [(tokens, 5000) for tokens in (1, 4, 16, 256, 512)]
STEPS += [(tokens, tokens) for tokens in (64, 256, 512, 1024)]
"""Tokens of steps, and from how many on deltas are computed tile by tile."""


class Compiled:
    """In the place of launches: compiles each form once, and launches none.

    names: of the kernels. codes, texts: what a GPU would load of each form, and its PTX. shared:
    bytes of shared memory that each takes.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.codes: list[bytes] = []
        self.texts: list[str] = []
        self.shared: list[int] = []
        self._forms: set[object] = set()

    def __call__(
        self, launcher: Any, key: Any, grid: Any, arguments: Any, constants: Any, options: Any
    ) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

        kernel = launcher._kernel
        name, names = kernel.fn.__name__, kernel.arg_names
        tensors = [isinstance(each, torch.Tensor) for each in arguments]
        types = [
            TYPES[own.dtype] if is_tensor else "fp32" if isinstance(own, float) else "i32"
            for own, is_tensor in zip(arguments, tensors, strict=True)
        ]
        form = (name, *types, *sorted(constants.items()), *sorted(options.items()))
        if form in self._forms:
            return
        self._forms.add(form)
        signature = dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
        values = {(names.index(own),): value for own, value in constants.items()}
        known = [not each.do_not_specialize for each in kernel.params]
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, own in enumerate(arguments)
            if tensors[i] or (types[i] == "i32" and known[i] and own % 16 == 0)
        }
        kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
        source = kind(kernel, signature, values, aligned)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(options))
        self.codes.append(made.asm["cubin"])
        self.texts.append(made.asm["ptx"])
        self.shared.append(made.metadata.shared)
        self.names.add(name)


@pytest.mark.parametrize(("pages", "active"), [(1, 8), (3, 2), (8, 3)])
def test_they_compile(pages: int, active: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one token to 512. pages: of the largest rank. active: experts of a token."""
    pytest.importorskip("triton")
    from modeling.kernels import pairs
    from modeling.kernels.launch import Launcher
    from modeling.layers.kernels import expert_deltas, experts

    compiled = Compiled()
    launch = lambda own, *given: compiled(own, *given)  # noqa: E731
    monkeypatch.setattr(Launcher, "__call__", launch)
    for module in (pairs, experts, expert_deltas):
        monkeypatch.setattr(module, "has_dependent_launch", lambda device: True)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16)

    pools = tuple(
        (numbers(LAYERS, POOL, 8, inputs), numbers(LAYERS, POOL, 8, outputs))
        for inputs, outputs in ((HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN))
    )
    up, down = numbers(EXPERTS, 2 * INNER, HIDDEN), numbers(EXPERTS, HIDDEN, INNER)
    counts = torch.zeros(EXPERTS, dtype=torch.int32)
    table = torch.zeros(4, len(pools), EXPERTS, pages, dtype=torch.int32)
    for tokens, tiles_from in STEPS:
        monkeypatch.setattr(experts, "DELTA_TILES_FROM", tiles_from)
        slots, ids = torch.zeros(tokens).int(), torch.zeros(tokens, active).long()
        deltas = pairs.PairDeltas(slots, table, pools, (0, 1, 2))
        own = expert_deltas.LayerDeltas(deltas, (0, 1), 2, 0)
        x, shares = numbers(tokens, HIDDEN), numbers(tokens, active)
        experts.experts(x, up, down, ids, shares, counts, own)
        y, added = numbers(tokens * active, INNER), numbers(tokens * active, HIDDEN)
        of_pairs = ids.flatten(), torch.zeros(tokens * active).long()
        deltas.add(y, added, *of_pairs, 0, 0, EXPERTS, 0)
    assert {"_shrink", "_expand", "down_of_token_kernel", "sum_deltas_kernel"} < compiled.names
    assert "shrink_tile_kernel" in compiled.names
