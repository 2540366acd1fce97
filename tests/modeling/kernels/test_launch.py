"""Launches by key: what the compiled form is given, and when there is a new one."""

from collections.abc import Callable
from typing import Any

import torch

from modeling.kernels.launch import Launcher, aligned

Call = tuple[str, tuple[int, ...], tuple[Any, ...], dict[str, Any]]


class Compiled:
    """A form that Triton chose."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *values: self._calls.append(("form", grid, values, {}))


class Jit:
    """A kernel of two arguments and two constants, as `triton.jit` makes them."""

    arg_names = ("x", "n", "WIDTH", "PDL")

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def launch(*values: Any, **named: Any) -> Compiled:
            self.calls.append(("jit", grid, values, named))
            return Compiled(self.calls)

        return launch


def test_a_key_is_compiled_once_and_its_constants_keep_their_order() -> None:
    kernel = Jit()
    launch = Launcher(kernel)
    constants, options = {"PDL": True, "WIDTH": 8}, {"num_warps": 4}
    launch("a", (3,), ("x0", 1), constants, options)
    launch("a", (4, 2), ("x1", 2), constants, options)
    launch("b", (5,), ("x2", 3), {"PDL": False, "WIDTH": 16}, options)
    launch("b", (6,), ("x3", 4), {"PDL": False, "WIDTH": 16}, options)
    assert kernel.calls == [
        ("jit", (3,), ("x0", 1), {"PDL": True, "WIDTH": 8, "num_warps": 4}),
        ("form", (4, 2, 1), ("x1", 2, 8, True), {}),
        ("jit", (5,), ("x2", 3), {"PDL": False, "WIDTH": 16, "num_warps": 4}),
        ("form", (6, 1, 1), ("x3", 4, 16, False), {}),
    ]


def test_tensors_are_aligned_together_or_not() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16
    assert aligned(memory[start:], memory[start + 16 :]) == 0
    assert aligned(memory[start:], memory[start + 2 :]) != 0
