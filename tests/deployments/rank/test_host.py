"""Where ranks meet: the store listens where it should and nowhere else."""

import gc
import socket
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from configs.engine import EngineConfig
from deployments.rank.host import RankHost, join_store, open_store
from deployments.rank.local import LocalRanks
from deployments.rank.messages import MeasuredMemory
from modeling.adapters.bank import AdapterBank
from sharding.group import memory_store
from tests.checkpoints import write_llama
from tests.checkpoints_encoders import write_encoder
from tests.checkpoints_generic import write_generic
from tests.checkpoints_others import write_gpt2
from tests.checkpoints_padded import write_padded

TIMEOUT_S = 60.0


def test_the_store_listens_on_the_nodes_address_alone() -> None:
    """It has no secret."""
    store, address = open_store("127.0.0.1", 2, TIMEOUT_S)
    other = join_store(address, TIMEOUT_S)
    store.set("key", "value")
    other.wait(["key"], timedelta(seconds=TIMEOUT_S))
    assert other.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", address.port), TIMEOUT_S)


def test_ranks_that_take_over_measure_only_where_less_memory_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of them or none, for a measurement is a step of all ranks."""
    config = EngineConfig.model_validate(
        {"model": {"id": "configs/demo/model"}, "device": "cpu", "tensor_parallel": 2}
    )
    hosts = [RankHost(config, config.model.id, rank) for rank in range(2)]
    free = [10 * 2**30, 10 * 2**30]
    for rank, host in enumerate(hosts):
        monkeypatch.setattr(host, "free_device_bytes", partial(free.__getitem__, rank))

    def measured(before: MeasuredMemory | None) -> list[MeasuredMemory]:
        store = memory_store()
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda host: host.measure(store, TIMEOUT_S, before), hosts))

    [first, other] = measured(None)
    assert first == other == MeasuredMemory(first.num_blocks, free[0])
    known = MeasuredMemory(7, free[0])
    assert measured(known) == [known, known]
    free[1] -= 2**29
    assert [memory.num_blocks for memory in measured(known)] == [first.num_blocks] * 2


@pytest.mark.parametrize(
    "write",
    [
        write_llama,
        write_gpt2,
        partial(write_generic, variant="olmo2"),
        partial(write_padded, kind="bert"),
        partial(write_encoder, kind="bert"),
    ],
    ids=["llama", "gpt2", "generic", "padded", "encoder"],
)
def test_ranks_that_ended_keep_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path]
) -> None:
    """At once: the interpreter looks for cycles seldom, and knows no tensor's size."""
    banks: list[weakref.ref[AdapterBank]] = []
    begin = AdapterBank.__init__

    def noted(bank: AdapterBank, *arguments: object, **named: object) -> None:
        begin(bank, *arguments, **named)  # type: ignore[arg-type]
        banks.append(weakref.ref(bank))

    monkeypatch.setattr(AdapterBank, "__init__", noted)
    model = {"id": str(write(tmp_path / "model"))}
    ranks = LocalRanks(EngineConfig.model_validate({"model": model, "device": "cpu"}))
    gc.disable()
    try:
        ranks.start()
        ranks.stop()
        assert [bank() for bank in banks] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("part", "setting"),
    [("cache", "num_blocks"), ("adapters", "host_bytes"), ("adapters", "device_pages")],
)
def test_memory_that_no_machine_has_is_named_by_its_setting(
    tmp_path: Path, part: str, setting: str
) -> None:
    model = {"id": str(write_llama(tmp_path))}
    given = {"model": model, "device": "cpu", part: {setting: 10**15}}
    ranks = LocalRanks(EngineConfig.model_validate(given))
    with pytest.raises(MemoryError, match=f"no memory is left for .*{setting}"):
        ranks.start()
