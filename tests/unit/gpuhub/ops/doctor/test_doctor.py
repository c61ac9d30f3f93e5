"""The doctor's findings for the facts of machines."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import cast

import pytest

from gpuhub.common.errors import GpuhubError, NodeUnreachable, NotFound
from gpuhub.config.settings import ClusterSettings, StorageSettings
from gpuhub.docker.client import DockerClients
from gpuhub.ops.doctor import head_node
from gpuhub.ops.doctor.diagnosis import add_gpu_report, check_node
from gpuhub.ops.doctor.findings import Finding, Severity, build_json, format_findings, has_failed
from gpuhub.ops.doctor.head_node import HeadFacts, check_head
from gpuhub.ops.doctor.node_facts import (
    DiskFacts,
    DockerFacts,
    GpuFacts,
    HostFacts,
    build_docker_facts,
    build_script_arguments,
    parse_probe,
)
from gpuhub.ops.doctor.nodes import disk_checks, node_checks, node_queries
from gpuhub.ops.doctor.nodes.node_checks import NodeEnvironment
from tests.support.docker.simulated_nodes import build_cluster
from tests.support.machine_probe import probe_this_machine

RECORDED = json.loads((Path(__file__).parent / "recorded/docker-20.10.24-info.json").read_text())
CARD = GpuFacts(uuid="GPU-1", model="RTX 5090", memory_mib=32607, driver="580.95.05")
HEAD = "192.168.1.20"
GOOD_HOST = HostFacts(
    user="me",
    sudo="yes",
    socket="usable",
    os="Debian GNU/Linux 13 (trixie)",
    kernel="6.12.57",
    free_kib=200 * 1024**2,
    device="eth0",
    mtu=1500,
    nf_tables=True,
    toolkit="1.18.0",
    gpus=(CARD,),
    reach={f"{HEAD}:8081": True, f"{HEAD}:8010": True, f"{HEAD}:2049": True, "192.168.1.21:2377": True},
    accounts={"ada": 1001},
)
GOOD_DOCKER = DockerFacts(
    version="29.4.0",
    id="daemon",
    storage_driver="overlay2",
    cgroup_version="2",
    os="Debian",
    kernel="6.12.57",
    root="/var/lib/docker",
    runc="1.3.3",
    has_nvidia=True,
    is_rootless=False,
    has_userns=False,
    seccomp="builtin",
    access_control="AppArmor",
    live_restore=False,
    swarm_state="active",
    swarm_node="n1",
    ahead_s=0.01,
    within_s=0.05,
)
AROUND = NodeEnvironment(
    head=HEAD,
    head_ports={"hub": 8081, "broker": 8010},
    listening_ports=frozenset({8081, 8010}),
    nfs_servers=(f"{HEAD}:2049",),
    accounts={"ada": 1001, "ben": 1002},
    swarm_members={"n0": "192.168.1.21:2377", "n1": ""},
)


def levels(findings: Iterable[Finding]) -> dict[str, Severity]:
    return {finding.check: finding.severity for finding in findings if finding.severity is not Severity.OK}


def test_a_good_node_has_no_problems() -> None:
    findings = check_node(GOOD_DOCKER, GOOD_HOST, AROUND)
    assert levels(findings) == {}
    assert {"docker", "clock", "swarm", "disk", "gpus", "toolkit", "hub", "broker", "storage", "mtu", "accounts"} <= {
        finding.check for finding in findings
    }


@pytest.mark.parametrize(
    ("docker", "check", "level"),
    [
        ({"version": "19.03.15"}, "docker", Severity.FAILED),
        ({"version": ""}, "docker", Severity.FAILED),
        ({"version": "28.3.2"}, "docker", Severity.WARNING),
        ({"version": "28.5.1"}, "docker", Severity.WARNING),
        ({"is_rootless": True}, "docker", Severity.FAILED),
        ({"has_userns": True}, "docker", Severity.WARNING),
        ({"seccomp": ""}, "seccomp", Severity.FAILED),
        ({"seccomp": "unconfined"}, "seccomp", Severity.FAILED),
        ({"seccomp": "/etc/docker/lab.json"}, "seccomp", Severity.FAILED),
        ({"access_control": ""}, "access control", Severity.WARNING),
        ({"runc": "1.1.5+ds1"}, "runc", Severity.WARNING),
        ({"runc": "1.3.2"}, "runc", Severity.WARNING),
        ({"storage_driver": "vfs"}, "layers", Severity.WARNING),
        ({"cgroup_version": "1"}, "cgroups", Severity.WARNING),
        ({"ahead_s": -3.0}, "clock", Severity.WARNING),
        ({"ahead_s": 31.0}, "clock", Severity.FAILED),
        ({"swarm_state": "inactive"}, "swarm", Severity.FAILED),
        ({"swarm_node": "n9"}, "swarm", Severity.FAILED),
    ],
)
def test_each_problem_of_a_daemon(docker: dict[str, object], check: str, level: Severity) -> None:
    """It is the only one, with a remedy."""
    findings = check_node(replace(GOOD_DOCKER, **docker), GOOD_HOST, AROUND)  # type: ignore[arg-type]
    assert levels(findings) == {check: level}
    assert all(finding.advice for finding in findings if finding.severity is not Severity.OK)


@pytest.mark.parametrize(
    ("host", "check", "level"),
    [
        ({"free_kib": 1024**2}, "disk", Severity.FAILED),
        ({"free_kib": 10 * 1024**2}, "disk", Severity.WARNING),
        ({"free_kib": None}, "disk", Severity.WARNING),
        ({"gpu_error": "Failed to initialize NVML"}, "gpus", Severity.FAILED),
        ({"gpu_error": "no GPU agent runs there", "is_unread": True}, "gpus", Severity.WARNING),
        ({"failed_gpus": ("GPU 1 fails: GPU is lost",)}, "gpus", Severity.FAILED),
        ({"gpus": (), "failed_gpus": ("GPU 0 fails: GPU is lost",)}, "gpus", Severity.FAILED),
        ({"gpus": ()}, "gpus", Severity.WARNING),
        ({"toolkit": "1.17.7"}, "toolkit", Severity.WARNING),
        ({"mtu": 1420, "device": "wg0"}, "mtu", Severity.WARNING),
        ({"mtu": 500}, "mtu", Severity.FAILED),
        ({"mtu": None}, "mtu", Severity.WARNING),
        ({"nf_tables": None}, "filter", Severity.WARNING),
        ({"reach": {**GOOD_HOST.reach, f"{HEAD}:8081": False}}, "hub", Severity.FAILED),
        ({"reach": {**GOOD_HOST.reach, f"{HEAD}:8010": None}}, "broker", Severity.WARNING),
        ({"reach": {**GOOD_HOST.reach, f"{HEAD}:2049": False}}, "storage", Severity.FAILED),
        ({"reach": {**GOOD_HOST.reach, "192.168.1.21:2377": False}}, "nodes", Severity.FAILED),
        ({"reach": {**GOOD_HOST.reach, "192.168.1.21:2377": None}}, "nodes", Severity.WARNING),
        ({"accounts": {"ada": 1002, "cyd": 7}}, "accounts", Severity.WARNING),
    ],
)
def test_each_problem_of_a_machine(host: dict[str, object], check: str, level: Severity) -> None:
    assert levels(check_node(GOOD_DOCKER, replace(GOOD_HOST, **host), AROUND)) == {check: level}  # type: ignore[arg-type]


def test_kernel_without_gcm_fails_where_overlays_are_encrypted() -> None:
    answer = "its kernel cannot encrypt: Requested AEAD algorithm not found (Function not implemented)"
    encrypting = replace(AROUND, is_encrypted=True, encryption_error=answer)
    findings = check_node(GOOD_DOCKER, GOOD_HOST, encrypting)
    assert levels(findings) == {"encryption": Severity.FAILED}
    [finding] = [each for each in findings if each.check == "encryption"]
    assert finding.value == answer
    assert levels(check_node(GOOD_DOCKER, GOOD_HOST, replace(encrypting, encryption_error=None))) == {}
    assert "users' networks get 1424" in str(check_node(GOOD_DOCKER, GOOD_HOST, encrypting))


def test_the_firewall_containers_status_decides() -> None:
    """It counts more than the kernel's modules."""
    unknown = replace(GOOD_HOST, nf_tables=None)
    assert levels(check_node(GOOD_DOCKER, unknown, replace(AROUND, firewall_status=("ok", "applied")))) == {}
    assert levels(
        check_node(GOOD_DOCKER, GOOD_HOST, replace(AROUND, firewall_status=("failed", "nft: no such file")))
    ) == {"filter": Severity.FAILED}


def test_shared_and_unlimited_disks_get_a_warning() -> None:
    """Each of them lets one user stop others; a file system of Docker's own with quotas is good."""
    folders = {"homes": "/home", "gpuhub's own data": "/var/lib/gpuhub", "elsewhere": "/none"}
    environment = NodeEnvironment(head=HEAD, folders=folders, has_scratch=True)
    one = DiskFacts(device=1, has_quota=False)
    host = HostFacts(disks={"/var/lib/docker": one, "/home": one, "/var/lib/gpuhub": replace(one, device=2)})
    shared, scratch = disk_checks.check_disks("/var/lib/docker", host, environment)
    assert (shared.severity, shared.value) == (Severity.WARNING, "on one file system with Docker's data: homes")
    assert (scratch.severity, scratch.check) == (Severity.WARNING, "scratch")
    own = replace(host, disks={**host.disks, "/var/lib/docker": DiskFacts(device=3, has_quota=True)})
    assert list(disk_checks.check_disks("/var/lib/docker", own, environment)) == []


@pytest.mark.parametrize(
    ("home", "folder"), [("/home/{username}", "/home"), ("/{username}", "/"), ("/a/b-{username}/c", "/a")]
)
def test_the_folder_of_all_homes_is_found(home: str, folder: str) -> None:
    assert node_queries.find_homes_folder(home) == folder


def test_old_images_get_a_warning() -> None:
    """Also those of a lab that are based on gpuhub's, and those whose age nobody can tell."""
    today = date(2026, 11, 22)
    dates = {"a": today - timedelta(days=60), "b": today - timedelta(days=61), "c": None}
    found = list(disk_checks.check_images(NodeEnvironment(head="10.0.0.1", image_dates=dates), today))
    assert [finding.severity for finding in found] == [Severity.OK, Severity.WARNING, Severity.WARNING]
    assert "61 days old" in found[1].value


def test_gpus_without_container_toolkit_are_an_error() -> None:
    """They cannot be granted; on a node without GPUs it is only a warning."""
    bare = replace(GOOD_DOCKER, has_nvidia=False)
    assert levels(check_node(bare, replace(GOOD_HOST, toolkit=None), AROUND)) == {"toolkit": Severity.FAILED}
    assert levels(check_node(bare, replace(GOOD_HOST, toolkit=None, gpus=()), AROUND)) == {
        "gpus": Severity.WARNING,
        "toolkit": Severity.WARNING,
    }


def test_environment_checks() -> None:
    """A machine under a second name, ports without a listener, a tunnel by its name."""
    twice = check_node(GOOD_DOCKER, GOOD_HOST, replace(AROUND, other_gpus={"GPU-1": "rig1"}))
    assert [finding.value for finding in twice if finding.severity is Severity.FAILED] == ["GPU-1 is on node rig1 too"]
    copied = check_node(GOOD_DOCKER, GOOD_HOST, replace(AROUND, other_daemons={GOOD_DOCKER.id: "rig1"}))
    (identity,) = [finding for finding in copied if finding.severity is Severity.FAILED]
    assert identity.value == "Docker there has the identity of rig1's: daemon"
    assert "remove /etc/docker/key.json" in identity.advice
    shut = replace(GOOD_HOST, reach={**GOOD_HOST.reach, f"{HEAD}:8081": False, f"{HEAD}:8010": False})
    assert levels(check_node(GOOD_DOCKER, shut, replace(AROUND, listening_ports=frozenset()))) == {
        "hub": Severity.WARNING,
        "broker": Severity.WARNING,
    }
    behind = check_node(GOOD_DOCKER, replace(GOOD_HOST, mtu=1420, device="wg0"), replace(AROUND, mtu=1420))
    assert "1420 bytes over wg0 (WireGuard); users' networks get 1370" in [finding.value for finding in behind]
    unmeasured = check_node(GOOD_DOCKER, GOOD_HOST, replace(AROUND, can_measure_mtu=False))
    assert "not measured: the head node has no ping" in [finding.value for finding in unmeasured]
    assert levels(unmeasured) == {"mtu": Severity.WARNING}
    new = replace(GOOD_DOCKER, swarm_state="inactive", swarm_node=None)
    assert levels(check_node(new, GOOD_HOST, replace(AROUND, is_new=True, swarm_members=None))) == {}
    assert levels(check_node(GOOD_DOCKER, GOOD_HOST, replace(AROUND, swarm_members=None))) == {
        "swarm": Severity.WARNING
    }
    assert "accounts: other" not in format_findings(check_node(GOOD_DOCKER, GOOD_HOST, AROUND))


def test_a_missing_manager_of_the_swarm_is_shown_at_the_others() -> None:
    """One that is down, or behind a firewall; nodes that do not manage it have nothing to report."""
    one = replace(AROUND, wanted_managers=3)
    assert levels(check_node(GOOD_DOCKER, GOOD_HOST, one)) == {}
    manager = replace(GOOD_DOCKER, swarm_node="n0")
    assert levels(check_node(manager, GOOD_HOST, one)) == {"swarm": Severity.WARNING}
    two = replace(one, swarm_members={"n0": "192.168.1.21:2377", "n2": "192.168.1.22:2377", "n3": ""})
    host = replace(GOOD_HOST, reach={**GOOD_HOST.reach, "192.168.1.22:2377": True})
    (finding,) = [each for each in check_node(manager, host, two) if each.check == "swarm"]
    assert finding.value == ("2 of 3 nodes that should keep users' networks do: 192.168.1.21:2377, 192.168.1.22:2377")
    assert levels(check_node(manager, host, replace(two, wanted_managers=2))) == {}


@pytest.mark.parametrize(
    ("host", "options", "advice"),
    [
        ({"socket": "refused"}, {"needs_sudo": False, "is_tls": False}, "sudo usermod -aG docker me"),
        ({"socket": "missing"}, {"needs_sudo": False, "is_tls": False}, "install Docker Engine"),
        ({"sudo": "no"}, {"needs_sudo": True, "is_tls": True}, "log in as root"),
    ],
)
def test_administrator_without_docker_access_gets_advice(
    host: dict[str, object], options: dict[str, bool], advice: str
) -> None:
    findings = list(node_checks.check_login(replace(GOOD_HOST, **host), **options))  # type: ignore[arg-type]
    assert has_failed(findings)
    assert advice in findings[-1].advice
    assert not has_failed(node_checks.check_login(GOOD_HOST, **options))


def test_docker_information_is_parsed(tmp_path: Path) -> None:
    """Times may have nanoseconds; the clock is compared with the middle of the query."""
    info = {
        "ServerVersion": "28.5.1",
        "ID": "X",
        "Driver": "overlay2",
        "CgroupVersion": "2",
        "Runtimes": {"runc": {}, "nvidia": {}},
        "SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless"],
        "SystemTime": "2026-11-21T17:00:05.123456789+01:00",
        "Swarm": {"LocalNodeState": "inactive", "NodeID": ""},
        "DockerRootDir": "/srv/docker",
    }
    moment = datetime(2026, 11, 21, 16, 0, 0, tzinfo=UTC).timestamp()
    version = {"Components": [{"Name": "runc", "Version": "1.3.3"}]}
    facts = build_docker_facts(info, version, before=moment - 1, after=moment + 1)
    assert facts.ahead_s == pytest.approx(5.123456, abs=1e-4)
    assert (facts.within_s, facts.runc, facts.root) == (1, "1.3.3", "/srv/docker")
    assert (facts.has_nvidia, facts.is_rootless, facts.has_userns, facts.swarm_node) == (True, True, False, None)


@pytest.mark.parametrize(
    ("options", "seccomp", "access_control"),
    [
        (["name=apparmor", "name=seccomp,profile=builtin", "name=cgroupns"], "builtin", "AppArmor"),
        (["name=seccomp,profile=unconfined", "name=selinux"], "unconfined", "SELinux"),
        (["name=apparmor"], "", "AppArmor"),
        (None, "", ""),
    ],
)
def test_confinement_by_the_daemon_is_parsed(options: list[str] | None, seccomp: str, access_control: str) -> None:
    facts = build_docker_facts(RECORDED | {"SecurityOptions": options}, {}, before=0, after=1)
    assert (facts.seccomp, facts.access_control) == (seccomp, access_control)


def test_recorded_answer_of_docker_is_parsed() -> None:
    """What Docker 20.10.24 of Debian 12 answered, on a kernel without AppArmor."""
    facts = build_docker_facts(RECORDED, {}, before=0, after=1)
    assert (facts.version, facts.seccomp, facts.access_control) == ("20.10.24+dfsg1", "default", "")
    assert levels(node_checks.check_docker(facts)) == {
        "docker": Severity.WARNING,
        "cgroups": Severity.WARNING,
        "access control": Severity.WARNING,
    }


def test_advice_about_docker_says_what_was_run() -> None:
    """The newer version without the vulnerabilities is named, and that gpuhub was not run with it."""
    finding = next(iter(node_checks.check_docker(replace(GOOD_DOCKER, version="28.3.2"))))
    assert "Docker 29.3.1 fixes them" in finding.advice
    assert "It was run with 20.10.24 only" in finding.advice


class ScriptedAgent:
    """The log of a GPU agent's container, with another last line at each request."""

    instance = "ghtest"

    def __init__(self, *lines: dict[str, object] | GpuhubError) -> None:
        self._lines = list(lines)

    async def call(self, _node: str, method: str, container: str, **_options: object) -> bytes:
        assert (method, container) == ("logs", "ghtest-agent")
        line = self._lines.pop(0) if len(self._lines) > 1 else self._lines[0]
        if isinstance(line, GpuhubError):
            raise line
        return json.dumps({"boot_id": None, "driver": "580", "error": None, "gpus": [], **line}).encode() + b"\n"


def _card(**values: object) -> dict[str, object]:
    return {"uuid": "GPU-1", "index": 0, "name": "RTX 5090", "memory_total_mib": 32607, "error": None, **values}


@pytest.mark.parametrize(
    ("lines", "is_running", "level", "text"),
    [
        ([{"n": 1}, {"n": 2, "gpus": [_card()]}], True, None, ""),
        ([{"n": 1}, {"n": 2, "error": "Driver/library version mismatch"}], True, Severity.FAILED, "reboot needed"),
        ([{"n": 7, "gpus": [_card()]}], True, Severity.FAILED, "has written nothing for"),
        (
            [{"n": 1}, {"n": 2, "gpus": [_card(), _card(uuid=None, index=1, error="GPU is lost")]}],
            True,
            Severity.FAILED,
            "GPU 1 fails: GPU is lost",
        ),
        (
            [{"n": 1}, {"n": 2, "gpus": [_card(ecc_uncorrected=3)]}],
            True,
            Severity.FAILED,
            "GPU-1 fails: 3 uncorrectable",
        ),
        ([NotFound("no such container")], True, Severity.FAILED, "no GPU agent runs there"),
        ([NotFound("no such container")], False, Severity.WARNING, "no GPU agent runs there"),
        ([NodeUnreachable("node rig1: silent")], True, Severity.FAILED, "cannot be read: node rig1: silent"),
    ],
)
async def test_each_problem_that_the_gpu_agent_reports(
    lines: list[dict[str, object] | GpuhubError], is_running: bool, level: Severity | None, text: str
) -> None:
    """What nvidia-smi says in the probe's container, which has no GPU, does not count."""
    report = await node_queries.read_gpu_report(cast("DockerClients", ScriptedAgent(*lines)), "rig1", stale_s=1.2)
    probed = replace(GOOD_HOST, gpus=(), gpu_error="nvidia-smi fails: no devices", toolkit=None)
    host = add_gpu_report(probed, report, is_running=is_running)
    findings = [finding for finding in node_checks.check_gpus(host, GOOD_DOCKER, AROUND) if finding.check == "gpus"]
    assert levels(findings) == ({} if level is None else {"gpus": level})
    assert any(text in finding.value for finding in findings)


@pytest.mark.process
def test_the_probe_runs_in_a_plain_shell(tmp_path: Path) -> None:
    """POSIX sh on this machine; its output is parsed, and it distinguishes open from closed ports."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        ports = server.getsockname()[1], unused.getsockname()[1]
        words = build_script_arguments(
            docker_root=str(Path("/")),
            head="127.0.0.1",
            addresses=[("127.0.0.1", port) for port in ports],
            accounts=["root", "nobody-of-that-name"],
            folders=["/", "/proc", "/no/such/folder", "/with a space"],
        )
        facts = probe_this_machine(words)
    assert facts.reach == {f"127.0.0.1:{ports[0]}": True, f"127.0.0.1:{ports[1]}": False}
    assert facts.accounts == {"root": 0}
    assert facts.disks == {
        folder: DiskFacts(device=os.stat(folder).st_dev, has_quota=False)  # noqa: PTH116
        for folder in ("/", "/proc")
    }
    assert facts.kernel
    assert facts.free_kib is not None
    assert facts.free_kib > 0
    assert facts.device == "lo"
    assert facts.mtu is not None


@pytest.mark.parametrize("text", ["", "sh: 1: cannot open", "user=me\nkernel=6"])
def test_an_incomplete_probe_is_an_error(text: str) -> None:
    with pytest.raises(GpuhubError, match="ended early"):
        parse_probe(text)


@pytest.mark.parametrize("address", ["192.168.1.20;id", "$(id)", "a b", "", "'"])
def test_probe_arguments_with_shell_characters_are_refused(address: str) -> None:
    with pytest.raises(GpuhubError, match="have a meaning to a shell"):
        build_script_arguments(docker_root="/", head=address, addresses=[], accounts=[])
    with pytest.raises(GpuhubError, match="have a meaning to a shell"):
        build_script_arguments(docker_root=f"/{address or ';'}", head=HEAD, addresses=[], accounts=[])
    words = build_script_arguments(docker_root="/", head=HEAD, addresses=[], accounts=[address, "ada"])
    assert words == ["/", HEAD, "account:ada"]


def test_findings_are_formatted_as_text_and_json() -> None:
    findings = [
        Finding(check="clock", severity=Severity.OK, value="as the head node's"),
        Finding(
            check="mtu", severity=Severity.WARNING, value="1420 bytes over wg0", advice="set mtu = 1420 below [network]"
        ),
    ]
    assert format_findings(findings) == (
        "  ✓ clock as the head node's\n  ! mtu   1420 bytes over wg0\n          → set mtu = 1420 below [network]"
    )
    assert all(len(line) <= 40 for line in format_findings(findings, 40).splitlines())
    (machine,) = json.loads(json.dumps(build_json([("rig1", findings)])))
    assert machine["machine"] == "rig1"
    assert machine["findings"][1]["level"] == "warning"


# -- the head node ----------------------------------------------------------------------------------------------------

NOW = datetime(2026, 11, 21, tzinfo=UTC)
GOOD_HEAD = HeadFacts(
    now=NOW,
    jupyterhub="6.1.1",
    programs={"proxy": "RUNNING", "broker": "RUNNING", "hub": "RUNNING"},
    ports={"127.0.0.1:8000 (browsers)": True},
    free={"/var/lib/gpuhub": 100 * 1024**3},
    certificates={"/a.pem": NOW + timedelta(days=300)},
    storage={"the file server 192.168.1.20": None},
)


@pytest.mark.parametrize(
    ("facts", "check", "level"),
    [
        ({"missing_packages": ("iputils-ping",)}, "programs", Severity.FAILED),
        ({"jupyterhub": "5.5.0"}, "jupyterhub", Severity.FAILED),
        ({"jupyterhub": ""}, "jupyterhub", Severity.FAILED),
        ({"programs": {}}, "services", Severity.WARNING),
        ({"programs": {"hub": "FATAL"}}, "services", Severity.FAILED),
        ({"ports": {"127.0.0.1:8000 (browsers)": False}}, "ports", Severity.FAILED),
        ({"free": {"/": 0}}, "disk", Severity.FAILED),
        ({"free": {"/": 5 * 1024**3}}, "disk", Severity.WARNING),
        ({"certificates": {"/a.pem": NOW}}, "certificate", Severity.FAILED),
        ({"certificates": {"/a.pem": "No such file or directory"}}, "certificate", Severity.FAILED),
        ({"certificates": {"/a.pem": NOW + timedelta(days=29)}}, "certificate", Severity.WARNING),
        ({"storage": {"x": "The file server x does not answer within 10 s"}}, "storage", Severity.FAILED),
        ({"export_problems": ("rig3 may not mount anything",)}, "file server", Severity.FAILED),
        ({"open_files": 4096}, "open files", Severity.WARNING),
        ({"uid_conflicts": ("ada and ben have 20000",)}, "accounts", Severity.FAILED),
        ({"account_mistakes": ("user ada: the head node does not see the home",)}, "names", Severity.FAILED),
        ({"account_notes": ("Accounts of this machine: ada (UID 1001)",)}, "names", Severity.WARNING),
        ({"exposed_secrets": ("/var/lib/gpuhub/secrets",)}, "secrets", Severity.FAILED),
    ],
)
def test_each_problem_of_the_head_node(facts: dict[str, object], check: str, level: Severity) -> None:
    assert levels(check_head(GOOD_HEAD)) == {}
    assert levels(check_head(replace(GOOD_HEAD, **facts))) == {check: level}  # type: ignore[arg-type]


def test_duplicate_user_ids_are_reported(tmp_path: Path) -> None:
    file = tmp_path / "uids.json"
    assert list(head_node.find_uid_conflicts(file)) == []
    file.write_text(json.dumps({"ada": 20000, "ben": 20000, "cyd": 1}))
    assert list(head_node.find_uid_conflicts(file)) == [
        "ben and ada have 20000",
        "cyd has 1, which is the account daemon on this machine",
    ]


def test_secret_files_readable_by_others_are_reported(tmp_path: Path) -> None:
    folder, owner = tmp_path / "secrets", os.getuid()
    assert list(head_node.find_exposed_secrets(folder, owner=owner)) == []
    folder.mkdir(mode=0o700)
    assert list(head_node.find_exposed_secrets(folder, owner=owner)) == []
    assert list(head_node.find_exposed_secrets(folder, owner=owner + 1)) == [str(folder)]
    folder.chmod(0o750)
    assert list(head_node.find_exposed_secrets(folder, owner=owner)) == [str(folder)]


def test_file_servers_are_read_from_the_settings() -> None:
    from gpuhub.ops.doctor.nodes.node_queries import find_nfs_servers

    cluster: ClusterSettings = build_cluster().model_copy(
        update={
            "storage": StorageSettings(
                home=f"nfs://{HEAD}/export/home/{{username}}", datasets=f"nfs://{HEAD}/export/data"
            )
        }
    )
    assert [(server.host, server.port) for server in find_nfs_servers(cluster)] == [(HEAD, 2049)]
