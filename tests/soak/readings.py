"""What the product's processes, stores and logs use at one moment, from /proc, the file system and the daemons."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import docker

from gpuhub.common import names
from gpuhub.common.paths import Paths
from gpuhub.ops.deploy.programs import BROKER, HUB, PROXY, Supervisor
from gpuhub_closet import docker_daemons
from gpuhub_closet.paths import node_paths
from gpuhub_closet.topology import ClosetPlan
from tests.soak.verdict import Sample

#: Every agent's command line contains this text of its script.
_AGENT = b"GPU agent"
_DAEMONS = frozenset({"dockerd", "containerd"})
_MIB = float(1 << 20)


def take_sample(paths: Paths, plan: ClosetPlan, at_s: float) -> Sample:
    """Return what everything uses now."""
    supervisor = Supervisor(paths)
    groups = {name: [supervisor.pid(name)] for name in (HUB, BROKER, PROXY)}
    groups["supervisord"] = [int((paths.run / "supervisord.pid").read_text())]
    nodes, count = _group_node_processes(plan)
    groups |= nodes
    values = {
        f"{name}.{kind}": value for name, pids in groups.items() for kind, value in measure_processes(pids).items()
    }
    values["nodes.processes"] = count
    for store in ("broker.sqlite", "jupyterhub.sqlite"):
        values[f"{store.partition('.')[0]}_store.database_mib"] = _sum_sizes(paths.state.glob(f"{store}*"))
    values["all.log_mib"] = _sum_sizes(file for file in paths.log.rglob("*") if file.is_file())
    values |= _count_objects(paths, plan)
    return Sample(at_s, values, {name: tuple(sorted(pids)) for name, pids in groups.items()})


def measure_processes(pids: Iterable[int]) -> dict[str, float]:
    """Return the sums of proportional memory, open descriptors and threads."""
    sums = {"memory_mib": 0.0, "descriptors": 0.0, "threads": 0.0}
    for pid in pids:
        folder = Path("/proc", str(pid))
        sums["memory_mib"] += _read_field(folder / "smaps_rollup", "Pss:") / 1024
        sums["threads"] += _read_field(folder / "status", "Threads:")
        sums["descriptors"] += len(list((folder / "fd").iterdir()))
    return sums


def _read_field(file: Path, name: str) -> float:
    line = next(line for line in file.read_text().splitlines() if line.startswith(name))
    return float(line.split()[1])


def _group_node_processes(plan: ClosetPlan) -> tuple[dict[str, list[int]], int]:
    """Return the daemons and agents of all nodes by name, and the number of processes there."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    count = 0
    for node in plan.nodes:
        for pid, name in docker_daemons.find_processes(plan, node).items():
            count += 1
            if name in _DAEMONS:
                groups[name].append(pid)
            elif name.startswith("python") and _AGENT in Path(f"/proc/{pid}/cmdline").read_bytes():
                groups["agents"].append(pid)
    return dict(groups), count


def _sum_sizes(files: Iterable[Path]) -> float:
    return sum(file.stat().st_size for file in files) / _MIB


def _count_objects(paths: Paths, plan: ClosetPlan) -> dict[str, float]:
    """Return the number of containers, users' networks and volumes of the instance on all nodes."""
    counts = {"all.containers": 0.0, "all.networks": 0.0, "all.volumes": 0.0}
    own = f"{names.LABEL_INSTANCE}={paths.instance}"
    for node in plan.nodes:
        with closing(docker.APIClient(base_url=node_paths(paths, node).docker_url, version="auto", timeout=30)) as one:
            counts["all.containers"] += len(one.containers(all=True, filters={"label": [own]}))
            counts["all.networks"] += len(one.networks(filters={"label": [own, names.LABEL_OWNER]}))
            counts["all.volumes"] += len(one.volumes(filters={"label": [own]})["Volumes"] or ())
    return counts


def write_samples(file: Path, samples: list[Sample]) -> None:
    """Write all samples as JSON, so that a run that is broken off leaves its figures."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"at_s": round(one.at_s, 1), **{name: round(value, 2) for name, value in one.values.items()}} for one in samples
    ]
    file.write_text(json.dumps({"written": time.strftime("%Y-%m-%d %H:%M"), "samples": rows}, indent=1) + "\n")
