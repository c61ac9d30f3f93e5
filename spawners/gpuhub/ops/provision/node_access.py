"""Access to a node while it is added or removed: its address, its Docker daemon, gpuhub's key, and mutual TLS.

For mutual TLS each node has its own authority, whose key is dropped at once: nothing is ever signed again, and new
certificates come with a new authority. An attacker on a node gets a key that opens no other node, and the head node
stores nothing that could make one.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import shutil
import socket
import ssl
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from gpuhub.common.errors import GpuhubError, SetupError
from gpuhub.common.files import replace_file
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings, DockerTlsFiles, NodeSettings
from gpuhub.docker import ssh
from gpuhub.docker.client import DockerClients
from gpuhub.docker.ssh import HostKey, SshFiles, format_known_hosts, host_alias
from gpuhub.ops.console import OperatorConsole
from gpuhub.ops.doctor.node_facts import DockerFacts, GpuFacts, HostFacts
from gpuhub.ops.doctor.nodes import node_queries
from gpuhub.ops.provision.ssh_session import SshSession
from gpuhub.tls.authority import (
    RENEW_BEFORE,
    create_authority,
    encode_certificate,
    is_permitted,
    issue_certificate,
    utc_now,
)

#: Maximum wait for an answer of the daemon, seconds.
_ANSWER_S = 5.0
#: The port on which a daemon accepts TLS connections.
DOCKER_TLS_PORT = 2376
#: The folder of certificates on the node, which only root can read.
TLS_FOLDER = "/etc/gpuhub/docker"
DROP_IN = "/etc/systemd/system/docker.service.d/gpuhub.conf"
_TLS_FLAG = "--tlsverify"
_PUT_FILE = """\
umask 077
mkdir -p {folder}
cat >{folder}/{name} <<'gpuhub-end'
{content}gpuhub-end
chmod 600 {folder}/{name}
"""
_PUT_DROP_IN = """\
mkdir -p /etc/systemd/system/docker.service.d
cat >{drop_in} <<'gpuhub-end'
{content}gpuhub-end
chmod 644 {drop_in}
systemctl daemon-reload
"""
RESTART_DOCKER_SCRIPT = f"""\
set -eu
if ! systemctl restart docker.service; then
    rm -f {DROP_IN}
    systemctl daemon-reload
    systemctl restart docker.service || :
    echo "Docker does not start with these options, and was started as before: see journalctl -u docker" >&2
    exit 1
fi
"""
REMOVE_TLS_SCRIPT = f"""\
set -eu
rm -rf {TLS_FOLDER}
if [ -e {DROP_IN} ]; then
    rm -f {DROP_IN}
    systemctl daemon-reload
    systemctl restart docker.service
fi
"""
#: Long, because no browser sees these certificates and a machine may run for years without maintenance.
CERTIFICATE_LIFETIME = timedelta(days=3 * 365)


def find_address(host: str) -> str:
    """Return the machine's address, IPv4 if it has both.

    Raises:
        SetupError: The name cannot be resolved.
    """
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SetupError(
            f"the address of {host} cannot be found: {error.strerror or error}; give it with --address"
        ) from None
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in entries]
    return str(min(addresses, key=lambda address: address.version))


async def query_docker(socket_path: Path, node: NodeSettings, paths: Paths) -> DockerFacts:
    """Return the facts of the daemon behind a socket."""
    local = NodeSettings(name=node.name, address=node.address, docker=f"unix://{socket_path}")
    daemons = DockerClients((local,), instance=paths.instance, run_dir=paths.run)
    try:
        return await node_queries.read_docker_facts(daemons, local.name)
    finally:
        daemons.close()


async def query_other_nodes(
    cluster: ClusterSettings, paths: Paths, name: str
) -> tuple[dict[str, tuple[GpuFacts, ...]], dict[str, str], dict[str, str] | None]:
    """Return the GPUs of the other nodes by node, the ids of their Docker daemons, and the members of the Swarm."""
    others = [node for node in cluster.own_nodes if node.name != name]
    daemons = DockerClients(others, instance=paths.instance, run_dir=paths.run)
    try:
        node_gpus = await asyncio.gather(*(node_queries.read_gpus(daemons, node.name) for node in others))
        gpus = dict(zip((node.name for node in others), node_gpus, strict=True))
        daemon_ids = await node_queries.read_daemon_ids(daemons, [node.name for node in others])
        known = cluster.model_copy(update={"nodes": tuple(others)})
        members = await node_queries.read_swarm_members(daemons, known) if others and cluster.has_overlay else None
    finally:
        daemons.close()
    return gpus, daemon_ids, members


def authorize_key(session: SshSession, files: SshFiles, instance: str, name: str, host_keys: list[HostKey]) -> None:
    """Authorize gpuhub's key on the node, and store the node's host keys."""
    public = ssh.ensure_key(files, instance)
    session.run(ssh.AUTHORIZED_KEYS_SCRIPT, ssh.build_script_arguments(public, is_authorized=True))
    store_host_keys(files, name, host_keys)


def store_host_keys(files: SshFiles, name: str, host_keys: list[HostKey]) -> None:
    """Store the host keys that the administrator compared."""
    files.folder.mkdir(mode=0o700, exist_ok=True)
    files.known_hosts(name).write_text(format_known_hosts(host_alias(name), host_keys), encoding="ascii")


def revoke_key(session: SshSession, files: SshFiles) -> None:
    """Remove gpuhub's key from the node's authorized keys."""
    if files.public_key.exists():
        public = files.public_key.read_text(encoding="ascii").strip()
        session.run(ssh.AUTHORIZED_KEYS_SCRIPT, ssh.build_script_arguments(public, is_authorized=False))


async def verify_docker(node: NodeSettings, paths: Paths) -> str:
    """Return the version of the node's Docker, reached as hub and broker do.

    Raises:
        SetupError: It does not answer, or accepts clients without a certificate.
    """
    daemons = DockerClients((node,), instance=paths.instance, run_dir=paths.run)
    try:
        version = (await daemons.call(node.name, "version"))["Version"]
    except GpuhubError as error:
        raise SetupError(f"Docker does not answer hub and broker at {node.docker}: {error}") from None
    finally:
        daemons.close()
    if node.tls is not None and accepts_any_client(node.address, node.tls.ca):
        raise SetupError(
            f"the Docker daemon at {node.docker} accepts every client, which makes everyone on the network root there: "
            "it must be started with --tlsverify"
        )
    return str(version)


def accepts_any_client(address: str, authority: Path) -> bool:
    """Return whether the daemon answers a client without a certificate."""
    context = ssl.create_default_context(cafile=str(authority))
    try:
        with (
            socket.create_connection((address, DOCKER_TLS_PORT), _ANSWER_S) as plain,
            context.wrap_socket(plain, server_hostname=address) as secure,
        ):
            secure.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            # With TLS 1.3 a refusal comes with the first response only.
            return secure.recv(64).startswith(b"HTTP/")
    except OSError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsSetupRequest:
    """The machine that gets certificates."""

    node: NodeSettings
    host: HostFacts
    #: Its containers outlive a restart of its daemon.
    live_restore: bool
    #: The administrator is not asked.
    skip_confirmation: bool

    @property
    def needs_sudo(self) -> bool:
        """The administrator logs in as another user than root."""
        return self.host.sudo != "root"


def set_up_tls(session: SshSession, request: TlsSetupRequest, paths: Paths, console: OperatorConsole) -> None:
    """Let the daemon accept TLS connections from gpuhub only; valid certificates are kept.

    Raises:
        SetupError: It does not; the text has the options to set where systemd does not start it.
    """
    node, files = request.node, find_client_files(paths, request.node.name)
    has_certificates = are_certificates_valid(files, node.address, utc_now(), margin=RENEW_BEFORE)
    version = _find_version(node, paths) if has_certificates else None
    if version is None:
        drop_in = _confirm_restart(request, console)
        if not has_certificates:
            certificates = make_certificates(node.name, node.address, utc_now())
            session.run(build_files_script(certificates), as_root=request.needs_sudo)
            store_certificates(files, certificates)
            console.write(f"  ✓ certificates made: the node's in {TLS_FOLDER} there, ours in {files.key.parent}")
        if drop_in is None:
            raise SetupError(f"systemd does not run Docker there: {describe_manual_setup(node.address)}")
        session.run(build_drop_in_script(drop_in), as_root=request.needs_sudo)
        session.run(RESTART_DOCKER_SCRIPT, as_root=request.needs_sudo)
        try:
            version = asyncio.run(verify_docker(node, paths))
        except SetupError as error:
            raise SetupError(f"{error}\n{describe_manual_setup(node.address)}") from None
    console.write(f"  ✓ Docker {version} answers over TLS, only to gpuhub's certificate")


def _find_version(node: NodeSettings, paths: Paths) -> str | None:
    """Return the version of a daemon that accepts the certificates; None if it does not use them yet."""
    try:
        return asyncio.run(verify_docker(node, paths))
    except SetupError:
        return None


def _confirm_restart(request: TlsSetupRequest, console: OperatorConsole) -> str | None:
    """Return the text with which systemd starts the daemon, once its restart was agreed to; None without systemd."""
    node, host = request.node, request.host
    if not host.systemd or not host.docker_start:
        return None
    text = build_drop_in(host.docker_start, node.address)
    console.write(f"\n{DROP_IN} on {node.name}:\n\n{text}")
    if not request.skip_confirmation:
        outcome = "run on" if request.live_restore else "stop"
        console.confirm(f"Write it and restart Docker there (its containers {outcome})?")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCertificates:
    """The certificates and keys of one node, as PEM."""

    authority: bytes
    server: bytes
    server_key: bytes
    client: bytes
    client_key: bytes


def make_certificates(
    node: str, address: str, now: datetime, life: timedelta = CERTIFICATE_LIFETIME
) -> NodeCertificates:
    """Make new certificates for a node at this address."""
    authority = create_authority([address, node], node, now)
    # Each is valid for one side only, so that a node's certificate opens no other daemon.
    server, server_key = issue_certificate(authority, [address, node], now, life=life)
    client, client_key = issue_certificate(authority, [node], now, life=life, purpose=ExtendedKeyUsageOID.CLIENT_AUTH)
    return NodeCertificates(
        authority=encode_certificate(authority.certificate),
        server=server,
        server_key=server_key,
        client=client,
        client_key=client_key,
    )


def find_client_files(paths: Paths, node: str) -> DockerTlsFiles:
    """Return the files of the head node's part: authority, certificate and key."""
    folder = paths.secrets / "docker" / node
    return DockerTlsFiles(ca=folder / "ca.pem", cert=folder / "cert.pem", key=folder / "key.pem")


def store_certificates(files: DockerTlsFiles, certificates: NodeCertificates) -> None:
    """Store the head node's part, readable by root only; earlier files are replaced."""
    for folder in (files.key.parent.parent, files.key.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
    for file, content in (
        (files.ca, certificates.authority),
        (files.cert, certificates.client),
        (files.key, certificates.client_key),
    ):
        replace_file(file, content)


def remove_certificates(files: DockerTlsFiles) -> None:
    """Remove the head node's part."""
    shutil.rmtree(files.key.parent, ignore_errors=True)


def are_certificates_valid(files: DockerTlsFiles, address: str, now: datetime, *, margin: timedelta) -> bool:
    """Return whether the head node's part exists and is valid for longer than the margin."""
    if not all(file.exists() for file in (files.ca, files.cert, files.key)):
        return False
    ends = [_read_certificate(file).not_valid_after_utc for file in (files.ca, files.cert)]
    return is_permitted(_read_certificate(files.ca), address) and min(ends) - now > margin


def _read_certificate(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def build_dockerd_flags(address: str) -> str:
    """Return dockerd's additional options."""
    host = f"[{address}]" if ":" in address else address
    return (
        f"-H tcp://{host}:{DOCKER_TLS_PORT} {_TLS_FLAG} --tlscacert={TLS_FOLDER}/ca.pem "
        f"--tlscert={TLS_FOLDER}/server.pem --tlskey={TLS_FOLDER}/server-key.pem"
    )


def build_files_script(certificates: NodeCertificates) -> str:
    """Return the script that installs the node's part: its certificate and key, and the authority of its clients."""
    files = {
        "ca.pem": certificates.authority,
        "server.pem": certificates.server,
        "server-key.pem": certificates.server_key,
    }
    parts = [
        _PUT_FILE.format(folder=TLS_FOLDER, name=name, content=content.decode()) for name, content in files.items()
    ]
    return "set -eu\n" + "".join(parts)


def build_drop_in(started: str, address: str) -> str:
    """Return systemd's drop-in: the daemon's current command with gpuhub's options, which replace earlier ones.

    Raises:
        SetupError: The command that systemd reports cannot be parsed.
    """
    # `{ path=/usr/bin/dockerd ; argv[]=/usr/bin/dockerd -H fd:// ; ignore_errors=no ; … }`
    match = re.search(r"argv\[\]=(.*?) ;", started)
    if match is None or "dockerd" not in match[1]:
        raise SetupError(
            f"systemd does not report how it starts Docker ({started or 'nothing'!r}): {describe_manual_setup(address)}"
        )
    command = re.sub(
        rf" -H tcp://\S+ {_TLS_FLAG} --tlscacert={TLS_FOLDER}/\S+ --tlscert=\S+ --tlskey=\S+", "", match[1]
    )
    flags = build_dockerd_flags(address)
    return f"# Written by `gpuhub node add --tls`.\n[Service]\nExecStart=\nExecStart={command} {flags}\n"


def build_drop_in_script(text: str) -> str:
    """Return the script that installs the drop-in; it takes effect at the daemon's next start."""
    return "set -eu\n" + _PUT_DROP_IN.format(drop_in=DROP_IN, content=text)


def describe_manual_setup(address: str) -> str:
    """Return what the administrator must do where systemd does not run Docker."""
    return f"start dockerd there with these additional options, then add the node again: {build_dockerd_flags(address)}"
