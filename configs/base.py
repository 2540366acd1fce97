"""The model that every config extends: frozen, and loud about a key it does not know."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A frozen config that refuses unknown keys and non-finite numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )
