"""What an operator can have every driver replica do, with its adapters or with its ranks."""

import msgspec

from configs.wire.sleep import SleepMode
from deployments.contract import AdapterCommand


class SleepEngine(msgspec.Struct, frozen=True, tag_field="action", tag="sleep"):
    """End the ranks, so that all memory of their devices is free.

    sent_at: nanoseconds since the epoch; of two commands the later one counts.
    """

    sent_at: int
    mode: SleepMode


class WakeEngine(msgspec.Struct, frozen=True, tag_field="action", tag="wake"):
    """Start the ranks again. sent_at: as in `SleepEngine`."""

    sent_at: int


EngineCommand = AdapterCommand | SleepEngine | WakeEngine
"""What an operator can have every driver replica do."""
