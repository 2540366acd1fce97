"""The HTTP door: who may enter, how much each may ask for, what a request may weigh."""

import string
from enum import StrEnum

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from configs.base import Config

_SHA256_DIGITS = 64


class SecretConfig(Config):
    """A secret that the config does not hold: its hash, or the variable that holds it.

    sha256: of the secret's UTF-8 bytes, in hexadecimal. env: an environment variable of every
    node that an ingress may run on.
    """

    sha256: str | None = None
    env: str | None = Field(default=None, min_length=1)

    @field_validator("sha256")
    @classmethod
    def _is_a_digest(cls, given: str | None) -> str | None:
        if given is None:
            return None
        if len(given) != _SHA256_DIGITS or set(given) - set(string.hexdigits):
            raise ValueError(
                'must be 64 hexadecimal digits: printf %s "$KEY" | sha256sum. '
                "A key itself does not belong into the config"
            )
        return given.lower()

    @model_validator(mode="after")
    def _has_one_place(self) -> "SecretConfig":
        if (self.sha256 is None) == (self.env is None):
            raise ValueError("needs exactly one of `sha256` and `env`")
        return self


class KeyConfig(SecretConfig):
    """One API key.

    name: for logs. cache_group: callers of one group find each other's prompts in the prefix cache,
    which can be told by `cached_tokens` and by time; None: this key's callers alone. adapters:
    patterns of the adapters that it may use, "[source:]id" with `*` and `?`; None: all.
    requests_per_minute, tokens_per_minute: shared out evenly among the ingress replicas; tokens are
    those of prompts and answers; None: no limit.
    """

    name: str = Field(min_length=1)
    cache_group: str | None = Field(default=None, min_length=1)
    adapters: tuple[str, ...] | None = None
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None


class AdminAccess(StrEnum):
    """Who may load, unload, pin and name adapters by HTTP."""

    KEY = "key"
    OPEN = "open"


class ApiConfig(Config):
    """What stands before the routes; the names of cross-origin settings are LoRAX's.

    keys: with any, every request needs one of them, but for health checks and pages.
    admin_key: for the routes that control the server; it opens all others too. admin: without
    any key those routes are closed (`key`), unless the server listens on loopback; `open`: whoever
    reaches the port may use them.
    cors_allow_origin: none means that browsers let no other site's pages call this server.
    max_json_depth: of arrays and objects within each other. max_json_objects: arrays and objects of
    one body: messages, content parts, tools and prompts together. body_timeout_s: how long a
    request's body may take to come.
    """

    keys: tuple[KeyConfig, ...] = ()
    admin_key: SecretConfig | None = None
    admin: AdminAccess = AdminAccess.KEY
    cors_allow_origin: tuple[str, ...] = ()
    cors_allow_method: tuple[str, ...] = ("GET", "POST")
    cors_allow_header: tuple[str, ...] = ("authorization", "content-type")
    cors_expose_header: tuple[str, ...] = ()
    cors_allow_credentials: bool = False
    max_body_bytes: PositiveInt = 8 * 2**20
    max_header_bytes: PositiveInt = 32 * 2**10
    max_headers: PositiveInt = 100
    max_json_depth: PositiveInt = 64
    max_json_objects: PositiveInt = 10_000
    body_timeout_s: PositiveFloat = 60.0

    @property
    def has_quotas(self) -> bool:
        """Whether any key may use only so much."""
        return any(key.requests_per_minute or key.tokens_per_minute for key in self.keys)

    @model_validator(mode="after")
    def _credentials_need_named_origins(self) -> "ApiConfig":
        if self.cors_allow_credentials and "*" in self.cors_allow_origin:
            raise ValueError(
                "cors_allow_credentials with the origin `*` would let every site act as its "
                "visitors: name the origins"
            )
        return self

    @model_validator(mode="after")
    def _open_is_for_servers_without_keys(self) -> "ApiConfig":
        if self.admin is AdminAccess.OPEN and (self.keys or self.admin_key):
            raise ValueError("`admin: open` is for servers without any key: give an `admin_key`")
        return self

    @model_validator(mode="after")
    def _names_differ(self) -> "ApiConfig":
        names = [key.name for key in self.keys]
        if len(set(names)) < len(names):
            raise ValueError("two keys have the same name")
        return self
