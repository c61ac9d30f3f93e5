"""The tables of cluster.toml about people and policy: who may log in, have how much, and goes first."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from gpuhub.quantities import Size, Span, Span0
from gpuhub.tables import Many, Number, Text, UserName, Value

#: A group, as somebody else may name it: printable, and not long.
GroupName = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
LoginKind = Literal["password", "first-use", "pam", "ldap", "oidc", "github", "gitlab", "google", "cilogon"]


class Allowance(Value):
    """How much may be had at once and over time; None for no limit of its own."""

    #: GPUs at once, notebooks and jobs together; a part of one counts as one.
    max_gpus: Annotated[int, Field(ge=1)] | None = None
    #: GPU-hours in any seven days.
    gpu_hours_per_week: Annotated[Number, Field(gt=0)] | None = None
    #: Waiting requests.
    max_waiting: Annotated[int, Field(ge=1, le=10_000)] | None = None
    #: Jobs that have not ended.
    max_jobs: Annotated[int, Field(ge=1)] | None = None
    #: Seconds that one lease may last, extensions included.
    longest_lease: Span | None = None


class Group(Value):
    """Users with limits of their own. Members are those named here and those of the login's group of that name."""

    name: GroupName
    members: Many[UserName] = ()
    #: For each member, instead of what [users] says; of several groups the most generous counts.
    each: Allowance = Allowance()
    #: For all members together.
    together: Allowance = Allowance()
    #: How much of the cluster is each member's due under fair share, compared with others' 1.
    weight: Annotated[Number, Field(gt=0, le=1000)] = 1.0


class Scheduling(Value):
    """Who goes first, and what is given."""

    #: Used GPU-time counts half after so long, seconds.
    half_life: Span = 7 * 86400
    #: How far back, at the most, past use of GPUs puts somebody's requests; "0s": first come, first served. Seconds.
    fair_share: Span0 = 86400
    #: A notebook or interactive launch counts as asked for so much earlier than a batch job, seconds.
    interactive_first: Span0 = 4 * 3600
    #: One point of priority counts as so much waiting, seconds.
    priority_step: Span0 = 600
    #: Later requests may use what an earlier one waits for when they end in time.
    backfill: bool = True
    #: Jobs with --scavenge, and elastic ones, give GPUs back when others need them.
    preemption: bool = False
    #: How long a preempted job has for its checkpoint, seconds.
    preempt_grace: Span = 60
    #: A card's weight in used GPU-time by model; others count by memory, 24 GiB as 1.
    card_values: dict[Text, Annotated[Number, Field(gt=0)]] = {}
    #: A GPU that nobody leases and that has more memory in use than this is somebody else's, bytes.
    outside_memory: Size = 1024**3
    #: A lease that ends while its node does not answer is quarantined after so long, seconds.
    quarantine_after: Span = 30
    #: A node that has not answered for so long is down, seconds.
    down_after: Span = 600


class Users(Value):
    """Who can log in, and how much they may hold."""

    #: Who says who somebody is; docs/login.md says what each means. `password`: one password for all,
    #: made at the first start; `first-use`: each user's own, chosen at the first login (both for practice).
    login: LoginKind = "pam"
    allowed: Many[UserName] = ()
    admins: Many[UserName] = ()
    #: Members of these may log in, or are administrators; groups as the login's own side names them: the system's for
    #: `pam`, LDAP's common names, organisations or `organisation:team` at GitHub, and so on. The hub knows them too,
    #: so that a [[groups]] table of that name has limits for them.
    allowed_groups: Many[GroupName] = ()
    admin_groups: Many[GroupName] = ()
    #: Users without an account on the head node get UIDs from here on; None: every user needs an account.
    uid_first: Annotated[int, Field(ge=1000, le=2_000_000_000)] | None = None
    #: GPUs one user may hold at once, notebooks and jobs together; None for no limit.
    max_gpus: Annotated[int, Field(ge=1)] | None = None
    #: GPU-hours one user may use in any seven days; None for no limit.
    gpu_hours_per_week: Annotated[Number, Field(gt=0)] | None = None
    #: Seconds that one lease of a user may last, extensions included; None for no limit.
    longest_lease: Span | None = None
    #: Jobs that one user may have at once; None for no limit.
    max_jobs: Annotated[int, Field(ge=1)] | None = None
    #: Waiting requests one user may have.
    max_waiting: Annotated[int, Field(ge=1, le=1000)] = 16
    #: Seconds that a notebook may wait in the queue.
    queue_limit: Span = 7 * 86400

    @model_validator(mode="after")
    def _somebody(self) -> Self:
        groups = (*self.allowed_groups, *self.admin_groups)
        if not (self.allowed or self.admins or groups):
            raise ValueError('nobody could log in: name users, such as allowed = ["ada", "ben"], or allowed_groups')
        if groups and self.login in {"password", "first-use"}:
            raise ValueError(f'login = "{self.login}" knows no groups: leave allowed_groups and admin_groups out')
        return self
