"""How a node's Docker daemon is told to ask for certificates: text for the node. Pure."""

from __future__ import annotations

import re

from gpuhub.errors import SetupError
from gpuhub.nodes.adding.certificates import NodeCertificates

PORT = 2376
#: On the node; root's alone.
FOLDER = "/etc/gpuhub/docker"
DROP_IN = "/etc/systemd/system/docker.service.d/gpuhub.conf"
_MARK = "--tlsverify"

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
RESTART = f"""\
set -eu
if ! systemctl restart docker.service; then
    rm -f {DROP_IN}
    systemctl daemon-reload
    systemctl restart docker.service || :
    echo "Docker does not start with these options, and was started as before: see journalctl -u docker" >&2
    exit 1
fi
"""
REMOVE = f"""\
set -eu
rm -rf {FOLDER}
if [ -e {DROP_IN} ]; then
    rm -f {DROP_IN}
    systemctl daemon-reload
    systemctl restart docker.service
fi
"""


def flags(address: str) -> str:
    """What dockerd is started with besides."""
    host = f"[{address}]" if ":" in address else address
    return (
        f"-H tcp://{host}:{PORT} {_MARK} --tlscacert={FOLDER}/ca.pem "
        f"--tlscert={FOLDER}/server.pem --tlskey={FOLDER}/server-key.pem"
    )


def build_files_script(made: NodeCertificates) -> str:
    """Puts the node's part there: what the daemon shows, and the authority of those it lets in."""
    files = {"ca.pem": made.authority, "server.pem": made.server, "server-key.pem": made.server_key}
    parts = [_PUT_FILE.format(folder=FOLDER, name=name, content=content.decode()) for name, content in files.items()]
    return "set -eu\n" + "".join(parts)


def build_drop_in(started: str, address: str) -> str:
    """systemd's drop-in: the daemon as it is started now, with our flags; earlier ones of ours are replaced.

    Raises:
        SetupError: what systemd says of the service is not understood.
    """
    # `{ path=/usr/bin/dockerd ; argv[]=/usr/bin/dockerd -H fd:// ; ignore_errors=no ; … }`
    found = re.search(r"argv\[\]=(.*?) ;", started)
    if found is None or "dockerd" not in found[1]:
        raise SetupError(f"systemd does not say how it starts Docker ({started or 'nothing'!r}): {by_hand(address)}")
    command = re.sub(rf" -H tcp://\S+ {_MARK} --tlscacert={FOLDER}/\S+ --tlscert=\S+ --tlskey=\S+", "", found[1])
    return f"# Written by `gpuhub node add --tls`.\n[Service]\nExecStart=\nExecStart={command} {flags(address)}\n"


def build_drop_in_script(text: str) -> str:
    """Puts the drop-in there; it counts from the daemon's next start on."""
    return "set -eu\n" + _PUT_DROP_IN.format(drop_in=DROP_IN, content=text)


def by_hand(address: str) -> str:
    """What to set where systemd does not run Docker."""
    return f"start dockerd there with these options besides its own, then add the node again: {flags(address)}"
