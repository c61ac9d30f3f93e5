"""Facts about a Slurm site, parsed from the output of its commands, and the checks of the site and its nodes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gpuhub.config.settings import NodeSettings, SlurmSettings
from gpuhub.ops.doctor import version_checks
from gpuhub.ops.doctor.findings import Finding, failed, ok, warning
from gpuhub.ops.doctor.node_facts import HostFacts
from gpuhub.ops.doctor.nodes.node_checks import MAX_SKEW_S, SKEW_NOTED_S
from gpuhub.slurm_client import models
from gpuhub.slurm_client.models import SlurmSite

_AS_OF = re.compile(r"(?m)^Configuration data as of (\d+)\s*$")
_SOCKET = re.compile(r"(?:^|,)socket=([^,]+)")
#: Since 24.05 slurm.conf may name several, which are numbered then, also a single one.
_EPILOG = re.compile(r"epilog(\[\d+\])?")
_NULL = "(null)"
MIN_SLURM: version_checks.Version = (22, 5)
#: The guide for the Epilog and the health check.
_GUIDE = "docs/slurm.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmFacts:
    """Facts about a Slurm site that the head node can read."""

    #: Slurm's commands that were not found; none where slurmrestd is used.
    missing: tuple[str, ...] = ()
    #: The configuration of the site; None with the reason in `problem`.
    site: SlurmSite | None = None
    problem: str = ""
    #: The error of munge, empty where it works; None where it was not checked.
    munge: str | None = None
    #: `scontrol show config`: setting in small letters → value; empty where it was not read.
    config: Mapping[str, str] = field(default_factory=dict)
    #: How far the head node's clock is ahead of slurmctld's, seconds; None where it is unknown.
    ahead_s: float | None = None
    #: The error of that: the duration of the query, and slurmctld's rounding to whole seconds.
    within_s: float = 1.0
    #: Slurm's name of a node → the version of its slurmd.
    slurmds: Mapping[str, str] = field(default_factory=dict)
    #: A line for each name in cluster.toml that Slurm does not have.
    settings_errors: tuple[str, ...] = ()
    #: What the head node lacks for laptops' files, logs and terminals; None where containers serve them.
    lacks_for_laptops: tuple[str, ...] | None = None

    @property
    def munge_socket(self) -> str:
        """The socket of munged in slurm.conf; empty for the default."""
        match = _SOCKET.search(self.config.get("authinfo", ""))
        return match[1] if match else ""

    @property
    def epilog(self) -> str:
        """The program that Slurm runs after each job, gpuhub's if it has several; empty for none."""
        programs = [value for key, value in self.config.items() if _EPILOG.fullmatch(key) and value != _NULL]
        return next((program for program in programs if "gpuhub" in program), next(iter(programs), ""))


def parse_config(text: str) -> dict[str, str]:
    """Parse the lines `Key = value` of `scontrol show config`; keys become small letters."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, sign, value = line.partition("=")
        # Later sections repeat keys of other files.
        if sign and key.strip():
            values.setdefault(key.strip().lower(), value.strip())
    return values


def parse_clock(text: str) -> float | None:
    """Parse slurmctld's time in `SLURM_TIME_FORMAT=%s scontrol show config`, seconds since 1970."""
    match = _AS_OF.search(text)
    return None if match is None else float(match[1])


def parse_slurmds(text: str) -> dict[str, str]:
    """Parse the lines `NAME VERSION` of `sinfo -h -N -o "%N %v"`; a node that never answered has no version."""
    parts = (line.split() for line in text.splitlines())
    return {words[0]: words[1] for words in parts if len(words) == 2 and words[1][0].isdigit()}


def check_slurm(facts: SlurmFacts, table: SlurmSettings) -> Iterator[Finding]:
    """Check the site as the head node sees it."""
    if facts.missing:
        yield failed(
            "slurm",
            f"not found: {', '.join(facts.missing)}",
            "install Slurm's commands of the site's version here, or set slurm.commands to their folder",
        )
    if facts.munge:
        yield failed(
            "munge",
            facts.munge,
            "run munged here with the site's key (/etc/munge/munge.key, the same on every machine)",
        )
    elif facts.munge is not None:
        yield ok("munge", "signs and reads")
    if facts.site is None:
        yield failed("slurm", facts.problem or "unknown", _advise(table))
        return
    yield _check_version(facts.site)
    if facts.ahead_s is not None:
        yield _check_clock(facts.ahead_s, facts.within_s)
    yield from _check_accounting(facts.site)
    if facts.config:
        yield from _check_config(facts, table)
    if table.runtime != "docker":
        yield _check_shared_devices(facts.config.get("constraindevices", ""))
    if table.runtime == "apptainer":
        yield ok("image", f"{table.image} was not checked: `gpuhub image list` tries it on every node")
    if facts.lacks_for_laptops is not None:
        yield _check_laptops(facts.lacks_for_laptops)
    if facts.settings_errors:
        for line in facts.settings_errors:
            yield failed("settings", line, "change cluster.toml, or Slurm's configuration")
    else:
        yield ok("settings", "Slurm has everything that cluster.toml names")


def _check_laptops(lacking: tuple[str, ...]) -> Finding:
    if lacking:
        return warning(
            "laptops",
            f"this machine lacks {', '.join(lacking)}: not all of `gpu-launch run`, `cp`, `logs` and `shell` works",
            "have it here as on the nodes (docs/slurm.md)",
        )
    return ok("laptops", "files, logs and terminals have what they need here")


def _advise(table: SlurmSettings) -> str:
    if table.api == "rest":
        return f"see slurmrestd at {table.rest_url} and its log; rest_key must be the key of AuthAltParameters"
    conf = table.conf or "/etc/slurm/slurm.conf"
    return f"`scontrol ping` shows which slurmctld {conf} names; start it, or let its port through the firewall"


def _check_version(site: models.SlurmSite) -> Finding:
    version = _format_version(site.version)
    if site.version < MIN_SLURM:
        return failed("slurm", f"{version} of cluster {site.cluster}", "22.05 or newer is needed")
    return ok("slurm", f"{version}, cluster {site.cluster}")


def _format_version(version: version_checks.Version) -> str:
    """Return the version as Slurm writes it: 22.05.8."""
    return ".".join(f"{part:02}" if index == 1 else str(part) for index, part in enumerate(version))


def _check_clock(ahead_s: float, within_s: float) -> Finding:
    difference = max(0.0, abs(ahead_s) - within_s)
    value = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} slurmctld's"
    advice = "run chrony or systemd-timesyncd on both machines: munge rejects credentials that are five minutes old"
    if difference > MAX_SKEW_S:
        return failed("clock", value, advice)
    return warning("clock", value, advice) if difference > SKEW_NOTED_S else ok("clock", "as slurmctld's")


def _check_accounting(site: models.SlurmSite) -> Iterator[Finding]:
    if site.has_accounting:
        yield ok("accounting", f"slurmdbd answers: {len(site.accounts)} accounts, {len(site.qos)} QOS")
    else:
        yield warning(
            "accounting",
            "slurmdbd does not answer, or does not exist",
            "without it there are no accounts, QOS and fair share; `gpuhub usage` counts only what gpuhub started",
        )


def _check_config(facts: SlurmFacts, table: SlurmSettings) -> Iterator[Finding]:
    if table.runtime == "docker":
        if facts.epilog:
            yield ok("epilog", facts.epilog)
        else:
            yield failed(
                "epilog",
                "slurm.conf names none",
                "without it a container may still use a GPU that Slurm has allocated to the next job: install gpuhub's "
                f"on every node and set Epilog, see {_GUIDE}",
            )
    elif facts.config.get("healthcheckprogram", _NULL) in {"", _NULL}:
        yield warning(
            "health check",
            "slurm.conf names no HealthCheckProgram",
            f"Slurm gives a failed GPU to the next job without it: install gpuhub's on every node, see {_GUIDE}",
        )
    plugins = facts.config.get("taskplugin", "")
    if "cgroup" not in plugins:
        # Docker limits containers to their GPUs.
        build_finding = warning if table.runtime == "docker" else failed
        yield build_finding(
            "devices",
            f"TaskPlugin is {plugins or 'not set'}: jobs are not limited to their own GPUs",
            "set TaskPlugin=task/cgroup,task/affinity in slurm.conf and ConstrainDevices=yes in cgroup.conf",
        )
    tracking = facts.config.get("proctracktype", "")
    if table.runtime == "apptainer" and tracking != "proctrack/cgroup":
        yield warning(
            "processes",
            f"ProctrackType is {tracking or 'not set'}: at a job's end, programs lose their image before they can save",
            "set ProctrackType=proctrack/cgroup in slurm.conf: then SIGTERM reaches gpuhub's script alone, and not "
            "squashfuse, which reads the image",
        )
    enforced = facts.config.get("enforcepartlimits", "")
    if enforced.upper() in {"", "NO"}:
        yield warning(
            "limits",
            "EnforcePartLimits is NO: Slurm accepts jobs that it will never start",
            "set EnforcePartLimits=ALL in slurm.conf",
        )


def _check_shared_devices(setting: str) -> Finding:
    """Check what confines jobs to their GPUs where nothing but Slurm does."""
    advice = "set ConstrainDevices=yes in cgroup.conf on every node: a notebook can use other users' GPUs without it"
    if setting.lower() == "yes":
        return ok("devices", "ConstrainDevices is on in slurmctld's cgroup.conf; the nodes' own files were not read")
    if setting:
        return failed("devices", "ConstrainDevices is off in slurmctld's cgroup.conf", advice)
    return warning("devices", "whether ConstrainDevices is on is not known: slurmctld does not report it", advice)


# -- on a node --------------------------------------------------------------------------------------------------------


def check_slurm_node(
    node: NodeSettings, host: HostFacts, facts: SlurmFacts, table: SlurmSettings, numbers: Mapping[str, int]
) -> Iterator[Finding]:
    """Check one node; yields nothing where the site itself could not be read.

    Args:
        numbers: User → number that gpuhub uses.
    """
    if facts.site is None:
        return
    slurm_nodes = {slurm_node.name: slurm_node for slurm_node in facts.site.nodes}
    slurm_node = slurm_nodes.get(node.slurm_name)
    if slurm_node is None:
        yield failed(
            "slurm",
            f"Slurm has no node {node.slurm_name!r}",
            'add it to slurm.conf, or set slurm = "…" in its table to its name there',
        )
        return
    yield _check_state(slurm_node, facts.site, facts.slurmds.get(slurm_node.name, ""))
    if table.runtime != "docker":
        # The node can only be probed through its Docker daemon.
        yield ok("gres", f"Slurm has {_describe(slurm_node.gpus)}; the GPUs themselves were not checked")
        return
    yield from _check_gpus(slurm_node, host, table)
    yield _check_devices(host)
    if facts.epilog:
        yield from _check_epilog(host, facts.epilog)
    yield from _check_users(host, numbers)


def _check_state(slurm_node: models.SlurmNode, site: models.SlurmSite, version: str) -> Finding:
    expected = _format_version(site.version)
    if not slurm_node.takes_work:
        reason = f": {slurm_node.reason}" if slurm_node.reason else ""
        return warning(
            "slurmd",
            f"{slurm_node.state}{reason}",
            f"repair it, then `scontrol update nodename={slurm_node.name} state=resume`",
        )
    parsed = version_checks.parse_version(version)
    if parsed is not None and parsed[:2] != site.version[:2]:
        return warning(
            "slurmd", f"{version}, and slurmctld {expected}", "update it: all parts of Slurm must have one release"
        )
    return ok("slurmd", f"{slurm_node.state}{f', {version}' if version else ''}")


def _check_gpus(slurm_node: models.SlurmNode, host: HostFacts, table: SlurmSettings) -> Iterator[Finding]:
    """Compare the GPUs in gres.conf with those of NVIDIA's driver."""
    present = Counter(table.gpu_type(gpu.model) for gpu in host.gpus)
    configured = Counter({kind: count for kind, count in slurm_node.gpus.items() if count})
    texts = {name: _describe(count) for name, count in (("gres", configured), ("driver", present))}
    value = f"Slurm has {texts['gres']}, and the driver {texts['driver']}"
    if not present and configured:
        yield warning(
            "gres",
            f"Slurm has {texts['gres']}; the GPUs of the node are unknown",
            "`sudo make up` starts the agent that reads them; is NVIDIA's driver installed?",
        )
    elif configured.total() != present.total():
        yield failed("gres", value, "gres.conf needs a line for each GPU, and slurm.conf the same number in Gres=")
    elif configured.keys() == {""}:
        types = ", ".join(f"Type={kind}" for kind in present)
        yield warning("gres", f"{value}: without types no model can be requested", f"set {types} in gres.conf")
    elif configured != present:
        yield failed(
            "gres",
            value,
            "give each GPU its Type in gres.conf, or map models to Slurm's types with slurm.gpu_types",
        )
    else:
        yield ok("gres", f"as the driver has them: {texts['gres']}")
    kinds = [table.gpu_type(gpu.model) for gpu in host.gpus]
    blocks = [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]
    if len(blocks) != len(set(blocks)):
        yield warning(
            "gres",
            f"GPUs of one type are not adjacent: {', '.join(kinds)}",
            "Slurm counts them type by type: check that the GPU in each line's File= has its Type=",
        )


def _describe(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {kind or 'GPU without a type'}" for kind, count in sorted(counts.items())) or "none"


def _check_devices(host: HostFacts) -> Finding:
    if host.slurm_devices == "yes":
        return ok(
            "devices", "ConstrainDevices is on: plain jobs are limited to their GPUs, as Docker limits containers"
        )
    setting = "ConstrainDevices is off" if host.slurm_devices == "no" else "no cgroup.conf sets ConstrainDevices"
    return warning(
        "devices",
        f"{setting}: Docker limits containers to their GPUs, and nothing limits plain jobs",
        "set ConstrainDevices=yes in cgroup.conf and TaskPlugin=task/cgroup in slurm.conf",
    )


def _check_epilog(host: HostFacts, epilog: str) -> Iterator[Finding]:
    problems = {
        "other": (warning, f"{epilog} does not name gpuhub", "call gpuhub's Epilog from it"),
        "refused": (failed, f"{epilog} cannot be run", "chmod 755, and chown root"),
        "missing": (failed, f"{epilog} does not exist", f"install it: see {_GUIDE}"),
    }
    if host.epilog == "ok":
        yield ok("epilog", epilog)
    elif host.epilog in problems:
        build_finding, value, advice = problems[host.epilog]
        yield build_finding("epilog", value, advice)
    else:
        yield warning("epilog", f"{epilog} was not checked", "check that it calls gpuhub's Epilog there")


def _check_users(host: HostFacts, numbers: Mapping[str, int]) -> Iterator[Finding]:
    conflicts = [
        f"{name} ({number} here, {host.accounts[name]} there)"
        for name, number in sorted(numbers.items())
        if host.accounts.get(name, number) != number
    ]
    if conflicts:
        yield failed(
            "users",
            f"different numbers there: {', '.join(conflicts)}",
            "give both the same number, for example with LDAP: Slurm would run their jobs as another user",
        )
    missing = [f"{name} ({number})" for name, number in sorted(numbers.items()) if name not in host.accounts]
    if missing:
        yield warning(
            "users",
            f"no account there: {', '.join(missing)}",
            "Slurm starts no job of a user without an account on the node: give them an account with that number",
        )
    if numbers and not conflicts and not missing:
        yield ok("users", f"the same numbers: {', '.join(sorted(numbers))}")
