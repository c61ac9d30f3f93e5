"""What a node needs to mount a file server's exports."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuhub.ops.doctor.findings import Finding, Severity
from gpuhub.ops.doctor.node_facts import HostFacts
from gpuhub.ops.doctor.nodes.node_checks import NodeEnvironment
from gpuhub.ops.doctor.nodes.storage_checks import check_nfs_client
from tests.support.machine_probe import probe_this_machine

AROUND = NodeEnvironment(head="192.168.1.20", nfs_servers=("192.168.1.20:2049",))
CACHED = NodeEnvironment(head="192.168.1.20", nfs_servers=("192.168.1.20:2049",), uses_fsc=True)


def check(environment: NodeEnvironment, *, client: bool | None = True, cache: bool | None = False) -> list[Finding]:
    return list(check_nfs_client(HostFacts(nfs_client=client, cachefilesd=cache), environment))


def test_node_without_nfs_client_fails() -> None:
    """Only where there is a file server, and where the probe could find out."""
    (finding,) = check(AROUND, client=False)
    assert (finding.severity, finding.check) == (Severity.FAILED, "storage")
    assert "nfs-common" in finding.advice
    assert check(NodeEnvironment(head="192.168.1.20"), client=False) == []
    assert check(AROUND, client=None) == []
    assert [finding.severity for finding in check(AROUND)] == [Severity.OK]


def test_fsc_without_cachefilesd_is_a_warning() -> None:
    """The mount works, and nothing is cached."""
    (finding,) = check(CACHED)
    assert finding.severity is Severity.WARNING
    assert finding.value.startswith("nfs_options has fsc, and cachefilesd does not run")
    assert [finding.severity for finding in check(CACHED, cache=True)] == [Severity.OK]
    assert [finding.severity for finding in check(CACHED, cache=None)] == [Severity.OK]


@pytest.mark.process
def test_probe_reports_what_this_machine_has() -> None:
    """The kernel's list of file systems, and the running processes."""
    host = probe_this_machine(["/", "127.0.0.1"])
    built_in = "nfs4" in Path("/proc/filesystems").read_text(encoding="ascii").split()
    assert host.nfs_client is True or not built_in
    assert host.cachefilesd is ("cachefilesd" in {_read_name(process) for process in Path("/proc").glob("[0-9]*")})


def _read_name(process: Path) -> str:
    try:
        return (process / "comm").read_text(encoding="ascii", errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
