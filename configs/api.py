"""The HTTP interface: API keys, their quotas, cross-origin rules, limits of a request's size."""

import re
import string
from enum import StrEnum

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from configs.base import Config
from configs.wire.adapters import AdapterSource, parse_pattern

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
    def _has_one_source(self) -> "SecretConfig":
        if (self.sha256 is None) == (self.env is None):
            raise ValueError("needs exactly one of `sha256` and `env`")
        return self


class KeyConfig(SecretConfig):
    """One API key.

    name: for logs.
    cache_group: keys of one group share the prefix cache; `cached_tokens` and response times show
    a caller which prompts of its group were computed before. None: this key has a group of its own.
    adapters: patterns of the adapters that it may use, "[source:]id" with `*` and `?`; None: all.
    requests_per_minute, tokens_per_minute: each ingress replica grants an equal part of them;
    tokens of prompts and answers count. None: no limit.
    """

    name: str = Field(min_length=1)
    cache_group: str | None = Field(default=None, min_length=1)
    adapters: tuple[str, ...] | None = None
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None

    @field_validator("adapters")
    @classmethod
    def _are_patterns(cls, given: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for pattern in given or ():
            parse_pattern(pattern, AdapterSource.HUB)
        return given


class AdminAccess(StrEnum):
    """Which callers may load, unload, pin and name adapters by HTTP."""

    KEY = "key"
    OPEN = "open"


class ApiConfig(Config):
    """Checks before the routes; the names of cross-origin settings are LoRAX's.

    keys: with any, every request needs one of them, except health checks and pages.
    admin_key: for the routes that control the server; it opens all others too.
    admin: `key`: without any key those routes are closed, unless the server listens on loopback.
    `open`: every client that reaches the port may use them.
    cors_allow_origin: none means that browsers let no other site's pages call this server.
    max_json_depth: of arrays and objects within each other.
    max_json_objects: arrays and objects of one body: messages, content parts, tools and prompts
    together. Its objects have at most ten times as many fields.
    max_open_body_bytes: of the larger bodies of all open requests of an ingress replica together,
    at least max_body_bytes; a request holds some ten times the size of its body until it ends.
    body_timeout_s: the longest time in which a request's body must arrive.
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
    max_open_body_bytes: PositiveInt = 512 * 2**20
    max_header_bytes: PositiveInt = 32 * 2**10
    max_headers: PositiveInt = 100
    max_json_depth: PositiveInt = 64
    max_json_objects: PositiveInt = 10_000
    body_timeout_s: PositiveFloat = 60.0

    @property
    def has_quotas(self) -> bool:
        """Whether any key has a quota."""
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
    def _keys_differ(self) -> "ApiConfig":
        names = [key.name for key in self.keys]
        if len(set(names)) < len(names):
            raise ValueError("two keys have the same name")
        secrets = [*self.keys, *([self.admin_key] if self.admin_key else [])]
        for kind in ("sha256", "env"):
            given = [found for each in secrets if (found := getattr(each, kind)) is not None]
            for secret in given:
                if given.count(secret) > 1:
                    raise ValueError(f"two keys are one: both have {kind} {secret}")
        return self

    @field_validator("cors_allow_origin")
    @classmethod
    def _are_origins(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for origin in given:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+|null", origin):
                raise ValueError(
                    f"`{origin}` is no origin as browsers send it: https://example.com, without "
                    "a path or a slash at its end"
                )
        return given
