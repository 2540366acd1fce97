"""How the suite runs: nothing is timed, and worker processes share it out by files (`-n 2`)."""

import gc
import ssl
from collections.abc import Generator, Iterator
from functools import cache

import pytest
from hypothesis import HealthCheck, settings

from deployments.ingress.text import conversion
from tests.conversions import in_forks
from tests.sharing import OF_RAY
from tests.sharing import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler

# The same examples each time, and no test asserts a time: a busy machine is no failure.
settings.register_profile(
    "loray", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
# To look for new examples: pytest --hypothesis-profile=explore
settings.register_profile("explore", settings.get_profile("loray"), derandomize=False)
settings.load_profile("loray")


@pytest.fixture(scope="session", autouse=True)
def _conversions_in_forks() -> Iterator[None]:
    """Tokenizers are read in forks, in most tests (`tests/conversions.py`)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "run", in_forks(conversion.run))
        yield


@pytest.fixture(scope="session", autouse=True)
def _certificates_once() -> Iterator[None]:
    """Every HTTP client reads all certificates anew, and nearly every test has one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt the tests and what they import from garbage collection: they live to the end.

    They are two million objects, so each full garbage collection took seconds.
    """
    gc.disable()
    found = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` need a CUDA device."""
    if item.get_closest_marker("gpu"):
        import torch  # Here, not above: most tests start faster without.

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start Ray take the longest, so they begin first.

    Those that share a server come after those with one of their own: side by side the two would
    only take each other's cores.
    """
    items.sort(key=lambda item: (not item.nodeid.startswith(OF_RAY), "demo" in _fixtures(item)))


def _fixtures(item: pytest.Item) -> list[str]:
    return item.fixturenames if isinstance(item, pytest.Function) else []
