"""`gpuhub node add|remove|firewall` and `gpuhub doctor` on the command line."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from gpuhub import settings
from gpuhub.admin.commands import Console
from gpuhub.errors import GpuhubError, NotFound
from gpuhub.nodes.adding import adding, removing
from gpuhub.nodes.adding.firewall import describe_firewall
from gpuhub.nodes.adding.planning import Wish
from gpuhub.nodes.adding.target import parse_target
from gpuhub.nodes.doctor.examining import examine
from gpuhub.nodes.doctor.findings import as_json, format_findings, has_failed
from gpuhub.paths import Paths
from gpuhub.settings import Cluster


def run(options: argparse.Namespace, paths: Paths, console: Console, bring_up: Callable[[], None]) -> None:
    """Do what `options.action` names; `bring_up` is `gpuhub up`.

    Raises:
        GpuhubError: with what to do.
    """
    _ACTIONS[options.action](options, paths, console, bring_up)


def _add(options: argparse.Namespace, paths: Paths, console: Console, bring_up: Callable[[], None]) -> None:
    wish = Wish(
        target=parse_target(options.url),
        cluster_file=options.cluster_file,
        name=options.name,
        address=options.address,
        tls=options.tls,
        yes=options.yes,
        dry_run=options.dry_run,
    )
    adding.add(wish, paths, console, bring_up if options.up else None)


def _remove(options: argparse.Namespace, paths: Paths, console: Console, bring_up: Callable[[], None]) -> None:
    wish = removing.Farewell(
        name=options.name,
        cluster_file=options.cluster_file,
        force=options.force,
        yes=options.yes,
        target=None if options.ssh is None else parse_target(options.ssh),
    )
    removing.remove(wish, paths, console, bring_up)


def _firewall(options: argparse.Namespace, paths: Paths, console: Console, _: Callable[[], None]) -> None:
    cluster = _cluster(options.cluster_file, paths)
    try:
        node = cluster.node(options.name)
    except KeyError:
        known = ", ".join(each.name for each in cluster.nodes)
        raise NotFound(f"there is no node {options.name!r}; there are {known}") from None
    console.say(describe_firewall(cluster, node, paths))


def _doctor(options: argparse.Namespace, paths: Paths, console: Console, _: Callable[[], None]) -> None:
    machines = asyncio.run(examine(_cluster(options.cluster_file, paths), paths, options.names))
    if options.json:
        console.say(json.dumps(as_json(machines), indent=2, ensure_ascii=False))
    else:
        for name, findings in machines:
            console.say(f"{name}\n{format_findings(findings, console.width)}\n")
    ill = [name for name, findings in machines if has_failed(findings)]
    if ill:
        raise GpuhubError(f"something failed on {', '.join(ill)}")


def _cluster(file: Path, paths: Paths) -> Cluster:
    """The settings of this folder; without any, those that the services run with."""
    return settings.load(file if file.exists() or not paths.used_cluster_file.exists() else paths.used_cluster_file)


_ACTIONS: dict[str, Callable[[argparse.Namespace, Paths, Console, Callable[[], None]], None]] = {
    "node-add": _add,
    "node-remove": _remove,
    "node-firewall": _firewall,
    "doctor": _doctor,
}
