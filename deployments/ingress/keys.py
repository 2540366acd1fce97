"""Who asks: API keys, and what each may do."""

import hashlib
import hmac
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import msgspec
from starlette.requests import HTTPConnection

from configs.adapters import AdapterReference, AdapterSource, parse_reference
from configs.api import ApiConfig, KeyConfig, SecretConfig
from configs.env import secret
from deployments.contract import EngineInfo, ErrorKind
from deployments.ingress.errors import RequestError
from deployments.ingress.quotas import Clock, Quota, Replicas

# OpenAI's client cannot do without a key; these are what users of keyless servers write.
_PLACEHOLDERS = frozenset({"", "-", "empty", "none", "null", "dummy"})


@dataclass(frozen=True)
class Grant:
    """What a caller may do.

    name: of its key, "" without one. known: whether it brought one of the configured keys.
    patterns: of "source:id" that it may use; None: all.
    """

    name: str = ""
    known: bool = False
    admin: bool = False
    patterns: tuple[str, ...] | None = None
    quota: Quota = field(default_factory=lambda: Quota(None, None))

    def allows(self, source: str, id: str) -> bool:
        """Whether it may use the adapter of that name, and see it in lists."""
        if self.patterns is None:
            return True
        name = f"{source}:{id}"
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


class Keys:
    """The configured keys; without any, everybody may do everything but what admins may."""

    def __init__(
        self, config: ApiConfig, default_source: AdapterSource, clock: Clock, replicas: Replicas
    ) -> None:
        """Read the environment; a variable that is not there raises ValueError.

        clock: what quotas fill by. replicas: how many share each quota, this one among them.
        """
        self._required = bool(config.keys)
        self._grants = [
            (_digest(key), _grant(key, default_source, clock, replicas)) for key in config.keys
        ]
        self._guarded = config.admin_key is not None or self._required
        if config.admin_key is not None:
            self._grants.append((_digest(config.admin_key), Grant("admin", True, admin=True)))

    def grant(self, presented: str | None) -> Grant | None:
        """What the bearer of this key may do; None: nothing, for a key is needed.

        Every key is compared, in constant time, so that the time tells nothing about any.
        """
        # Headers are bytes that came as latin-1.
        digest = hashlib.sha256((presented or "").encode("latin-1", "replace")).digest()
        matches = [grant for known, grant in self._grants if hmac.compare_digest(known, digest)]
        if matches and presented:
            # The same secret twice: the admin's, which stands last, gives more.
            return matches[-1]
        return None if self._required else Grant(admin=not self._guarded)


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
    return Grant(key.name, known=True, patterns=patterns, quota=quota)


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

    admin: only the admin key opens this route; everybody may where no key at all is configured.
    Without: keys that are kept to some adapters do not open it.
    """
    grant = caller(request)
    if grant.patterns is not None:
        raise RequestError(ErrorKind.FORBIDDEN, "this API key sees its own adapters only")
    if admin and not grant.admin:
        if grant.known:
            raise RequestError(ErrorKind.FORBIDDEN, "this needs the admin key")
        raise RequestError(
            ErrorKind.UNAUTHORIZED, "this needs the admin key: send `Authorization: Bearer …`"
        )
    return grant


def require_adapter(grant: Grant, reference: AdapterReference | None) -> None:
    """Raise FORBIDDEN for an adapter that this key may not use, alone or in a merge.

    The base model is for all.
    """
    for member in () if reference is None else reference.members:
        if not grant.allows(member.source.value, member.id):
            name = f"{member.source.value}:{member.id}"
            raise RequestError(
                ErrorKind.FORBIDDEN, f"this API key may not use the adapter '{name}'", param="model"
            )


def visible(request: HTTPConnection, info: EngineInfo) -> EngineInfo:
    """The engine's description with those adapters only that the caller may use."""
    grant = caller(request)
    adapters = [known for known in info.adapters if grant.allows(known.source, known.id)]
    return msgspec.structs.replace(info, adapters=adapters)
