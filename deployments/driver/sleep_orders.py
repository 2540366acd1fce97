"""What operators want of the ranks: that they sleep, and when, or that they wake."""

from collections.abc import Callable

from configs.wire.sleep import SleepMode

Done = Callable[[str], None]
"""Takes the fault of a sleep or a wake; "" for none."""


class SleepOrders:
    """Sleeps and wakes that were ordered and have not happened; on the engine loop's thread.

    mode: how running requests end before the sleep; None: no sleep is wanted.
    waking: whether sleeping ranks are to wake.
    """

    def __init__(self) -> None:
        self.mode: SleepMode | None = None
        self._sleeps: list[Done] = []
        self._wakes: list[Done] = []

    @property
    def waking(self) -> bool:
        """Whether sleeping ranks are to wake."""
        return bool(self._wakes)

    def sleep(self, mode: SleepMode, done: Done) -> None:
        """Have the ranks sleep."""
        self.mode = mode
        self._sleeps.append(done)

    def wake(self, done: Done) -> None:
        """Have the ranks wake; a sleep that has not begun does not begin."""
        self.mode = None
        self._wakes.append(done)
        self.slept("the server was woken before it slept")

    def slept(self, fault: str = "") -> None:
        """Reply to the orders to sleep."""
        _reply(self._sleeps, fault)

    def woken(self, fault: str = "") -> None:
        """Reply to the orders to wake."""
        _reply(self._wakes, fault)


def _reply(waiting: list[Done], fault: str) -> None:
    while waiting:
        waiting.pop(0)(fault)
