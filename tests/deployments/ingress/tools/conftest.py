import msgspec
import pytest

from tests.fakes import FakeDriver


@pytest.fixture
def room_for_tools(driver: FakeDriver) -> None:
    """Tools as text need more tokens than the small engine has."""
    driver.info = msgspec.structs.replace(driver.info, max_total_tokens=4096, max_input_tokens=4000)
