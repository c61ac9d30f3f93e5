"""JupyterHub's proxy, configurable-http-proxy: its program, its command with the certificates, and its environment."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.ops.deploy.programs import find_gpuhub
from gpuhub.tls.internal_certificates import CertificateFiles, CertificateStore

_PROXY_COMMAND = "configurable-http-proxy"


def find_proxy() -> str:
    """Return JupyterHub's proxy: the one on PATH, or the one that `spawners/setup.sh` installs.

    Raises:
        SetupError: It is in neither place.
    """
    installed = Path(__file__).parents[3] / "proxy" / "node_modules" / ".bin" / _PROXY_COMMAND
    program = shutil.which(_PROXY_COMMAND) or shutil.which(str(installed))
    if program is None:
        raise SetupError(f"{_PROXY_COMMAND} is not installed: `spawners/setup.sh run` installs it")
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
    """Return Node's environment: limits, nothing older than TLS 1.2, and, with HTTPS, reloads of a renewed certificate.

    Args:
        is_ours: The certificate is gpuhub's own: the proxy has it renewed.
    """
    options = f'--tls-min-v1.2 --require "{Path(__file__).with_name("limits.cjs")}"'
    if https is None:
        return {"NODE_OPTIONS": options}
    hook = Path(__file__).with_name("certificate.cjs")
    renew = [find_gpuhub(), "certificate", "--instance", paths.instance, "--cluster-file", str(cluster_file)]
    return {
        "NODE_OPTIONS": f'{options} --require "{hook}"',
        "GPUHUB_HTTPS_CERTIFICATE": str(https.certificate),
        "GPUHUB_HTTPS_KEY": str(https.key),
        "GPUHUB_HTTPS_RENEW": json.dumps(renew) if is_ours else "",
    }
