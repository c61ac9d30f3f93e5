"""What facts about the head node mean: findings. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gpuhub.nodes.doctor import versions
from gpuhub.nodes.doctor.findings import Finding, failed, ok, warning

#: A certificate with less than this left is to be renewed.
RENEW_BEFORE = timedelta(days=30)
_DISK_NOTED_GIB = 10.0
_DISK_TOO_LITTLE_GIB = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """What was found on the head node."""

    now: datetime
    jupyterhub: str
    #: Program of gpuhub's → supervisord's word for its state; empty where gpuhub does not run.
    programs: Mapping[str, str] = field(default_factory=dict)
    #: Service and address → whether something listens there.
    ports: Mapping[str, bool] = field(default_factory=dict)
    #: Folder → free, bytes.
    free: Mapping[str, int] = field(default_factory=dict)
    #: File → the end of the certificate in it, or what is wrong with the file.
    certificates: Mapping[str, datetime | str] = field(default_factory=dict)
    #: File server → what is wrong with it, None where it answers.
    storage: Mapping[str, str | None] = field(default_factory=dict)
    #: What is wrong with `uids.json`: a line a user.
    uid_troubles: tuple[str, ...] = ()
    #: Files of secrets that others than root can read.
    exposed: tuple[str, ...] = ()


def check_head(head: HeadFacts) -> Iterator[Finding]:
    """Everything about the head node."""
    yield from _check_versions(head)
    yield from _check_running(head)
    for folder, free in head.free.items():
        gib = free / 1024**3
        value = f"{gib:.0f} GiB free at {folder}"
        if gib < _DISK_TOO_LITTLE_GIB:
            yield failed("disk", value, "make room: databases and logs need it")
        elif gib < _DISK_NOTED_GIB:
            yield warning("disk", value, "images are built there")
        else:
            yield ok("disk", value)
    for file, end in head.certificates.items():
        yield check_certificate(file, end, head.now)
    for server, trouble in head.storage.items():
        if trouble is None:
            yield ok("storage", f"{server} answers")
        else:
            yield failed("storage", trouble, "start it, or let it through its firewall; users cannot start meanwhile")
    if head.uid_troubles:
        yield failed(
            "accounts",
            "; ".join(head.uid_troubles),
            "two users with one number own each other's files: give one of the accounts another number",
        )
    else:
        yield ok("accounts", "each user has a number of their own")
    if head.exposed:
        yield failed("secrets", f"others than root can read {', '.join(head.exposed)}", "chmod 600, and chown root")
    else:
        yield ok("secrets", "only root reads them")


def check_certificate(file: str, end: datetime | str, now: datetime) -> Finding:
    """One certificate's end, or that it cannot be read."""
    if isinstance(end, str):
        return failed("certificate", f"{file}: {end}", "give a PEM certificate that root can read")
    if end <= now:
        return failed("certificate", f"{file} ended on {end:%Y-%m-%d}", "renew it")
    if end - now < RENEW_BEFORE:
        return warning("certificate", f"{file} ends on {end:%Y-%m-%d}", "renew it")
    return ok("certificate", f"{file} holds until {end:%Y-%m-%d}")


def _check_versions(head: HeadFacts) -> Iterator[Finding]:
    version = versions.parse_version(head.jupyterhub)
    floor = versions.format_version(versions.JUPYTERHUB_FLOOR)
    if version is None or version < versions.JUPYTERHUB_FLOOR:
        yield failed("jupyterhub", head.jupyterhub or "not installed", f"{floor} or newer is needed: `sudo make up`")
    else:
        yield ok("jupyterhub", head.jupyterhub)


def _check_running(head: HeadFacts) -> Iterator[Finding]:
    if not head.programs:
        yield warning("services", "gpuhub does not run", "`sudo make up`")
        return
    stopped = [f"{name} ({state})" for name, state in head.programs.items() if state != "RUNNING"]
    if stopped:
        yield failed("services", f"not running: {', '.join(stopped)}", "see their logs, then `sudo make up`")
    else:
        yield ok("services", f"{', '.join(head.programs)} run")
    for place, listens in head.ports.items():
        if not listens:
            yield failed("ports", f"nothing listens at {place}", "see the service's log, then `sudo make up`")
