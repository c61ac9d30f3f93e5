"""Who asks: the hub's word on a token, remembered for a short while."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gpuhub import names
from gpuhub.broker import audit, budgets
from gpuhub.broker.clock import Clock
from gpuhub.broker.refusals import HubUnreachable, NotKnown
from gpuhub.errors import NotAllowed

#: What lets a token use the broker at all.
ACCESS_SCOPES = frozenset({"access:services", "access:services!service=broker"})
#: What lets a service act for every user.
ANY_OWNER_SCOPE = "custom:gpuhub:any-owner"

#: The scope by which a notebook's own token is told.
_SERVERS_OWN = "access:servers!server="

#: Whoever can read the broker's own token is root on the head node; no user can have this name.
HEAD_NODE = "the head node's administrator"

POSITIVE_S = 10.0
NEGATIVE_S = 5.0
#: While the hub is down, whoever it knew so lately is still served.
OUTAGE_S = 600.0
#: Tokens remembered at most; as many again of those that the hub does not know.
CAPACITY = 4096
#: Tokens that the hub is asked about at the same time.
_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who asks."""

    name: str
    is_user: bool = True
    is_admin: bool = False
    #: May name another owner; the hub's spawner.
    any_owner: bool = False
    #: Groups in the hub.
    groups: frozenset[str] = frozenset()

    @property
    def sees_all(self) -> bool:
        """Whether it sees and ends everybody's leases."""
        return self.is_admin or self.any_owner


class TokenChecker(Protocol):
    """The hub, as far as tokens go."""

    async def token_model(self, token: str) -> Mapping[str, Any] | None:
        """The hub's model of the token's user or service; None when it does not know the token.

        Raises:
            HubUnreachable: when it cannot be asked.
        """
        ...


def parse_identity(model: Mapping[str, Any]) -> Identity:
    """The hub's answer to `GET /user`, such as
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
        raise NotAllowed("this user's name cannot hold GPUs: it is no POSIX user name")
    return Identity(
        name=name,
        is_user=is_user,
        # What runs in an administrator's notebook is no administrator.
        is_admin=is_user and model.get("admin") is True and not any(scope.startswith(_SERVERS_OWN) for scope in scopes),
        any_owner=any_owner,
        groups=_parse_groups(model.get("groups")) if is_user else frozenset(),
    )


def _parse_groups(groups: object) -> frozenset[str]:
    return frozenset(group for group in groups if isinstance(group, str)) if isinstance(groups, list) else frozenset()


@dataclass(frozen=True, slots=True)
class _Answer:
    model: Mapping[str, Any] | None
    at: float


class Identities:
    """Asks the hub, at most once at a time for each token."""

    def __init__(self, checker: TokenChecker, clock: Clock, own_token: str = "") -> None:
        """`own_token` is the broker's own: who has it may what an administrator may, also while no hub runs."""
        self._checker = checker
        self._own = hashlib.sha256(own_token.encode()).digest() if own_token else b""
        self._clock = clock
        # By digest: a memory dump shows no token. Unknown ones apart, so that a flood of them drives out nobody.
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self._unknown: OrderedDict[bytes, _Answer] = OrderedDict()
        self._wrong = budgets.Budget(budgets.WRONG_TOKENS)
        self._requests = budgets.Budget(budgets.REQUESTS)
        self._line = asyncio.Semaphore(_AT_ONCE)
        self._asking: dict[bytes, asyncio.Task[_Answer]] = {}

    async def identify(self, authorization: str | None, address: str = "") -> Identity:
        """Who sends this `Authorization` header, from which address.

        Raises:
            NotKnown: no token, or one that the hub does not know.
            NotAllowed: a token without the needed scope.
            TooManyRequests: from this user, or with unknown tokens from this address.
            HubUnreachable: the hub does not answer and did not know the token lately.
        """
        who = await self._identify(authorization, address)
        audit.note_caller(who.name, is_user=who.is_user, is_admin=who.is_admin, any_owner=who.any_owner)
        if not who.sees_all:
            self._requests.spend(who.name)
        return who

    async def _identify(self, authorization: str | None, address: str) -> Identity:
        token = _parse_header(authorization)
        key = hashlib.sha256(token.encode()).digest()
        if hmac.compare_digest(key, self._own):
            return Identity(name=HEAD_NODE, is_user=False, is_admin=True)
        model = (await self._answer(key, token, address)).model
        if model is None:
            raise NotKnown("the hub does not know this token: it may have been revoked, or its server stopped")
        audit.note_name(str(model.get("name") or "")[:64])
        return parse_identity(model)

    async def _answer(self, key: bytes, token: str, address: str) -> _Answer:
        known = self._answers.get(key) or self._unknown.get(key)
        if known is not None and self._clock.monotonic() - known.at < _lifetime(known):
            return known
        task = self._asking.get(key)
        if task is None:
            # Whoever was known is asked about in any case.
            is_strange = known is None or known.model is None
            if is_strange:
                self._wrong.spend(address)
            task = asyncio.ensure_future(self._ask(key, token, address if is_strange else None))
            self._asking[key] = task
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        try:
            return await asyncio.shield(task)
        except HubUnreachable:
            if known is None or known.model is None or self._clock.monotonic() - known.at > OUTAGE_S:
                raise
            return known

    async def _ask(self, key: bytes, token: str, spent_by: str | None) -> _Answer:
        is_wrong = False
        try:
            async with self._line:
                model = await self._checker.token_model(token)
            is_wrong = model is None
        finally:
            if spent_by is not None and not is_wrong:
                self._wrong.give_back(spent_by)
        answer = _Answer(model, self._clock.monotonic())
        there, other = (self._answers, self._unknown) if model is not None else (self._unknown, self._answers)
        other.pop(key, None)
        there[key] = answer
        there.move_to_end(key)
        while len(there) > CAPACITY:
            there.popitem(last=False)
        return answer


def _lifetime(answer: _Answer) -> float:
    return NEGATIVE_S if answer.model is None else POSITIVE_S


def _parse_header(authorization: str | None) -> str:
    scheme, _, token = (authorization or "").partition(" ")
    token = token.strip()
    if scheme.lower() not in {"token", "bearer"} or not token:
        raise NotKnown("send your hub token: the header `Authorization: token …` is missing")
    if len(token) > 256 or not token.isascii() or not token.isprintable():
        raise NotKnown("this is no token of the hub")
    return token
