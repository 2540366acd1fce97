"""LoRAX's names of settings: the setting that each one sets, or why it has no effect."""

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("loray.config")

LIMITS = {
    "max_input_length": "max_input_tokens",
    "max_batch_prefill_tokens": "max_step_tokens",
    "max_concurrent_requests": "max_queued",
}

IDLE_LIMITS = {
    "waiting_served_ratio": "prompts join running requests in every step and interrupt none",
    "max_waiting_tokens": "prompts join running requests in every step, none waits for tokens",
    "eager_prefill": "prompts and running requests share each step's budget, max_step_tokens",
    "validation_workers": "prompts are encoded in a pool of threads",
}

ADAPTERS = {
    "adapter_memory_fraction": "memory_fraction",
    "max_active_adapters": "max_device_adapters",
}

IDLE_ADAPTERS = {
    "adapter_cycle_time_s": "an adapter that waits for room on the device is served within a "
    "bounded number of steps, and none leaves before another needs its room",
}


def ours(given: Any, renamed: Mapping[str, str], idle: Mapping[str, str]) -> Any:
    """Replace LoRAX's names of settings by ours; log those without effect.

    Raises ValueError where one setting is given by both names.
    """
    if not isinstance(given, Mapping):
        return given
    kept: dict[Any, Any] = {}
    for name, value in given.items():
        if name in idle:
            logger.warning("%s is accepted and has no effect: %s", name, idle[name])
            continue
        own = renamed.get(name, name)
        if own in kept:
            [lorax] = (key for key, ours in renamed.items() if ours == own)
            raise ValueError(f"`{own}` is given twice: LoRAX's name for it is `{lorax}`")
        kept[own] = value
    return kept


def limits(given: Any, default_running: int) -> Any:
    """Replace LoRAX's names of limits; LoRAX counts running and waiting requests together."""
    kept = ours(given, LIMITS, IDLE_LIMITS)
    if not isinstance(given, Mapping) or "max_concurrent_requests" not in given:
        return kept
    allowed = kept["max_queued"]
    running = kept.get("max_running", default_running)
    if isinstance(allowed, int) and isinstance(running, int):
        if allowed < 1:
            raise ValueError(f"`max_concurrent_requests` must be at least 1. Given: {allowed}")
        kept["max_running"] = min(running, allowed)
        kept["max_queued"] = allowed - kept["max_running"]
    return kept
