"""API keys, and what the callers that send them may do."""

import hashlib
import hmac
from dataclasses import dataclass, field
from ipaddress import ip_address

import msgspec
from starlette.requests import HTTPConnection

from configs.api import AdminAccess, ApiConfig, KeyConfig, SecretConfig
from configs.env import secret
from configs.wire.adapters import AdapterSource, allows, parse_reference
from deployments.contract import EngineInfo, ErrorKind
from deployments.ingress.access.quotas import Clock, Quota, Replicas
from deployments.ingress.http.errors import RequestError

# OpenAI's client cannot do without a key; these are what users of keyless servers write.
_PLACEHOLDERS = frozenset({"", "-", "empty", "none", "null", "dummy"})
_SALT_BYTES = 16

_NO_ADMIN = (
    "this needs the admin key: send it as `Authorization: Bearer …`. On a server without one it is "
    "off, unless http_options.host is 127.0.0.1: set api.admin_key, or api.admin: open where only "
    "people who may administer can reach the port"
)


@dataclass(frozen=True)
class Grant:
    """What a caller may do.

    name: of its key, "" without one.
    known: whether it sent one of the configured keys.
    admin: whether it may control the server.
    cache_group: callers of one group share the prefix cache; "": callers without a key.
    patterns: of "source:id" that it may use; None: all. The driver compares them with the
        adapter that a name stands for.
    quota: what it may use by the minute.
    """

    name: str = ""
    known: bool = False
    admin: bool = False
    cache_group: str = ""
    patterns: tuple[str, ...] | None = None
    quota: Quota = field(default_factory=lambda: Quota(None, None))

    def cache_salt(self, own: str) -> bytes:
        """The salt of its requests in the prefix cache; own: the request's `cache_salt`."""
        if not self.cache_group and not own:
            return b""
        both = msgspec.msgpack.encode((self.cache_group, own))
        return hashlib.blake2b(both, digest_size=_SALT_BYTES).digest()


class Keys:
    """The configured keys; without any, every caller may do what needs no admin."""

    def __init__(
        self,
        config: ApiConfig,
        default_source: AdapterSource,
        clock: Clock,
        replicas: Replicas,
        *,
        loopback: bool,
    ) -> None:
        """Read the environment; a variable that is not there raises ValueError.

        clock: what quotas fill by. replicas: how many share each quota, this one among them.
        loopback: whether the server's HTTP front can be reached from its own machine only.
        """
        self._required = bool(config.keys)
        self._grants = [
            (_digest(key), _grant(key, default_source, clock, replicas)) for key in config.keys
        ]
        has_keys = config.admin_key is not None or self._required
        self._open = config.admin is AdminAccess.OPEN or (loopback and not has_keys)
        if config.admin_key is not None:
            self._grants.append(
                (_digest(config.admin_key), Grant("admin", True, admin=True, cache_group="admin"))
            )

    def grant(self, presented: str | None) -> Grant | None:
        """What a caller with this key may do; None: nothing, a key is needed.

        Every key is compared, in constant time, so that the time reveals nothing about any.
        """
        # Headers are bytes that came as latin-1.
        digest = hashlib.sha256((presented or "").encode("latin-1", "replace")).digest()
        matches = [grant for known, grant in self._grants if hmac.compare_digest(known, digest)]
        if matches and presented:
            # Where two keys have the same secret, the admin's is last and allows more.
            return matches[-1]
        return None if self._required else Grant(admin=self._open)


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
        references = [parse_reference(pattern, default_source) for pattern in key.adapters]
        patterns = tuple(f"{one.source.value}:{one.id}" for one in references)
    quota = Quota(key.requests_per_minute, key.tokens_per_minute, clock, replicas)
    group = f"key {key.name}" if key.cache_group is None else f"group {key.cache_group}"
    return Grant(key.name, known=True, cache_group=group, patterns=patterns, quota=quota)


def is_loopback(host: str | None) -> bool:
    """Whether what listens on this host is reached from its own machine only; None: everywhere."""
    if host == "localhost":
        return True
    try:
        return host is not None and ip_address(host).is_loopback
    except ValueError:  # a name, which may mean any interface
        return False


def bearer(request: HTTPConnection) -> str | None:
    """The token of `Authorization: Bearer …`, None without one or with a placeholder."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or token.lower() in _PLACEHOLDERS:
        return None
    return token


def caller(request: HTTPConnection) -> Grant:
    """What this request's caller may do."""
    grant: Grant = request.state.grant
    return grant


def require(request: HTTPConnection, *, admin: bool = False) -> Grant:
    """What the caller may do; raises UNAUTHORIZED or FORBIDDEN where that is not enough.

    admin: the admin key opens this route; without any key, everybody who reaches a server that
    listens on loopback, or has `api.admin: open`.
    Without: keys that are kept to some adapters do not open it.
    """
    grant = caller(request)
    if grant.patterns is not None:
        raise RequestError(ErrorKind.FORBIDDEN, "this API key sees its own adapters only")
    if admin and not grant.admin:
        if grant.known:
            raise RequestError(ErrorKind.FORBIDDEN, "this needs the admin key")
        raise RequestError(ErrorKind.UNAUTHORIZED, _NO_ADMIN)
    return grant


def visible(request: HTTPConnection, info: EngineInfo) -> EngineInfo:
    """The engine's description with those adapters only that the caller may use."""
    patterns = caller(request).patterns
    adapters = [known for known in info.adapters if allows(patterns, known.source, known.id)]
    return msgspec.structs.replace(info, adapters=adapters)
