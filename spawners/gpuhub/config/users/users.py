"""`[users]`, `[[groups]]` and `[scheduling]` in cluster.toml: who may log in, users' limits, and the queue's order."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from gpuhub.common.units import Size, Span, Span0
from gpuhub.config.base import GroupName, ListOf, Number, SettingsTable, Text, UserName

#: How users prove who they are.
LoginKind = Literal["password", "first-use", "pam", "ldap", "oidc", "github", "gitlab", "google", "cilogon"]
#: Logins that accept only the password of the account with the user's name, on the head node or in its directory.
LOGINS_WITH_ACCOUNTS: frozenset[LoginKind] = frozenset({"pam", "ldap"})


def _check_account(value: object) -> object:
    if value is False or (isinstance(value, str) and re.fullmatch(r"[^:\s]{1,256}", value)):
        return value
    raise ValueError(f"{value!r} is neither the name of an account in quotes nor false")


#: Name of an account of the head node, or False for none.
AccountName = Annotated[str | Literal[False], PlainValidator(_check_account)]


class LimitSettings(SettingsTable):
    """Limits of a group's members, each or together; None where the group sets no limit."""

    #: GPUs at once, notebooks and jobs together; a GPU share counts as one.
    max_gpus: Annotated[int, Field(ge=1)] | None = None
    #: GPU-hours in any seven days.
    gpu_hours_per_week: Annotated[Number, Field(gt=0)] | None = None
    #: Number of waiting requests, counted as in [users].
    max_waiting: Annotated[int, Field(ge=1, le=10_000)] | None = None
    #: Number of jobs that have not ended.
    max_jobs: Annotated[int, Field(ge=1)] | None = None
    #: Longest duration of a lease, extensions included, seconds.
    longest_lease: Span | None = None


class GroupSettings(SettingsTable):
    """Users with their own limits: those listed here, and those of the login provider's group of that name."""

    #: Name of the group; each group needs its own.
    name: GroupName
    #: Names of users who belong to the group in addition to the login provider's members.
    members: ListOf[UserName] = ()
    #: Limits of each member, instead of those of [users]; with several groups, the most generous one counts.
    each: LimitSettings = LimitSettings()
    #: Limits of all members together.
    together: LimitSettings = LimitSettings()
    #: Share of the cluster that fair share gives each member, relative to 1 for other users.
    weight: Annotated[Number, Field(gt=0, le=1000)] = 1.0


class SchedulingSettings(SettingsTable):
    """Order of the queue, backfill, preemption, and when silent or busy hardware is set aside."""

    #: Time after which past GPU usage counts half in fair share, seconds.
    half_life: Span = 7 * 86400
    #: Maximum time by which past GPU usage moves a user's requests back in the queue, seconds; "0s": first come, first
    #: served.
    fair_share: Span0 = 86400
    #: Time by which a notebook or interactive launch moves ahead of a batch job, seconds.
    interactive_first: Span0 = 4 * 3600
    #: Waiting time that one point of priority is worth, seconds.
    priority_step: Span0 = 600
    #: Whether later requests may use GPUs that an earlier one waits for, if they end before it can start.
    backfill: bool = True
    #: Whether jobs with --scavenge are preempted, and elastic jobs shrunk, when other requests need their GPUs.
    preemption: bool = False
    #: Time that a preempted job has to write its checkpoint, seconds.
    preempt_grace: Span = 60
    #: Whether a scavenging job of one process with one whole GPU is suspended instead of being preempted: what is on
    #: its GPU is moved into host memory, and the job continues when this GPU is free again.
    suspend_scavengers: bool = False
    #: Weight of GPU models in fair share; other models count by memory, 24 GiB as 1.
    card_values: dict[Text, Annotated[Number, Field(gt=0)]] = {}
    #: Memory in use above which a GPU without a lease counts as used by processes outside gpuhub, bytes.
    outside_memory: Size = 1024**3
    #: Free space below which a node takes no work, on its Docker disk and on the head node's disk with gpuhub's data,
    #: bytes; "0G": nodes take work until a disk is full.
    min_free_disk: Size = 5 * 1024**3
    #: Time after which a lease that ends on a silent node is quarantined, seconds.
    quarantine_after: Span = 30
    #: Time without an answer after which a node counts as down, seconds.
    down_after: Span = 600


class UserSettings(SettingsTable):
    """Who may log in, and the limits of each user."""

    #: How users log in; docs/login.md describes each kind. `password`: one password for all, created at the first
    #: start; `first-use`: each user chooses a password at the first login (both for practice).
    login: LoginKind = "pam"
    #: Names of users who may log in.
    allowed: ListOf[UserName] = ()
    #: Names of administrators; they may log in as well.
    admins: ListOf[UserName] = ()
    #: Groups whose members may log in, named as at the login provider: system groups with `pam`, common names with
    #: LDAP, organisations or `organisation:team` with GitHub, and so on. A [[groups]] table of the same name sets their
    #: limits; `groups` of a profile or node restricts it to them.
    allowed_groups: ListOf[GroupName] = ()
    #: Groups whose members are administrators, named in the same way.
    admin_groups: ListOf[GroupName] = ()
    #: First UID for users without an account on the head node; None: every user needs an account.
    uid_first: Annotated[int, Field(ge=1000, le=2_000_000_000)] | None = None
    #: User → the head node's account with whose UID and groups the user works; false for none. With `pam` and `ldap`,
    #: users have the account with their own name.
    accounts: dict[UserName, AccountName] = {}
    #: Whether users have the account with their own name if the head node takes it from a directory (LDAP, SSSD), not
    #: from /etc/passwd. Only for a provider whose names are those of that directory.
    directory_accounts: bool = False
    #: GPUs of one user at once, notebooks and jobs together; a GPU share counts as one. None for no limit.
    max_gpus: Annotated[int, Field(ge=1)] | None = None
    #: GPU-hours of one user in any seven days; None for no limit.
    gpu_hours_per_week: Annotated[Number, Field(gt=0)] | None = None
    #: Longest duration of a lease, extensions included, seconds; None for no limit.
    longest_lease: Span | None = None
    #: Jobs of one user that have not ended. Every job in the queue costs the broker time.
    max_jobs: Annotated[int, Field(ge=1)] = 1000
    #: Waiting requests of one user; an array counts as one for each 100 of its jobs that wait, or part of that.
    max_waiting: Annotated[int, Field(ge=1, le=1000)] = 16
    #: Time that a notebook's request may wait in the queue, seconds.
    queue_limit: Span = 7 * 86400

    @model_validator(mode="after")
    def _has_users(self) -> Self:
        groups = (*self.allowed_groups, *self.admin_groups)
        if not (self.allowed or self.admins or groups):
            raise ValueError('no user could log in: name users, such as allowed = ["ada", "ben"], or allowed_groups')
        if groups and self.login in {"password", "first-use"}:
            raise ValueError(f'login = "{self.login}" has no groups: remove allowed_groups and admin_groups')
        return self

    @model_validator(mode="after")
    def _names_accounts_once(self) -> Self:
        if self.login in LOGINS_WITH_ACCOUNTS and (self.accounts or self.directory_accounts):
            raise ValueError(
                f'login = "{self.login}" gives each user the account with the same name: remove accounts and '
                "directory_accounts"
            )
        if self.login in {"password", "first-use", "github"} and self.directory_accounts:
            raise ValueError(
                f'directory_accounts: with login = "{self.login}", any person can have any name: remove it, and name '
                "users and their accounts in accounts"
            )
        owners: dict[str, str] = {}
        for user, account in self.accounts.items():
            if account and account in owners:
                raise ValueError(
                    f"accounts: {owners[account]} and {user} both have the account {account}, so each would own the "
                    "other's files: give each user a different account"
                )
            if account:
                owners[account] = user
        return self

    @property
    def has_own_accounts(self) -> bool:
        """Whether the login itself proves that the user owns the account of that name."""
        return self.login in LOGINS_WITH_ACCOUNTS
