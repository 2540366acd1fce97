"""What an operator changes while the app runs: the Driver's `user_config`, applied in place."""

from pydantic import NonNegativeInt, PositiveInt

from configs.base import Config


class RuntimeConfig(Config):
    """Settings that restart nothing; None keeps what the engine's config says.

    pinned_adapters: references ("[source:]id[@revision]") kept on the device.
    max_queued, max_step_tokens: as in the engine's limits.
    """

    pinned_adapters: tuple[str, ...] = ()
    max_queued: NonNegativeInt | None = None
    max_step_tokens: PositiveInt | None = None
