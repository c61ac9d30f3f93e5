"""What supervisord runs on the head node."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from gpuhub.errors import SetupError
from gpuhub.head.supervisor import Program
from gpuhub.paths import Paths
from gpuhub.trust.internal import Pair, Store

PROXY = "proxy"
BROKER = "broker"
HUB = "hub"
_PROXY = "configurable-http-proxy"


def build_programs(paths: Paths, cluster_file: Path, hub_config: Path) -> list[Program]:
    """Proxy, broker and hub, in the order of their start; each reads its secrets from files."""
    gpuhub = _gpuhub()
    options = ("--instance", paths.instance, "--cluster-file", str(cluster_file))
    commands = {
        PROXY: (gpuhub, "proxy", *options),
        BROKER: (gpuhub, "broker", *options),
        HUB: (sys.executable, "-m", "gpuhub.head.hub", "-f", str(hub_config)),
    }
    environment = {"GPUHUB_INSTANCE": paths.instance, "GPUHUB_CLUSTER_FILE": str(cluster_file)}
    return [
        Program(name=name, command=command, directory=paths.state, environment=environment, priority=100 * number)
        for number, (name, command) in enumerate(commands.items(), start=1)
    ]


def build_closet_programs(paths: Paths, nodes: Sequence[str]) -> list[Program]:
    """The practice closet's Docker daemons; they stop after everything that uses them."""
    return [
        Program(
            name=node,
            command=(_gpuhub(), "closet-node", "--instance", paths.instance, node),
            directory=paths.state,
            priority=50,
            stop_wait_s=30,
        )
        for node in nodes
    ]


def build_slurm_programs(paths: Paths, conf: Path, nodes: Sequence[str], *, has_rest: bool = False) -> list[Program]:
    """The practice closet's Slurm in the order of its start: munged, slurmctld, and a slurmd for each node."""
    wanted = {"munged": "munged", "slurmctld": "slurmctld", **{f"slurmd-{node}": node for node in nodes}}
    if has_rest:
        wanted["slurmrestd"] = "slurmrestd"
    return [
        Program(
            name=name,
            command=(_gpuhub(), "closet-slurm", "--instance", paths.instance, program),
            directory=paths.state,
            environment={"SLURM_CONF": str(conf)},
            # Before the Docker daemons end, and munged last.
            priority=60 + number,
        )
        for number, (name, program) in enumerate(wanted.items())
    ]


def _gpuhub() -> str:
    return str(Path(sys.executable).with_name("gpuhub"))


def find_proxy() -> str:
    """JupyterHub's proxy: on PATH, or where `spawners/setup.sh` installs it.

    Raises:
        SetupError: it is in neither place.
    """
    own = Path(__file__).parents[2] / "proxy" / "node_modules" / ".bin" / _PROXY
    found = shutil.which(_PROXY) or shutil.which(str(own))
    if found is None:
        raise SetupError(f"{_PROXY} is not installed: `spawners/setup.sh run` installs it")
    return found


def build_proxy_command(
    program: str,
    *,
    public: tuple[str, int],
    api_port: int,
    hub_url: str,
    internal: Store | None,
    https: Pair | None = None,
    has_subdomains: bool = False,
) -> list[str]:
    """The proxy's argument list; its token goes through the environment, CONFIGPROXY_AUTH_TOKEN.

    `hub_url` is the hub's origin; with `internal`, hub, broker and notebooks are reached with these certificates; with
    `https`, browsers reach the proxy with that one.
    """
    return [
        program,
        "--ip", public[0],
        "--port", str(public[1]),
        "--api-ip", "127.0.0.1",
        "--api-port", str(api_port),
        "--default-target", f"{hub_url}/",
        "--error-target", f"{hub_url}/hub/error",
        "--log-level", "warn",
        *([] if internal is None else internal.proxy_flags()),
        *([] if https is None else ["--ssl-key", str(https.key), "--ssl-cert", str(https.certificate)]),
        *(["--host-routing"] if has_subdomains else []),
    ]  # fmt: skip


def build_proxy_environment(https: Pair | None, paths: Paths, cluster_file: Path, *, is_ours: bool) -> dict[str, str]:
    """What Node is told: nothing older than TLS 1.2, and, with HTTPS, to take up a certificate that is renewed.

    `is_ours`: the certificate is gpuhub's own, and the proxy has it looked after.
    """
    if https is None:
        return {"NODE_OPTIONS": "--tls-min-v1.2"}
    hook = Path(__file__).with_name("certificate.cjs")
    renew = [_gpuhub(), "certificate", "--instance", paths.instance, "--cluster-file", str(cluster_file)]
    return {
        "NODE_OPTIONS": f'--tls-min-v1.2 --require "{hook}"',
        "GPUHUB_HTTPS_CERTIFICATE": str(https.certificate),
        "GPUHUB_HTTPS_KEY": str(https.key),
        "GPUHUB_HTTPS_RENEW": json.dumps(renew) if is_ours else "",
    }
