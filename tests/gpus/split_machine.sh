#!/usr/bin/env bash
# Splits one machine with real GPUs into Docker nodes, each with its own network namespace, address (10.78.0.11, .12, …,
# the machine itself being 10.78.0.1), daemon and GPUs. Needs root, and a driver; NVIDIA's container toolkit is not used
# (device_runtime.py). Start it once on a machine: it is no restart script.
#   usage: split_machine.sh CLUSTER-FILE GPUS…    GPUS: for each node the indexes of its GPUs, such as 0,1
#   FOLDERS: folders that every container shows read-only if its image has them, separated by colons
#   MORE: a file that is put before the nodes in CLUSTER-FILE
set -euo pipefail
cluster=${1:?usage: $0 CLUSTER-FILE GPUS…}
shift
here=$(cd "$(dirname "$0")" && pwd)
ip link add br-gpus type bridge
ip addr add 10.78.0.1/24 dev br-gpus
ip link set br-gpus up
cat "${MORE:-/dev/null}" >"$cluster"
number=0
for gpus in "$@"; do
  number=$((number + 1))
  node=node$number address=10.78.0.$((10 + number)) run=/run/gpus/node$number
  mkdir -p "$run/bin" "$run/etc"
  ip netns add "$node"
  ip link add "gpus$number" type veth peer name eth0 netns "$node"
  ip link set "gpus$number" master br-gpus up
  ip -n "$node" addr add "$address/24" dev eth0
  ip -n "$node" link set eth0 up
  ip -n "$node" link set lo up
  ip -n "$node" route add default via 10.78.0.1
  cp "$here/device_runtime.py" "$run/bin/device-runtime"
  chmod 755 "$run/bin/device-runtime"
  # Docker offers --gpus only where NVIDIA's hook is on its path.
  printf '#!/bin/sh\nexit 0\n' >"$run/bin/nvidia-container-runtime-hook"
  chmod 755 "$run/bin/nvidia-container-runtime-hook"
  python3 "$here/runtime_settings.py" "$run/bin/runtime.json" "$gpus"
  # nsenter, not `ip netns exec`: the latter remounts /sys and hides the control groups. A daemon takes its identity from
  # /etc/docker, so each has its own.
  mkdir -p /etc/docker
  PATH=$run/bin:$PATH setsid nsenter --net="/run/netns/$node" unshare --mount sh -c '
    mount --bind "$0/etc" /etc/docker && exec dockerd --data-root "/var/lib/gpus/$1" --exec-root "$0/exec" --pidfile "$0/pid" \
      -H "unix://$0/docker.sock" --bip "172.2$2.0.1/24" --add-runtime "gpus=$0/bin/device-runtime" --default-runtime gpus' \
    "$run" "$node" "$number" </dev/null >"$run/log" 2>&1 &
  printf '\n[[nodes]]\nname = "%s"\naddress = "%s"\ndocker = "unix://%s/docker.sock"\n' "$node" "$address" "$run" >>"$cluster"
done
for number in $(seq "$number"); do
  for _ in $(seq 120); do grep -q 'API listen' "/run/gpus/node$number/log" && continue 2; sleep 0.5; done
  tail -5 "/run/gpus/node$number/log" >&2
  exit 1
done
