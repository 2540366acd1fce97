from collections.abc import Iterator

import pytest
import torch

from tests.modeling.parity import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Models and adapters that all tests of the session share."""
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from more, and tests may share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
