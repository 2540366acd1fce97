"""The base class of all configs."""

from pydantic import BaseModel, ConfigDict, ValidationError


class Config(BaseModel):
    """A frozen config that refuses unknown keys and non-finite numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


def faults(error: ValueError) -> list[str]:
    """Each fault of the settings as a line: "a.dotted.key: why"."""
    if not isinstance(error, ValidationError):
        return [str(error)]
    found = []
    for fault in error.errors(include_url=False):
        key = ".".join(map(str, fault["loc"]))
        found.append(f"{key}: {fault['msg']}" if key else str(fault["msg"]))
    return found
