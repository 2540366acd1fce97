"""API keys, and the permissions of the callers that send them."""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from urllib.parse import urlsplit

import msgspec
from starlette.requests import HTTPConnection

from configs.api import AdminAccess, ApiConfig, KeyConfig, SecretConfig
from configs.env import secret
from configs.wire.adapters import AdapterSource, allows, parse_pattern
from deployments.contract import AdapterInfo, EngineInfo, ErrorKind
from deployments.ingress.access.quotas import Clock, Quota, Replicas
from deployments.ingress.http.errors import RequestError

# OpenAI's client cannot do without a key; these are what users of keyless servers write.
_PLACEHOLDERS = frozenset({"", "-", "empty", "none", "null", "dummy"})
_SALT_BYTES = 16

_NO_ADMIN = (
    "this needs the admin key: send it as `Authorization: Bearer …`. On a server without one it is "
    "off, unless http_options.host is 127.0.0.1 and the request is sent there, by no other site's "
    "page: set api.admin_key, or api.admin: open where only administrators can reach the port"
)


@dataclass(frozen=True)
class Grant:
    """The permissions of a caller.

    name: of its key, "" without one.
    known: whether it sent one of the configured keys.
    admin: whether it may use the admin routes.
    cache_group: callers of one group share the prefix cache; "": callers without a key.
    patterns: of the adapters ("source:id") that it may use; None: all. The driver compares them
        with the adapter itself, after it has resolved names.
    quota: its requests and tokens a minute.
    background: its requests are served only where no other wants to be.
    """

    name: str = ""
    known: bool = False
    admin: bool = False
    cache_group: str = ""
    patterns: tuple[str, ...] | None = None
    quota: Quota = field(default_factory=lambda: Quota(None, None))
    background: bool = False

    def cache_salt(self, own: str) -> bytes:
        """The prefix cache's salt of a request of this caller; own: the request's `cache_salt`."""
        if not self.cache_group and not own:
            return b""
        both = msgspec.msgpack.encode((self.cache_group, own))
        return hashlib.blake2b(both, digest_size=_SALT_BYTES).digest()


class Keys:
    """The configured keys. Without any, every caller may use all but the admin routes."""

    def __init__(
        self,
        config: ApiConfig,
        default_source: AdapterSource,
        clock: Clock,
        replicas: Replicas,
        *,
        loopback: bool,
    ) -> None:
        """Read the keys from the environment; a missing variable raises ValueError.

        clock: in seconds, for the quotas. replicas: the number of ingress replicas that share each
        quota. loopback: whether the server can be reached from its own machine only.
        """
        self._required = bool(config.keys)
        self._grants = [
            (_digest(key), _grant(key, default_source, clock, replicas)) for key in config.keys
        ]
        has_keys = config.admin_key is not None or self._required
        self._open = config.admin is AdminAccess.OPEN or (loopback and not has_keys)
        self._only_loopback = config.admin is not AdminAccess.OPEN
        self._trusted_origins = frozenset(config.cors_allow_origin)
        if config.admin_key is not None:
            self._grants.append(
                (_digest(config.admin_key), Grant("admin", True, admin=True, cache_group="admin"))
            )

    def grant(self, presented: str | None) -> Grant | None:
        """The permissions of a caller with this key; None: it needs a valid key.

        Every key is compared, in constant time, so that the time reveals nothing about the keys.
        """
        # Headers are bytes, which Starlette decodes as latin-1.
        digest = hashlib.sha256((presented or "").encode("latin-1", "replace")).digest()
        matches = [grant for known, grant in self._grants if hmac.compare_digest(known, digest)]
        if matches and presented:
            # If two keys have the same secret, the admin's is last and permits more.
            return matches[-1]
        return None if self._required else Grant(admin=self._open)

    def is_from_elsewhere(self, request: HTTPConnection) -> bool:
        """Whether the page of another site sent this; it needs no key to reach a visitor's machine.

        Browsers name the page's site in every POST. A page whose own name leads to this machine is
        recognised by that name, as long as the server listens on loopback.
        """
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        try:
            name, site = urlsplit(f"//{host}").hostname, urlsplit(origin or "").netloc
        except ValueError:
            return True
        if origin is not None and site != host and origin not in self._trusted_origins:
            return True
        return self._only_loopback and not is_loopback(name)

    def of_batch(self, name: str) -> Grant | None:
        """The permissions of a batch of the key with this name; None if there is no such key."""
        named = [grant for _, grant in self._grants if grant.name == name]
        if not name and not self._required:
            named = [Grant()]
        # If a key has the admin's name, the key is first and permits less.
        return replace(named[0], background=True) if named else None


def _digest(config: SecretConfig) -> bytes:
    if config.sha256 is not None:
        return bytes.fromhex(config.sha256)
    assert config.env is not None, "checked by the config"
    return hashlib.sha256(secret(config.env).encode()).digest()


def _grant(
    key: KeyConfig, default_source: AdapterSource, clock: Clock, replicas: Replicas
) -> Grant:
    patterns = None
    if key.adapters is not None:
        patterns = tuple(parse_pattern(pattern, default_source) for pattern in key.adapters)
    quota = Quota(key.requests_per_minute, key.tokens_per_minute, clock, replicas)
    group = f"key {key.name}" if key.cache_group is None else f"group {key.cache_group}"
    return Grant(key.name, known=True, cache_group=group, patterns=patterns, quota=quota)


def is_loopback(host: str | None) -> bool:
    """Whether a server on this host can be reached from its own machine only; None: all hosts."""
    if host == "localhost":
        return True
    try:
        return host is not None and ip_address(host).is_loopback
    except ValueError:  # A name may resolve to any interface.
        return False


def bearer(request: HTTPConnection) -> str | None:
    """The token of `Authorization: Bearer …`; None without one or with a placeholder."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return _secret(token) if scheme.lower() == "bearer" else None


def api_key(request: HTTPConnection) -> str | None:
    """The caller's API key: a bearer token, or Anthropic's `x-api-key`."""
    return bearer(request) or _secret(request.headers.get("x-api-key", ""))


def _secret(sent: str) -> str | None:
    """A secret from a header; None for a placeholder."""
    return None if sent.strip().lower() in _PLACEHOLDERS else sent.strip()


def hub_token(request: HTTPConnection) -> str | None:
    """The caller's token for private adapters: `x-hub-token`, else a bearer token.

    A bearer token that is one of the configured API keys is not sent to the hub.
    """
    token = request.headers.get("x-hub-token", "").strip()
    if token:
        return token
    return None if grant_of(request).known else bearer(request)


def grant_of(request: HTTPConnection) -> Grant:
    """The permissions of the request's caller."""
    grant: Grant = request.state.grant
    return grant


def require(request: HTTPConnection, *, admin: bool = False) -> None:
    """Raise UNAUTHORIZED or FORBIDDEN if the caller may not use this route.

    Keys that are limited to some adapters are refused. admin: the admin key is needed; on a server
    without keys that listens on loopback, or has `api.admin: open`, no key is needed.
    """
    grant = grant_of(request)
    if grant.patterns is not None:
        raise RequestError(ErrorKind.FORBIDDEN, "this API key sees its own adapters only")
    if admin and not grant.admin:
        if grant.known:
            raise RequestError(ErrorKind.FORBIDDEN, "this needs the admin key")
        raise RequestError(ErrorKind.UNAUTHORIZED, _NO_ADMIN)


def visible(request: HTTPConnection, info: EngineInfo) -> EngineInfo:
    """The engine's description, with only the adapters that the caller may use."""
    patterns = grant_of(request).patterns
    adapters = [each for each in info.adapters if _is_open(patterns, each)]
    return msgspec.structs.replace(info, adapters=adapters)


def _is_open(patterns: Sequence[str] | None, adapter: AdapterInfo) -> bool:
    """Whether a caller may use a listed name; as in requests, its target decides."""
    source, _, id = (adapter.target or f"{adapter.source}:{adapter.id}").partition(":")
    return allows(patterns, source, id)
