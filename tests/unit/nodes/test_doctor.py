"""What the doctor makes of what machines say."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpuhub.errors import GpuhubError
from gpuhub.nodes.doctor import checks, heading, versions
from gpuhub.nodes.doctor.checks import Around
from gpuhub.nodes.doctor.examining import check_all
from gpuhub.nodes.doctor.facts import (
    DockerFacts,
    GpuFacts,
    HostFacts,
    build_probe_words,
    parse_probe,
    probe_script,
    read_docker,
)
from gpuhub.nodes.doctor.findings import Finding, Level, as_json, format_findings, has_failed
from gpuhub.nodes.doctor.head_checks import HeadFacts, check_head
from gpuhub.settings import Cluster, Storage
from tests.support.simulated import build_cluster

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
    live_restore=False,
    swarm_state="active",
    swarm_node="n1",
    ahead_s=0.01,
    within_s=0.05,
)
AROUND = Around(
    head=HEAD,
    head_ports={"hub": 8081, "broker": 8010},
    listening=frozenset({8081, 8010}),
    nfs=(f"{HEAD}:2049",),
    accounts={"ada": 1001, "ben": 1002},
    manager="192.168.1.21:2377",
    members=frozenset({"n1"}),
)


def levels(findings: Iterable[Finding]) -> dict[str, Level]:
    return {each.check: each.level for each in findings if each.level is not Level.OK}


def test_a_good_node_has_nothing_to_mend() -> None:
    findings = check_all(GOOD_DOCKER, GOOD_HOST, AROUND)
    assert levels(findings) == {}
    assert {"docker", "clock", "swarm", "disk", "gpus", "toolkit", "hub", "broker", "storage", "mtu", "accounts"} <= {
        each.check for each in findings
    }


@pytest.mark.parametrize(
    ("docker", "check", "level"),
    [
        ({"version": "19.03.15"}, "docker", Level.FAILED),
        ({"version": ""}, "docker", Level.FAILED),
        ({"version": "28.3.2"}, "docker", Level.WARNING),
        ({"version": "28.5.1"}, "docker", Level.WARNING),
        ({"is_rootless": True}, "docker", Level.FAILED),
        ({"has_userns": True}, "docker", Level.WARNING),
        ({"runc": "1.1.5+ds1"}, "runc", Level.WARNING),
        ({"runc": "1.3.2"}, "runc", Level.WARNING),
        ({"storage_driver": "vfs"}, "layers", Level.WARNING),
        ({"cgroup_version": "1"}, "cgroups", Level.WARNING),
        ({"ahead_s": -3.0}, "clock", Level.WARNING),
        ({"ahead_s": 31.0}, "clock", Level.FAILED),
        ({"swarm_state": "inactive"}, "swarm", Level.FAILED),
        ({"swarm_node": "n9"}, "swarm", Level.FAILED),
    ],
)
def test_each_trouble_of_a_daemon(docker: dict[str, object], check: str, level: Level) -> None:
    """Named alone, with what to do."""
    findings = check_all(replace(GOOD_DOCKER, **docker), GOOD_HOST, AROUND)  # type: ignore[arg-type]
    assert levels(findings) == {check: level}
    assert all(each.advice for each in findings if each.level is not Level.OK)


@pytest.mark.parametrize(
    ("host", "check", "level"),
    [
        ({"free_kib": 1024**2}, "disk", Level.FAILED),
        ({"free_kib": 10 * 1024**2}, "disk", Level.WARNING),
        ({"free_kib": None}, "disk", Level.WARNING),
        ({"gpu_error": "Failed to initialize NVML"}, "gpus", Level.FAILED),
        ({"gpus": ()}, "gpus", Level.WARNING),
        ({"toolkit": "1.17.7"}, "toolkit", Level.WARNING),
        ({"mtu": 1420, "device": "wg0"}, "mtu", Level.WARNING),
        ({"mtu": 500}, "mtu", Level.FAILED),
        ({"mtu": None}, "mtu", Level.WARNING),
        ({"nf_tables": None}, "filter", Level.WARNING),
        ({"reach": {**GOOD_HOST.reach, f"{HEAD}:8081": False}}, "hub", Level.FAILED),
        ({"reach": {**GOOD_HOST.reach, f"{HEAD}:8010": None}}, "broker", Level.WARNING),
        ({"reach": {**GOOD_HOST.reach, f"{HEAD}:2049": False}}, "storage", Level.FAILED),
        ({"reach": {**GOOD_HOST.reach, "192.168.1.21:2377": False}}, "nodes", Level.FAILED),
        ({"reach": {**GOOD_HOST.reach, "192.168.1.21:2377": None}}, "nodes", Level.WARNING),
        ({"accounts": {"ada": 1002, "cyd": 7}}, "accounts", Level.WARNING),
    ],
)
def test_each_trouble_of_a_machine(host: dict[str, object], check: str, level: Level) -> None:
    assert levels(check_all(GOOD_DOCKER, replace(GOOD_HOST, **host), AROUND)) == {check: level}  # type: ignore[arg-type]


def test_a_guard_that_runs_knows_about_the_filter() -> None:
    """What it says counts more than what the machine shows of its kernel."""
    unknown = replace(GOOD_HOST, nf_tables=None)
    assert levels(check_all(GOOD_DOCKER, unknown, replace(AROUND, guard=("ok", "applied")))) == {}
    assert levels(check_all(GOOD_DOCKER, GOOD_HOST, replace(AROUND, guard=("failed", "nft: no such file")))) == {
        "filter": Level.FAILED
    }


def test_cards_without_a_toolkit_fail() -> None:
    """They could be given to nobody; without cards it is only told."""
    bare = replace(GOOD_DOCKER, has_nvidia=False)
    assert levels(check_all(bare, replace(GOOD_HOST, toolkit=None), AROUND)) == {"toolkit": Level.FAILED}
    assert levels(check_all(bare, replace(GOOD_HOST, toolkit=None, gpus=()), AROUND)) == {
        "gpus": Level.WARNING,
        "toolkit": Level.WARNING,
    }


def test_what_depends_on_the_surroundings() -> None:
    """A machine that was added under another name; ports on which nobody listens yet; a tunnel by its name."""
    twice = check_all(GOOD_DOCKER, GOOD_HOST, replace(AROUND, other_gpus={"GPU-1": "rig1"}))
    assert [each.value for each in twice if each.level is Level.FAILED] == ["GPU-1 is on node rig1 too"]
    shut = replace(GOOD_HOST, reach={**GOOD_HOST.reach, f"{HEAD}:8081": False, f"{HEAD}:8010": False})
    assert levels(check_all(GOOD_DOCKER, shut, replace(AROUND, listening=frozenset()))) == {
        "hub": Level.WARNING,
        "broker": Level.WARNING,
    }
    behind = check_all(GOOD_DOCKER, replace(GOOD_HOST, mtu=1420, device="wg0"), replace(AROUND, mtu=1420))
    assert "1420 bytes over wg0 (WireGuard); users' networks get 1370" in [each.value for each in behind]
    new = replace(GOOD_DOCKER, swarm_state="inactive", swarm_node=None)
    assert levels(check_all(new, GOOD_HOST, replace(AROUND, is_new=True, members=None))) == {}
    assert levels(check_all(GOOD_DOCKER, GOOD_HOST, replace(AROUND, members=None))) == {"swarm": Level.WARNING}
    assert "accounts: other" not in format_findings(check_all(GOOD_DOCKER, GOOD_HOST, AROUND))


@pytest.mark.parametrize(
    ("host", "options", "advice"),
    [
        ({"socket": "refused"}, {"needs_sudo": False, "is_tls": False}, "sudo usermod -aG docker me"),
        ({"socket": "missing"}, {"needs_sudo": False, "is_tls": False}, "install Docker Engine"),
        ({"sudo": "no"}, {"needs_sudo": True, "is_tls": True}, "log in as root"),
    ],
)
def test_what_the_administrator_may_do_there(host: dict[str, object], options: dict[str, bool], advice: str) -> None:
    found = list(checks.check_login(replace(GOOD_HOST, **host), **options))  # type: ignore[arg-type]
    assert has_failed(found)
    assert advice in found[-1].advice
    assert not has_failed(checks.check_login(GOOD_HOST, **options))


@pytest.mark.parametrize(
    ("text", "version"),
    [("20.10.24+dfsg1", (20, 10, 24)), ("29.3.1-ce", (29, 3, 1)), ("v1.17.8", (1, 17, 8)), ("none", None)],
)
def test_versions_as_distributions_write_them(text: str, version: tuple[int, ...] | None) -> None:
    assert versions.parse_version(text) == version


@pytest.mark.parametrize(
    ("text", "safe"), [("1.2.8", True), ("1.2.7", False), ("1.3.3", True), ("1.4.0", True), ("x", False)]
)
def test_which_runc_is_safe(text: str, safe: bool) -> None:
    assert versions.is_safe_runc(text) is safe


def test_what_docker_says(tmp_path: Path) -> None:
    """Nanoseconds and all; the clock is compared with the middle of the question."""
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
    facts = read_docker(info, version, before=moment - 1, after=moment + 1)
    assert facts.ahead_s == pytest.approx(5.123456, abs=1e-4)
    assert (facts.within_s, facts.runc, facts.root) == (1, "1.3.3", "/srv/docker")
    assert (facts.has_nvidia, facts.is_rootless, facts.has_userns, facts.swarm_node) == (True, True, False, None)


def test_the_probe_runs_in_a_plain_shell(tmp_path: Path) -> None:
    """POSIX sh, on this machine: what it says is read, and it knows an open port from a shut one."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        ports = server.getsockname()[1], unused.getsockname()[1]
        words = build_probe_words(
            docker_root=str(Path("/")),
            head="127.0.0.1",
            places=[("127.0.0.1", port) for port in ports],
            accounts=["root", "nobody-of-that-name"],
        )
        done = subprocess.run(
            ["sh", "-s", "--", *words], input=probe_script(), check=True, capture_output=True, text=True, timeout=60
        )
    facts = parse_probe(done.stdout)
    assert done.stderr == ""
    assert facts.reach == {f"127.0.0.1:{ports[0]}": True, f"127.0.0.1:{ports[1]}": False}
    assert facts.accounts == {"root": 0}
    assert facts.kernel
    assert facts.free_kib is not None
    assert facts.free_kib > 0
    assert facts.device == "lo"
    assert facts.mtu is not None


@pytest.mark.parametrize("text", ["", "sh: 1: cannot open", "user=me\nkernel=6"])
def test_a_probe_that_broke_off_is_no_answer(text: str) -> None:
    with pytest.raises(GpuhubError, match="broke off"):
        parse_probe(text)


@pytest.mark.parametrize("address", ["192.168.1.20;id", "$(id)", "a b", "", "'"])
def test_nothing_reaches_a_shell_that_means_something(address: str) -> None:
    with pytest.raises(GpuhubError, match="cannot be asked of a shell"):
        build_probe_words(docker_root="/", head=address, places=[], accounts=[])
    with pytest.raises(GpuhubError, match="cannot be asked of a shell"):
        build_probe_words(docker_root=f"/{address or ';'}", head=HEAD, places=[], accounts=[])
    words = build_probe_words(docker_root="/", head=HEAD, places=[], accounts=[address, "ada"])
    assert words == ["/", HEAD, "account:ada"]


def test_findings_for_people_and_programs() -> None:
    findings = [
        Finding(check="clock", level=Level.OK, value="as the head node's"),
        Finding(check="mtu", level=Level.WARNING, value="1420 bytes over wg0", advice="set mtu = 1420 below [network]"),
    ]
    assert format_findings(findings) == (
        "  ✓ clock as the head node's\n  ! mtu   1420 bytes over wg0\n          → set mtu = 1420 below [network]"
    )
    assert all(len(line) <= 40 for line in format_findings(findings, 40).splitlines())
    (machine,) = json.loads(json.dumps(as_json([("rig1", findings)])))
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
        ({"jupyterhub": "5.5.0"}, "jupyterhub", Level.FAILED),
        ({"jupyterhub": ""}, "jupyterhub", Level.FAILED),
        ({"programs": {}}, "services", Level.WARNING),
        ({"programs": {"hub": "FATAL"}}, "services", Level.FAILED),
        ({"ports": {"127.0.0.1:8000 (browsers)": False}}, "ports", Level.FAILED),
        ({"free": {"/": 0}}, "disk", Level.FAILED),
        ({"free": {"/": 5 * 1024**3}}, "disk", Level.WARNING),
        ({"certificates": {"/a.pem": NOW}}, "certificate", Level.FAILED),
        ({"certificates": {"/a.pem": "No such file or directory"}}, "certificate", Level.FAILED),
        ({"certificates": {"/a.pem": NOW + timedelta(days=29)}}, "certificate", Level.WARNING),
        ({"storage": {"x": "The file server x does not answer within 10 s"}}, "storage", Level.FAILED),
        ({"uid_troubles": ("ada and ben have 20000",)}, "accounts", Level.FAILED),
        ({"exposed": ("/var/lib/gpuhub/secrets",)}, "secrets", Level.FAILED),
    ],
)
def test_each_trouble_of_the_head_node(facts: dict[str, object], check: str, level: Level) -> None:
    assert levels(check_head(GOOD_HEAD)) == {}
    assert levels(check_head(replace(GOOD_HEAD, **facts))) == {check: level}  # type: ignore[arg-type]


def test_numbers_that_two_users_have(tmp_path: Path) -> None:
    file = tmp_path / "uids.json"
    assert list(heading.find_uid_troubles(file)) == []
    file.write_text(json.dumps({"ada": 20000, "ben": 20000, "cyd": 1}))
    assert list(heading.find_uid_troubles(file)) == [
        "ben and ada have 20000",
        "cyd has 1, which is the account daemon on this machine",
    ]


def test_secrets_that_others_could_read(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    assert list(heading.find_exposed(folder)) == []
    folder.mkdir(mode=0o700)
    assert list(heading.find_exposed(folder)) == []
    folder.chmod(0o750)
    assert list(heading.find_exposed(folder)) == [str(folder)]


def test_file_servers_of_the_settings() -> None:
    from gpuhub.nodes.doctor.looking import nfs_servers

    cluster: Cluster = build_cluster().model_copy(
        update={"storage": Storage(home=f"nfs://{HEAD}/export/home/{{username}}", datasets=f"nfs://{HEAD}/export/data")}
    )
    assert [(server.host, server.port) for server in nfs_servers(cluster)] == [(HEAD, 2049)]
