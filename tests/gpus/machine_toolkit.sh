#!/usr/bin/env bash
# Gives a machine with NVIDIA's driver, but without its container toolkit, a stand-in for it (device_runtime.py): as the
# default runtime of the machine's Docker, in its daemon.json, and with the hook without which Docker does not offer
# --gpus. Docker need not run. For `make test-gpu-closet`, whose node with the real GPUs uses what the machine has.
#   usage: machine_toolkit.sh    FOLDERS: folders that containers show read-only if their image has them, separated by colons
set -euo pipefail
[ ! -e /etc/docker/daemon.json ] || { echo "/etc/docker/daemon.json exists: add the runtime to it by hand" >&2; exit 1; }
here=$(cd "$(dirname "$0")" && pwd) target=/usr/local/lib/device-runtime hook=/usr/local/bin/nvidia-container-runtime-hook
mkdir -p "$target" /etc/docker
install -m 755 "$here/device_runtime.py" "$target/device-runtime"
python3 "$here/runtime_settings.py" "$target/runtime.json"
[ -e "$hook" ] || { printf '#!/bin/sh\nexit 0\n' >"$hook" && chmod 755 "$hook"; }
printf '{"runtimes": {"gpus": {"path": "%s"}}, "default-runtime": "gpus"}\n' "$target/device-runtime" >/etc/docker/daemon.json
