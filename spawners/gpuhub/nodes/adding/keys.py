"""gpuhub's own SSH key: made once, allowed on a node to reach Docker's socket there, and nothing else."""

from __future__ import annotations

import base64
import re
import socket
import subprocess

from gpuhub.containers.ssh import REMOTE_SOCKET, SshFiles
from gpuhub.errors import SetupError

#: What sshd lets this key do. `restrict` takes everything away, forwarding is given back, and `permitopen` then narrows
#: it to one place: a path in brackets with any port is what sshd compares a socket's path with. Without the brackets
#: it takes a path for a mistake, and any other `permitopen` shuts all sockets.
RESTRICTIONS = (
    f'restrict,port-forwarding,permitopen="[{REMOTE_SOCKET}]:*",permitlisten="localhost:1",command="/bin/false"'
)

# $1: the line for authorized_keys, in base64; `-`: none. $2: the key in it, by which its older lines are found.
# Sent as `sh -s` reads it: what changes from node to node are words without any meaning to a shell.
CHANGE_SCRIPT = """\
set -eu
umask 077
folder=$HOME/.ssh
file=$folder/authorized_keys
mkdir -p "$folder"
[ -e "$file" ] || : >"$file"
fresh=$(mktemp "$folder/authorized_keys.XXXXXX")
trap 'rm -f "$fresh"' EXIT
grep -vF -- "$2" "$file" >"$fresh" || [ $? -eq 1 ]
if [ "$1" != - ]; then
    # The last line of the file may lack its end.
    [ -z "$(tail -c 1 "$fresh")" ] || echo >>"$fresh"
    printf '%s' "$1" | base64 -d >>"$fresh"
fi
cmp -s "$fresh" "$file" || cat "$fresh" >"$file"
"""


def ensure_key(files: SshFiles, instance: str) -> str:
    """The public key's line, as `ssh-keygen` writes it; the pair is made when it is not there, in the secrets' folder.

    Raises:
        SetupError: ssh-keygen is missing, or fails.
    """
    files.folder.mkdir(mode=0o700, exist_ok=True)
    if not files.key.exists():
        name = re.sub(r"[^A-Za-z0-9.-]", "", socket.gethostname()) or "head"
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"{instance}@{name}", "-f", str(files.key)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise SetupError("ssh-keygen is missing: install openssh-client") from None
        except subprocess.CalledProcessError as error:
            raise SetupError(f"{files.key} cannot be made: {error.stderr.strip()}") from None
    files.key.chmod(0o600)
    return files.public_key.read_text(encoding="ascii").strip()


def build_words(public: str, *, wanted: bool) -> list[str]:
    """The words after `CHANGE_SCRIPT`, for letting the key in or taking it out. Pure."""
    line = base64.b64encode(f"{RESTRICTIONS} {public}\n".encode()).decode() if wanted else "-"
    return [line, public.split()[1]]
