"""The model that every config extends: frozen, and loud about a key it does not know."""

from pydantic import BaseModel, ConfigDict, ValidationError


class Config(BaseModel):
    """A frozen config that refuses unknown keys and non-finite numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )


def faults(error: ValueError) -> list[str]:
    """What is wrong with settings, a line each: "a.dotted.key: why"."""
    if not isinstance(error, ValidationError):
        return [str(error)]
    found = []
    for fault in error.errors(include_url=False):
        where = ".".join(map(str, fault["loc"]))
        found.append(f"{where}: {fault['msg']}" if where else str(fault["msg"]))
    return found
