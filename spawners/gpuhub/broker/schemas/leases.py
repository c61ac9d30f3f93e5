"""Leases over the wire."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from gpuhub.broker.schemas.base import GroupName, Key, ServerName, Slug, TimeLimit, UserName, Wire


class LeaseState(StrEnum):
    """A lease's life: requested → granted → active → releasing → released; see `leases`.

    A request that ends while it waits goes straight to released. A lease that is to end while nobody can prove that
    its containers are gone is quarantined: its GPUs stay blocked until there is proof.
    """

    REQUESTED = "requested"
    GRANTED = "granted"
    ACTIVE = "active"
    RELEASING = "releasing"
    QUARANTINED = "quarantined"
    RELEASED = "released"


class Purpose(StrEnum):
    """What a lease is for."""

    NOTEBOOK = "notebook"
    JOB = "job"


class Gpu(Wire):
    """One leased GPU."""

    uuid: str
    node: str
    index: int
    #: Short model name, such as `RTX 5090`.
    model: str
    memory_mib: int
    #: The lease has one of so many parts; 1 for the whole GPU.
    share: int = 1
    #: What a part promises to use at most, MiB; no wall stands behind it. None for a whole GPU.
    memory_cap_mib: int | None = None


class LeaseRequest(Wire):
    """Ask for a notebook's lease."""

    profile: Slug
    server: ServerName = ""
    #: Chosen by the caller; a repeated request with the same key and owner returns the same lease.
    key: Key
    #: Only with the scope `custom:gpuhub:any-owner`.
    owner: UserName | None = None
    #: The owner's groups in the hub; only with the same scope.
    groups: Annotated[tuple[GroupName, ...], Field(max_length=64)] = ()
    #: Shorter than the profile's, seconds; None for the profile's own.
    time_limit_s: TimeLimit | None = None


class Lease(Wire):
    """A lease as its owner sees it."""

    id: str
    owner: str
    purpose: Purpose
    #: The notebook's server name (empty for the default one) or the job's id.
    subject: str
    profile: str | None
    state: LeaseState
    #: Grows with every change of this lease or its place in the queue.
    version: int
    #: Place in the queue from 1; None unless requested.
    position: int | None
    #: One line for a person: what a requested lease waits for. None unless requested.
    waiting_for: str | None
    #: When it is expected to be granted, from time limits; None where that is not known, or unless requested.
    expected_start: datetime | None = None
    #: For a person, from the grant: that its cards differ, say. None when there is nothing to say.
    note: str | None = None
    priority: int = 0
    #: Nodes where the lease's containers go, in worker order; one for a notebook. Empty until granted.
    nodes: tuple[str, ...]
    gpus: tuple[Gpu, ...]
    #: The number of the Slurm job that stands for it; None without Slurm, and until it is submitted.
    slurm_job: int | None = None
    #: Container labels carry it; the grant makes it 1.
    epoch: int
    created_at: datetime
    granted_at: datetime | None
    #: When the profile's time limit ends it; None without a limit or before the grant.
    expires_at: datetime | None
    #: Why it ended, for a person.
    reason: str | None


class Activation(Wire):
    """The notebook's container exists."""

    container_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{12,64}$")]


class Extension(Wire):
    """Ask for more time: the lease then ends so many seconds from now."""

    time_limit_s: TimeLimit


class Obstacle(Wire):
    """One of a request's own demands, and when it would start without it."""

    demand: str
    would_start_at: datetime | None


class Why(Wire):
    """Why a request waits."""

    lease: str
    position: int
    waits_for: str
    expected_start: datetime | None
    #: Its own demands; the one that makes it wait most stands first.
    obstacles: tuple[Obstacle, ...]
