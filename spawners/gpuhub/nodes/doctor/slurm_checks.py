"""What facts about a Slurm site mean: findings, each with what to do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from gpuhub.nodes.doctor import versions
from gpuhub.nodes.doctor.checks import SKEW_NOTED_S, SKEW_TOO_MUCH_S
from gpuhub.nodes.doctor.facts import HostFacts
from gpuhub.nodes.doctor.findings import Finding, failed, ok, warning
from gpuhub.nodes.doctor.slurm_facts import SlurmFacts
from gpuhub.settings import Node, Slurm
from gpuhub.slurm import values

SLURM_LEAST: versions.Version = (22, 5)
#: Where the administrator finds what is to be installed on each node.
_EPILOG = "docs/slurm.md"


def check_slurm(facts: SlurmFacts, table: Slurm) -> Iterator[Finding]:
    """The site as the head node sees it."""
    if facts.missing:
        yield failed(
            "slurm",
            f"not found: {', '.join(facts.missing)}",
            "install Slurm's commands of the site's version here, or say where they are with slurm.commands",
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
        yield failed("slurm", facts.trouble or "nobody could tell", _advice(table))
        return
    yield _check_version(facts.site)
    if facts.ahead_s is not None:
        yield _check_clock(facts.ahead_s, facts.within_s)
    yield from _check_accounting(facts.site)
    if facts.config:
        yield from _check_config(facts, table)
    if facts.mistakes:
        for line in facts.mistakes:
            yield failed("settings", line, "change cluster.toml, or what Slurm has")
    else:
        yield ok("settings", "Slurm knows all that cluster.toml names")


def _advice(table: Slurm) -> str:
    if table.api == "rest":
        return f"see slurmrestd at {table.rest_url} and its log; rest_key must be the key of AuthAltParameters"
    conf = table.conf or "/etc/slurm/slurm.conf"
    return f"`scontrol ping` says which slurmctld {conf} names; start it, or let its port through the firewall"


def _check_version(site: values.Site) -> Finding:
    version = _format_version(site.version)
    if site.version < SLURM_LEAST:
        return failed("slurm", f"{version} of cluster {site.cluster}", "22.05 or newer is needed")
    return ok("slurm", f"{version}, cluster {site.cluster}")


def _format_version(version: versions.Version) -> str:
    """As Slurm writes it: 22.05.8."""
    return ".".join(f"{part:02}" if at == 1 else str(part) for at, part in enumerate(version))


def _check_clock(ahead_s: float, within_s: float) -> Finding:
    apart = max(0.0, abs(ahead_s) - within_s)
    value = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} slurmctld's"
    advice = "run chrony or systemd-timesyncd on both machines: munge refuses what is five minutes old"
    if apart > SKEW_TOO_MUCH_S:
        return failed("clock", value, advice)
    return warning("clock", value, advice) if apart > SKEW_NOTED_S else ok("clock", "as slurmctld's")


def _check_accounting(site: values.Site) -> Iterator[Finding]:
    if site.has_accounting:
        yield ok("accounting", f"slurmdbd answers: {len(site.accounts)} accounts, {len(site.qos)} QOS")
    else:
        yield warning(
            "accounting",
            "slurmdbd does not answer, or there is none",
            "without it there are no accounts, QOS and fair share; `gpuhub usage` counts what gpuhub started alone",
        )


def _check_config(facts: SlurmFacts, table: Slurm) -> Iterator[Finding]:
    if table.runtime == "docker":
        if facts.epilog:
            yield ok("epilog", facts.epilog)
        else:
            yield failed(
                "epilog",
                "slurm.conf names none",
                "without it a container may still use a GPU that Slurm has given to the next job: install gpuhub's on "
                f"every node and set Epilog, see {_EPILOG}",
            )
    plugins = facts.config.get("taskplugin", "")
    if "cgroup" not in plugins:
        # Containers are kept to theirs by Docker.
        say = warning if table.runtime == "docker" else failed
        yield say(
            "devices",
            f"TaskPlugin is {plugins or 'not set'}: jobs are not kept to their own GPUs",
            "set TaskPlugin=task/cgroup,task/affinity in slurm.conf and ConstrainDevices=yes in cgroup.conf",
        )
    enforced = facts.config.get("enforcepartlimits", "")
    if enforced.upper() in {"", "NO"}:
        yield warning(
            "limits",
            "EnforcePartLimits is NO: Slurm takes jobs that it will never start",
            "set EnforcePartLimits=ALL in slurm.conf",
        )


# -- on a node --------------------------------------------------------------------------------------------------------


def check_slurm_node(
    node: Node, host: HostFacts, facts: SlurmFacts, table: Slurm, numbers: Mapping[str, int]
) -> Iterator[Finding]:
    """One node; `numbers` are the users' that gpuhub has. Nothing where the site itself could not be asked."""
    if facts.site is None:
        return
    known = {one.name: one for one in facts.site.nodes}
    seen = known.get(node.slurm_name)
    if seen is None:
        yield failed(
            "slurm",
            f"Slurm has no node {node.slurm_name!r}",
            'name it in slurm.conf, or say what it is called there with slurm = "…" in its table',
        )
        return
    yield _check_state(seen, facts.site, facts.slurmds.get(seen.name, ""))
    if table.runtime != "docker":
        # Without a daemon nobody can look inside.
        yield ok("gres", f"Slurm has {_describe(seen.gpus)}; nobody looked at the cards themselves")
        return
    yield from _check_cards(seen, host, table)
    yield _check_devices(host)
    if facts.epilog:
        yield from _check_epilog(host, facts.epilog)
    yield from _check_users(host, numbers)


def _check_state(seen: values.Node, site: values.Site, version: str) -> Finding:
    ours = _format_version(site.version)
    if not seen.takes_work:
        why = f": {seen.reason}" if seen.reason else ""
        return warning(
            "slurmd", f"{seen.state}{why}", f"mend it, then `scontrol update nodename={seen.name} state=resume`"
        )
    parsed = versions.parse_version(version)
    if parsed is not None and parsed[:2] != site.version[:2]:
        return warning("slurmd", f"{version}, and slurmctld {ours}", "update it: Slurm's parts are of one release")
    return ok("slurmd", f"{seen.state}{f', {version}' if version else ''}")


def _check_cards(seen: values.Node, host: HostFacts, table: Slurm) -> Iterator[Finding]:
    """What gres.conf says against what NVIDIA's driver has."""
    there = Counter(table.gpu_type(card.model) for card in host.gpus)
    told = Counter({kind: count for kind, count in seen.gpus.items() if count})
    texts = {name: _describe(count) for name, count in (("gres", told), ("driver", there))}
    value = f"Slurm has {texts['gres']}, and the driver {texts['driver']}"
    if not there and told:
        yield warning(
            "gres",
            f"Slurm has {texts['gres']}; which cards are there nobody could tell",
            "`sudo make up` starts the agent that reads them; is NVIDIA's driver there?",
        )
    elif told.total() != there.total():
        yield failed("gres", value, "gres.conf needs a line for each card, and slurm.conf the same number in Gres=")
    elif told.keys() == {""}:
        types = ", ".join(f"Type={kind}" for kind in there)
        yield warning("gres", f"{value}: without types no model can be asked for", f"set {types} in gres.conf")
    elif told != there:
        yield failed(
            "gres",
            value,
            "give each card its Type in gres.conf, or say what Slurm calls a model with slurm.gpu_types",
        )
    else:
        yield ok("gres", f"as the driver has them: {texts['gres']}")
    kinds = [table.gpu_type(card.model) for card in host.gpus]
    blocks = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    if len(blocks) != len(set(blocks)):
        yield warning(
            "gres",
            f"cards of one type do not stand in a row: {', '.join(kinds)}",
            "Slurm counts them type by type: check that each line's File= is a card of its Type=",
        )


def _describe(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {kind or 'GPU without a type'}" for kind, count in sorted(counts.items())) or "none"


def _check_devices(host: HostFacts) -> Finding:
    if host.slurm_devices == "yes":
        return ok("devices", "ConstrainDevices is on: plain jobs are kept to their GPUs, as containers are by Docker")
    told = "ConstrainDevices is off" if host.slurm_devices == "no" else "no cgroup.conf says ConstrainDevices"
    return warning(
        "devices",
        f"{told}: containers are kept to their GPUs by Docker, plain jobs by nothing",
        "set ConstrainDevices=yes in cgroup.conf and TaskPlugin=task/cgroup in slurm.conf",
    )


def _check_epilog(host: HostFacts, epilog: str) -> Iterator[Finding]:
    found = {
        "other": (warning, f"{epilog} does not name gpuhub", "call gpuhub's Epilog from it"),
        "refused": (failed, f"{epilog} cannot be run", "chmod 755, and chown root"),
        "missing": (failed, f"{epilog} is not there", f"install it: see {_EPILOG}"),
    }
    if host.epilog == "ok":
        yield ok("epilog", epilog)
    elif host.epilog in found:
        say, value, advice = found[host.epilog]
        yield say("epilog", value, advice)
    else:
        yield warning("epilog", f"{epilog} was not looked at", "see that it calls gpuhub's there")


def _check_users(host: HostFacts, numbers: Mapping[str, int]) -> Iterator[Finding]:
    apart = [
        f"{name} ({number} here, {host.accounts[name]} there)"
        for name, number in sorted(numbers.items())
        if host.accounts.get(name, number) != number
    ]
    if apart:
        yield failed(
            "users",
            f"other numbers there: {', '.join(apart)}",
            "give both the same number, by LDAP say: Slurm would run their jobs as somebody else",
        )
    missing = [f"{name} ({number})" for name, number in sorted(numbers.items()) if name not in host.accounts]
    if missing:
        yield warning(
            "users",
            f"no account there: {', '.join(missing)}",
            "Slurm starts no job of somebody whom the node does not know: give them an account with that number",
        )
    if numbers and not apart and not missing:
        yield ok("users", f"the same numbers: {', '.join(sorted(numbers))}")
