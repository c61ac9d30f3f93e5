"""The limit of open files of the head node's programs, of which each connection needs one."""

from __future__ import annotations

import resource

#: Open files that hub, proxy and broker want: enough for all connections that they accept.
WANTED = 65_536


def raise_open_file_limit() -> int:
    """Raise this process's limit to `WANTED`, or as far as possible, and return it; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= WANTED:
        return WANTED
    higher = hard if hard == resource.RLIM_INFINITY else max(hard, WANTED)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (WANTED, higher))
    except (ValueError, OSError):
        # Only with CAP_SYS_RESOURCE, which some containers take away, root can raise the hard limit.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def describe_low_limit(limit: int) -> str | None:
    """Return the consequence and remedy of a limit below `WANTED`; None for one that is high enough."""
    if limit >= WANTED:
        return None
    return (
        f"at most {limit} open files, and {WANTED} are wanted: a few users can use up all connections. Raise the hard "
        f"limit of the shell or service that starts gpuhub (`ulimit -Hn {WANTED}`, or LimitNOFILE={WANTED} in systemd)"
    )
