"""Authentication of callers by tokens, which the hub checks, and limits of the requests per second of each caller.

The hub's answers are kept for a short time. The limits let no caller slow down the others; they are not quotas:
`admission` and the scheduler limit GPUs, requests and jobs of a user.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import re
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gpuhub.broker import audit
from gpuhub.broker_api.errors import HubUnreachable, NotKnown, TooManyRequests
from gpuhub.common import names
from gpuhub.common.errors import NotAllowed
from gpuhub.domain.clock import Clock
from gpuhub.domain.models import Identity
from gpuhub.domain.rate_limit import RateLimit, RateLimiter

#: Scopes of which a token needs one to use the broker.
ACCESS_SCOPES = frozenset({"access:services", "access:services!service=broker"})
#: Scope of a service that may act for every user.
ANY_OWNER_SCOPE = "custom:gpuhub:any-owner"
#: Scope of the service that stops idle notebooks.
RECLAIM_SCOPE = "custom:gpuhub:reclaim"
#: Scope of administrators, which JupyterHub's role `admin` has here; the own token of a notebook never has it.
ADMIN_SCOPE = "custom:gpuhub:admin"
#: JupyterHub's scope for its own metrics, and for the broker's.
METRICS_SCOPE = "read:metrics"
#: Name of the service whose token has this scope and no other, which is the service's name in the hub.
METRICS_SERVICE = "gpuhub-metrics"
#: Name of the hub's spawner, which is the service's name in the hub.
SPAWNER_SERVICE = "gpuhub-spawner"
#: Name of a caller with the broker's own token, which only root on the head node can read; no user can have this name.
HEAD_NODE = "the head node's administrator"
#: Time for which the hub's answer about a known token is kept, seconds.
KNOWN_TOKEN_S = 10.0
#: Time for which the answer that a token is unknown is kept, seconds.
UNKNOWN_TOKEN_S = 5.0
#: Time for which a known token is still accepted while the hub does not answer, seconds.
OUTAGE_S = 600.0
#: Maximum number of known tokens that are kept, and of unknown ones.
MAX_TOKENS = 4096
#: Length of the prefix of an IPv6 network that one machine can use all addresses of.
_IPV6_PREFIX = 64
#: Maximum number of concurrent checks by the hub.
_MAX_CHECKS = 16


#: Requests of one user; a notebook that launches, or a command that polls, sends a few per second.
REQUESTS = RateLimit(burst=400, per_second=50)
#: Unknown tokens from one address, since the hub has to check each of them.
WRONG_TOKENS = RateLimit(burst=100, per_second=5)
#: Unconfirmed tokens from one address that wait for the result of others before they are checked or refused.
MAX_WAITING_TOKENS = 1000


class UnknownTokenLimiter:
    """Limits the wrong tokens from one address; tokens that turn out right cost nothing.

    While the limit is reached only because of tokens that are being checked, further ones wait for the results, so that
    any number of users with right tokens can come back at once.
    """

    def __init__(self, rate: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limiter = RateLimiter(rate, clock)
        #: Number of tokens that are being checked, by address.
        self._checking: Counter[str] = Counter()
        self._waiting: defaultdict[str, deque[asyncio.Future[None]]] = defaultdict(deque)

    async def acquire(self, address: str) -> None:
        """Count one token, perhaps after the results of others; `settle` must follow.

        Raises:
            TooManyRequests: too many tokens from this address were wrong.
        """
        while True:
            try:
                self._limiter.acquire(address)
            except TooManyRequests:
                if not self._checking[address] or len(self._waiting[address]) >= MAX_WAITING_TOKENS:
                    self._drop_idle(address)
                    raise
            else:
                self._checking[address] += 1
                return
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[address].append(turn)
            await turn

    def record_result(self, address: str, *, is_wrong: bool) -> None:
        """Record the result of a check."""
        self._checking[address] -= 1
        if not is_wrong:
            self._limiter.refund(address)
        waiting = self._waiting[address]
        # One takes the place of a right token; nothing is left to wait for after the last check.
        number = len(waiting) if not self._checking[address] else 0 if is_wrong else 1
        while number and waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                number -= 1
        self._drop_idle(address)

    def _drop_idle(self, address: str) -> None:
        if not self._checking[address] and not self._waiting[address]:
            del self._checking[address], self._waiting[address]


class Identifier(Protocol):
    """Identifies callers by the `Authorization` header; `Authenticator` has the meaning of each error."""

    async def identify(self, authorization: str | None, address: str = "") -> Identity:
        """Return the caller, and count a request."""
        ...

    async def confirm(self, authorization: str | None, address: str = "") -> Identity:
        """Return the caller, without counting a request."""
        ...


class TokenChecker(Protocol):
    """The part of the hub's API that checks tokens."""

    async def fetch_token_model(self, token: str) -> Mapping[str, Any] | None:
        """Return the hub's model of the token's user or service; None for an unknown token.

        Raises:
            HubUnreachable: the hub does not answer.
        """
        ...


def rate_limit_key(address: str) -> str:
    """Return the address by which unknown tokens are counted: one network of IPv6 counts as one address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if parsed.version == 4 else str(ipaddress.ip_network((parsed, _IPV6_PREFIX), strict=False))


def parse_identity(model: Mapping[str, Any]) -> Identity:
    """Return the identity from the hub's answer to `GET /user`, such as
    `{"kind": "user", "name": "ada", "admin": false, "groups": ["lab"], "scopes": ["access:services!service=broker"]}`.

    Raises:
        NotAllowed: the token's scopes do not reach the broker.
    """
    scopes = frozenset(model.get("scopes") or ())
    name = str(model.get("name") or "")
    any_owner = ANY_OWNER_SCOPE in scopes
    if not any_owner and not scopes & ACCESS_SCOPES:
        raise NotAllowed("this token may not use the GPU broker: it lacks the scope access:services!service=broker")
    is_user = model.get("kind") == "user"
    if is_user and not re.fullmatch(names.USERNAME_PATTERN, name):
        raise NotAllowed("this user cannot use GPUs: the name is not a POSIX user name")
    return Identity(
        name=name,
        is_user=is_user,
        # Not the hub's flag for the user: a token with fewer scopes, as an administrator's notebook has, is none.
        is_admin=is_user and ADMIN_SCOPE in scopes,
        any_owner=any_owner,
        may_reclaim=not is_user and RECLAIM_SCOPE in scopes,
        groups=_parse_groups(model.get("groups")) if is_user else frozenset(),
    )


def _parse_groups(groups: object) -> frozenset[str]:
    return frozenset(group for group in groups if isinstance(group, str)) if isinstance(groups, list) else frozenset()


@dataclass(frozen=True, slots=True)
class _TokenRecord:
    model: Mapping[str, Any] | None
    checked_at: float


class Authenticator:
    """Identifies callers through the hub, with at most one check at a time for each token."""

    def __init__(
        self,
        checker: TokenChecker,
        clock: Clock,
        own_token: str = "",
        spawner_token: str = "",
        metrics_token: str = "",
    ) -> None:
        """The tokens of the head node's own services are known without the hub, and so are never limited.

        Args:
            checker: checks all other tokens.
            clock: the clock of the cache.
            own_token: the broker's own token, whose callers have the rights of an administrator.
            spawner_token: the token of the hub's spawner.
            metrics_token: the token of `METRICS_SERVICE`, with which only metrics can be read.
        """
        self._checker = checker
        self._metrics_key = _digest(metrics_token) if metrics_token else None
        self._services = {
            _digest(token): identity
            for token, identity in (
                (own_token, Identity(name=HEAD_NODE, is_user=False, is_admin=True)),
                (spawner_token, Identity(name=SPAWNER_SERVICE, is_user=False, any_owner=True)),
            )
            if token
        }
        self._clock = clock
        # Keyed by digest, so that a memory dump has no tokens. Unknown tokens are separate, so that a flood evicts no
        # known one.
        self._known: OrderedDict[bytes, _TokenRecord] = OrderedDict()
        self._unknown: OrderedDict[bytes, _TokenRecord] = OrderedDict()
        self._wrong = UnknownTokenLimiter(WRONG_TOKENS, clock.monotonic)
        self._requests = RateLimiter(REQUESTS, clock.monotonic)
        self._check_slots = asyncio.Semaphore(_MAX_CHECKS)
        self._checks: dict[bytes, asyncio.Task[_TokenRecord]] = {}

    async def identify(self, authorization: str | None, address: str = "") -> Identity:
        """Return the caller with this `Authorization` header.

        Args:
            authorization: the header, or None.
            address: the client's IP address.

        Raises:
            NotKnown: there is no token, or the hub does not know it.
            NotAllowed: the token lacks the necessary scope.
            TooManyRequests: from this user, or with unknown tokens from this address.
            HubUnreachable: the hub does not answer, and has not confirmed the token in the last `OUTAGE_S`.
        """
        caller = await self.confirm(authorization, address)
        self.count_request(caller)
        return caller

    def count_request(self, caller: Identity) -> None:
        """Note the caller of a request for the audit log, and count the request.

        Raises:
            TooManyRequests: there were too many from this user.
        """
        audit.note_caller(caller.name, is_user=caller.is_user, is_admin=caller.is_admin, any_owner=caller.any_owner)
        if not caller.sees_all:
            self._requests.acquire(caller.name)

    async def check_metrics_reader(self, authorization: str | None, address: str = "") -> None:
        """Check that the caller may read metrics: by the scope `read:metrics`, or as an administrator.

        Raises:
            NotKnown, TooManyRequests, HubUnreachable: as `identify`.
            NotAllowed: the token has no such scope.
        """
        key = _digest(_parse_header(authorization))
        if key == self._metrics_key or ((service := self._services.get(key)) is not None and service.is_admin):
            return
        model = None if key in self._services else await self._find_model(authorization, address)
        scopes = (model or {}).get("scopes") or ()
        if METRICS_SCOPE not in scopes and ADMIN_SCOPE not in scopes:
            raise NotAllowed(f"this token may not read metrics: it lacks the scope {METRICS_SCOPE}")
        self._requests.acquire(str((model or {}).get("name")))

    async def confirm(self, authorization: str | None, address: str = "") -> Identity:
        """Return the caller as `identify` does, without counting a request: for streams, which are checked again."""
        if (service := self._services.get(_digest(_parse_header(authorization)))) is not None:
            return service
        return parse_identity(await self._find_model(authorization, address))

    async def _find_model(self, authorization: str | None, address: str) -> Mapping[str, Any]:
        """Return the hub's model of the caller, and note the caller's name for the audit log."""
        token = _parse_header(authorization)
        model = (await self._look_up(_digest(token), token, rate_limit_key(address))).model
        if model is None:
            raise NotKnown("the hub does not know this token: it has expired or was revoked, or its server was stopped")
        audit.note_name(str(model.get("name") or "")[:64])
        return model

    async def _look_up(self, key: bytes, token: str, address: str) -> _TokenRecord:
        known = self._known.get(key) or self._unknown.get(key)
        if known is not None and self._clock.monotonic() - known.checked_at < _lifetime(known):
            return known
        task = self._checks.get(key)
        if task is None:
            # Only tokens that the hub has not confirmed before count towards the limit.
            is_unconfirmed = known is None or known.model is None
            task = asyncio.ensure_future(self._check(key, token, address if is_unconfirmed else None))
            self._checks[key] = task
            task.add_done_callback(lambda _: self._checks.pop(key, None))
        try:
            return await asyncio.shield(task)
        except HubUnreachable:
            if known is None or known.model is None or self._clock.monotonic() - known.checked_at > OUTAGE_S:
                raise
            return known

    async def _check(self, key: bytes, token: str, charged_to: str | None) -> _TokenRecord:
        is_wrong = False
        if charged_to is not None:
            await self._wrong.acquire(charged_to)
        try:
            async with self._check_slots:
                model = await self._checker.fetch_token_model(token)
            is_wrong = model is None
        finally:
            if charged_to is not None:
                self._wrong.record_result(charged_to, is_wrong=is_wrong)
        answer = _TokenRecord(model, self._clock.monotonic())
        records, others = (self._known, self._unknown) if model is not None else (self._unknown, self._known)
        others.pop(key, None)
        records[key] = answer
        records.move_to_end(key)
        while len(records) > MAX_TOKENS:
            records.popitem(last=False)
        return answer


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _lifetime(answer: _TokenRecord) -> float:
    return UNKNOWN_TOKEN_S if answer.model is None else KNOWN_TOKEN_S


def _parse_header(authorization: str | None) -> str:
    scheme, _, token = (authorization or "").partition(" ")
    token = token.strip()
    if scheme.lower() not in {"token", "bearer"} or not token:
        raise NotKnown("send your hub token: the header `Authorization: token …` is missing")
    if len(token) > 256 or not token.isascii() or not token.isprintable():
        raise NotKnown("this is not a token of the hub")
    return token
