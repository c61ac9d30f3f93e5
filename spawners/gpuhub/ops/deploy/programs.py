"""The services that supervisord runs on the head node, with their command lines."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.ops.deploy.supervisor import Program
from gpuhub.tls.internal import CertificateFiles, CertificateStore

PROXY = "proxy"
BROKER = "broker"
HUB = "hub"
_PROXY = "configurable-http-proxy"


def build_programs(paths: Paths, cluster_file: Path, hub_config: Path) -> list[Program]:
    """Return proxy, broker and hub in the order of their start; each reads its secrets from files."""
    gpuhub = _gpuhub()
    options = ("--instance", paths.instance, "--cluster-file", str(cluster_file))
    commands = {
        PROXY: (gpuhub, "proxy", *options),
        BROKER: (gpuhub, "broker", *options),
        HUB: (sys.executable, "-m", "gpuhub.ops.deploy.hub_process", "-f", str(hub_config)),
    }
    environment = {"GPUHUB_INSTANCE": paths.instance, "GPUHUB_CLUSTER_FILE": str(cluster_file)}
    return [
        Program(name=name, command=command, directory=paths.state, environment=environment, priority=100 * number)
        for number, (name, command) in enumerate(commands.items(), start=1)
    ]


def _gpuhub() -> str:
    return str(Path(sys.executable).with_name("gpuhub"))


def find_proxy() -> str:
    """Return JupyterHub's proxy: the one on PATH, or the one that `spawners/setup.sh` installs.

    Raises:
        SetupError: It is in neither place.
    """
    installed = Path(__file__).parents[3] / "proxy" / "node_modules" / ".bin" / _PROXY
    program = shutil.which(_PROXY) or shutil.which(str(installed))
    if program is None:
        raise SetupError(f"{_PROXY} is not installed: `spawners/setup.sh run` installs it")
    return program


def build_proxy_command(
    program: str,
    *,
    public: tuple[str, int],
    api_port: int,
    hub_url: str,
    internal: CertificateStore | None,
    https: CertificateFiles | None = None,
    has_subdomains: bool = False,
) -> list[str]:
    """Return the proxy's command line; it reads its token from the environment, CONFIGPROXY_AUTH_TOKEN.

    Args:
        hub_url: The hub's origin.
        internal: Certificates for the connections to hub, broker and notebooks; None for no TLS.
        https: The certificate for browsers; None for no TLS.
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


def build_proxy_environment(
    https: CertificateFiles | None, paths: Paths, cluster_file: Path, *, is_ours: bool
) -> dict[str, str]:
    """Return Node's environment: nothing older than TLS 1.2, and, with HTTPS, reloads of a renewed certificate.

    Args:
        is_ours: The certificate is gpuhub's own: the proxy has it renewed.
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
