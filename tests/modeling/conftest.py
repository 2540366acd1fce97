from collections.abc import Iterator

import pytest
import torch

from tests.modeling.parity.comparison import World
from tests.ranks import run_in_memory, run_ranks


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> World:
    """Models and adapters that all tests of the session share.

    For the report all ranks meet over gloo. Else most meet in memory, which sums alike and costs
    less; whole prompts alone go over gloo always.
    """
    reported = pytestconfig.pluginmanager.hasplugin("parity-report")
    return World(tmp_path_factory.mktemp("world"), run_ranks if reported else run_in_memory)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from more, and tests may share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws without a generator of its own is the same each time."""
    torch.manual_seed(0)
