"""Checks of names of the login that are accounts of the head node too, before anything starts, and by the doctor.

`config.users.identity` never gives a user such an account unless cluster.toml says so. What is found here needs a
decision of the administrator: a user whose home belongs to the account, or whose home the head node cannot see, is
refused.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable

from gpuhub.common import names
from gpuhub.common.errors import NotAllowed, SettingsError, StorageUnavailable
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings, UserSettings
from gpuhub.config.users.identity import (
    describe_undecided,
    find_identity,
    find_ordinary_accounts,
    find_own_account,
    read_uids,
)
from gpuhub.login import kinds
from gpuhub.storage.homes import BLOCKING_CALLS, find_home


def check_accounts(cluster: ClusterSettings, paths: Paths) -> list[str]:
    """Check that known users have the UIDs that they had, and return notes on names that users may choose.

    Raises:
        SettingsError: A line for each user for whom cluster.toml must name the account, or names a wrong one.
    """
    try:
        mistakes, notes = asyncio.run(
            BLOCKING_CALLS.run(
                "accounts and homes",
                lambda: (_find_mistakes(cluster, paths), _describe_names(cluster, paths)),
                limit_s=cluster.storage.patience,
                timeout_message="The head node's accounts (files, LDAP) or the homes on it do not answer",
            )
        )
    except StorageUnavailable as error:
        return [f"Whether homes of users belong to accounts of this machine was not checked: {error}"]
    if mistakes:
        raise SettingsError("\n".join(mistakes))
    return notes


def find_ambiguous_accounts(users: UserSettings) -> dict[str, int]:
    """Return the UIDs of accounts whose names users may have and cluster.toml does not decide about. It may block."""
    accounts = _find_undecided(users, (*users.allowed, *users.admins))
    return accounts | (_find_undecided(users) if users.allowed_groups or users.admin_groups else {})


def _find_undecided(users: UserSettings, candidates: Iterable[str] | None = None) -> dict[str, int]:
    return {
        name: uid
        for name, uid in sorted(find_ordinary_accounts(candidates).items())
        if re.fullmatch(names.USERNAME_PATTERN, name)
        and name not in users.accounts
        and find_own_account(users, name) is None
    }


def _find_mistakes(cluster: ClusterSettings, paths: Paths) -> list[str]:
    users = cluster.users
    mistakes = []
    for name in sorted(user for user, account in users.accounts.items() if account):
        try:
            find_identity(users, paths.state, name)
        except NotAllowed as error:
            mistakes.append(f"users.accounts.{name}: {error}")
    known = {*users.allowed, *users.admins, *read_uids(paths.state), *kinds.find_bound_names(cluster, paths)}
    for name, uid in _find_undecided(users, known).items():
        location = find_home(cluster.storage, name)
        if location is None:
            mistakes.append(f"user {name}: the head node does not see the home: {describe_undecided(name, uid)}")
        elif location.path.exists() and location.path.stat().st_uid == uid:
            mistakes.append(f"user {name}: the home {location.path} is that account's: {describe_undecided(name, uid)}")
    return mistakes


def _describe_names(cluster: ClusterSettings, paths: Paths) -> list[str]:
    users, notes = cluster.users, []
    if ambiguous := find_ambiguous_accounts(users):
        accounts = ", ".join(f"{name} (UID {uid})" for name, uid in ambiguous.items())
        notes.append(
            f"Accounts of this machine whose names users can have at the login: {accounts}. Users do not get these "
            "accounts; [users.accounts] in cluster.toml can say which do"
        )
    if kinds.has_provider(cluster):
        bound = kinds.find_bound_names(cluster, paths)
        notes += [
            f"The account {account} of this machine goes to the first account of the provider that logs in as {name}"
            for name, account in sorted(users.accounts.items())
            if account and name not in bound
        ]
        if free := [name for name in users.admins if name not in bound]:
            notes.append(
                f"Nobody has logged in yet as {', '.join(free)}: the first account of the provider with such a "
                "name is an administrator"
            )
    return notes
