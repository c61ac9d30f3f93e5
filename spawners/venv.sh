#!/usr/bin/env bash
# Makes .venv with the pinned Python packages and both distributions. Needs no root, and is quick when nothing is missing.
#   usage: venv.sh run|dev|torch     run: what gpuhub needs; dev adds the tools and tests; torch adds torch, for tests of launches
set -euo pipefail
mode=${1:?usage: $0 run|dev|torch}
here=$(cd "$(dirname "$0")/.." && pwd)

# A Python that can make the environment: $PYTHON, Debian's own, or the first on PATH.
suits() { "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
if [ ! -x "$here/.venv/bin/python" ]; then
  python=
  for candidate in ${PYTHON:+"$PYTHON"} /usr/bin/python3 python3; do
    if suits "$candidate"; then python=$candidate; break; fi
  done
  if [ -z "$python" ]; then
    echo "Python 3.11 or newer with its venv module is needed (Debian 12 and Ubuntu 24.04 have it: apt-get install python3-venv)." >&2
    echo "Set PYTHON to use another interpreter: make dev PYTHON=/path/to/python3.12" >&2
    exit 1
  fi
  "$python" -m venv "$here/.venv"
fi
if [ ! -w "$here/.venv" ]; then
  echo "$here/.venv belongs to $(stat -c %U "$here/.venv"), not to $(id -un). Run: sudo chown -R $(id -un) '$here/.venv'" >&2
  exit 1
fi

. "$here/spawners/stamps.sh"
pip=("$here/.venv/bin/python" -m pip install --quiet --disable-pip-version-check)
# Only files that a lock has the hash of, and no source distributions, whose build would run code as this user.
locked=(--require-hashes --only-binary :all:)

sum=$(cat "$here"/spawners/requirements.lock "$here"/*/pyproject.toml "$here/spawners/venv.sh" | sha256sum)
if changed run "$sum"; then
  echo "Installing Python packages …"
  # Each lock has all that its packages need, but what `lock.sh` leaves out.
  "${pip[@]}" "${locked[@]}" --no-deps -r "$here/spawners/requirements.lock"
  # With the locked setuptools: an isolated build would download one that no lock names.
  "${pip[@]}" --no-deps --no-build-isolation -e "$here/spawners" -e "$here/extensions"
  stamp run "$sum"
fi
[ "$mode" != run ] || exit 0

sum=$(sha256sum <"$here/tests/requirements.lock")
if changed dev "$sum"; then
  echo "Installing Python packages for tests and checks …"
  # Without torch, on which peft depends: it follows below.
  "${pip[@]}" "${locked[@]}" --no-deps -r "$here/tests/requirements.lock"
  stamp dev "$sum"
fi
[ "$mode" != dev ] || exit 0

# Tests of launches run torchrun on this machine: the build that pip finds, in the version of the images.
torch=$("$here/.venv/bin/python" -c 'from gpuhub.config.containers.images import ImageSettings; print(ImageSettings().torch)')
if changed torch "$torch"; then
  echo "Installing torch $torch …"
  "${pip[@]}" --only-binary :all: "torch==$torch"
  stamp torch "$torch"
fi
