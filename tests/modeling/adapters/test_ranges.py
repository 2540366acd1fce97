"""Numbers that are finite in an adapter's file and infinite in the pools' type are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.adapters import AdaptersConfig
from configs.wire.adapters import AdapterError, AdapterKey, AdapterRefusal, FetchedAdapter
from modeling.adapters.bank import AdapterBank, BankSize
from modeling.runner.adapter_check import judge
from tests.modeling.adapters.lora_files import DOWN, UP, factors, write_lora
from tests.modeling.adapters.peft.test_ends import HEAD, OTHER_ROWS, ends

A, B = (f"base_model.model.model.layers.1.up.lora_{factor}.weight" for factor in "AB")
HALF, WIDE = torch.float16, torch.float32


def bank(dtype: torch.dtype, direct_reads: bool = False) -> AdapterBank:
    size = BankSize(pages=8, slots=2, max_rank=8, host_bytes=2**18)
    return AdapterBank((UP, DOWN), size, dtype, torch.device("cpu"), direct_reads=direct_reads)


def fetched(folder: Path, key: int = 1) -> FetchedAdapter:
    return FetchedAdapter(AdapterKey(key), folder.name, str(folder), folder.name)


def written(folder: Path, dtype: torch.dtype, values: dict[str, float], **fields: Any) -> Path:
    tensors = {key: each.to(dtype) for key, each in factors(UP, [4, 4, 4]).items()}
    for name, value in values.items():
        tensors[name][2, 3] = value
    return write_lora(folder, tensors, **fields)


@pytest.mark.parametrize(
    ("stored", "values", "alpha", "pools", "fault"),
    [
        (WIDE, {A: -1e5}, 4, HALF, "model.layers.1.up.lora_A has values up to 1e+05, which"),
        (WIDE, {B: 7e4}, 4, HALF, "model.layers.1.up.lora_B has values up to 7e+04, which"),
        (WIDE, {B: -4e4}, 8, HALF, "layers.1.up.lora_B has .* up to 4e.04, times the scaling of 2"),
        (HALF, {B: 4e4}, 8, HALF, "layers.1.up.lora_B has .* up to 4e.04, times the scaling of 2"),
        (torch.bfloat16, {A: 1e5}, 4, HALF, "layers.1.up.lora_A"),
        (torch.float64, {A: 1e39}, 4, WIDE, "layers.1.up.lora_A"),
        (WIDE, {A: 6.5e4, B: 3.2e4}, 8, HALF, None),
        (HALF, {A: 6.5e4, B: 3.2e4}, 8, HALF, None),
        (WIDE, {A: 1e5, B: 1e5}, 8, torch.bfloat16, None),
    ],
)
@pytest.mark.parametrize("direct_reads", [False, True])
def test_factors(
    tmp_path: Path,
    stored: torch.dtype,
    values: dict[str, float],
    alpha: int,
    pools: torch.dtype,
    fault: str | None,
    direct_reads: bool,
) -> None:
    folder = written(tmp_path / "large", stored, values, lora_alpha=alpha)
    verdict = judge(folder, (UP, DOWN), AdaptersConfig(max_rank=8), lambda *_: None, dtype=pools)
    server = bank(pools, direct_reads)
    if fault is None:
        assert verdict.reasons == ()
        server.stage(fetched(folder))
        server.load(AdapterKey(1), 0, [[0], []]).wait()
        assert all(bool(torch.isfinite(pool.bt[0]).all()) for pool in server.pools[:1])
        return
    with pytest.raises(AdapterError, match=fault.replace("+", r"\+")) as raised:
        server.stage(fetched(folder))
    assert raised.value.refusal is AdapterRefusal.UNSUPPORTED
    assert verdict.reasons == raised.value.reasons
    assert server.host_bytes == 0
    server.check()


def test_whole_matrices(tmp_path: Path) -> None:
    head = OTHER_ROWS.clone()
    head[4, 2] = 1e5
    tensors = factors(UP, [4, 4, 4]) | {f"{HEAD}.weight": head}
    folder = write_lora(
        tmp_path / "head", tensors, target_modules=["up"], modules_to_save=["lm_head"]
    )
    config = AdaptersConfig(max_rank=8)
    assert judge(folder, ends(), config, lambda *_: None).reasons == ()
    (reason,) = judge(folder, ends(), config, lambda *_: None, dtype=HALF).reasons
    assert "lm_head has values up to 1e+05, which are infinite in float16" in reason
