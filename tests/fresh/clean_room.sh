#!/usr/bin/env bash
# Runs README's commands on a new machine: a minimal Debian with namespaces of its own, in which nothing is installed, and
# which knows no file, package or identity of this machine. It finds programs and packages that nothing installs.
#   usage (root): clean_room.sh SUITE [COMMAND …]     SUITE: bookworm (Debian 12) or trixie (Debian 13)
#   Without commands: `make up`, a notebook with a GPU over the hub's API, `make down`, `make up`, the notebook again,
#   the tests without a closet (lint, unit, contract), and `make down`. Each COMMAND is a line for a shell in the clone.
#
# The clean room is Debian's smallest system with mounts, processes, host name, IPC, control groups
# and network of its own; packets leave it through this machine by NAT. What a machine needs to reach its registries is
# passed with two variables, by default nothing:
#   GPUHUB_FRESH_CARRY="/etc/pip.conf /usr/local/share/ca-certificates"   files and folders, read-only at the same place
#   GPUHUB_FRESH_ENV="PIP_INDEX_URL https_proxy"                          names of environment variables
#   GPUHUB_FRESH_MIRROR=http://mirror.example/debian                      where packages come from; by default apt's own
#   GPUHUB_FRESH_FOLDER=/var/tmp/gpuhub-fresh                             10 GiB below it; kept for a look with KEEP=1
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)

# Inside of the namespaces, before the chroot: $1 is the root folder, further words are files to carry.
enter() {
  local root=$1 file line controllers path point
  shift
  hostname fresh
  mount --make-rprivate /
  # dockerd expects a mount point as the root of its file system.
  mount --bind "$root" "$root"
  mount -t proc proc "$root/proc"
  mount -t sysfs sysfs "$root/sys"
  mount -t tmpfs -o mode=755 run "$root/run"
  mount -t tmpfs tmp "$root/tmp"
  mount -t tmpfs -o mode=755 dev "$root/dev"
  mkdir "$root"/dev/{pts,shm,net}
  mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts "$root/dev/pts"
  mount -t tmpfs shm "$root/dev/shm"
  ln -s pts/ptmx "$root/dev/ptmx"
  ln -s /proc/self/fd "$root/dev/fd"
  ln -s fd/0 "$root/dev/stdin"
  ln -s fd/1 "$root/dev/stdout"
  ln -s fd/2 "$root/dev/stderr"
  for file in null zero full random urandom tty fuse net/tun; do
    if [ -e "/dev/$file" ]; then cp -a "/dev/$file" "$root/dev/$file"; fi
  done
  # The same control groups as this machine has; the namespace makes ours the root of each.
  mount -t tmpfs -o mode=755 cgroup "$root/sys/fs/cgroup"
  while IFS= read -r line; do
    IFS=: read -r _ controllers path <<<"$line"
    if [ -n "$controllers" ]; then
      point=$root/sys/fs/cgroup/${controllers#name=}
      mkdir -p "$point"
      mount -t cgroup -o "$controllers" cgroup "$point"
    elif [ -f /sys/fs/cgroup/cgroup.controllers ]; then
      mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
      # A group with processes cannot pass controllers on.
      mkdir "$root/sys/fs/cgroup/init"
      while read -r file; do echo "$file" >"$root/sys/fs/cgroup/init/cgroup.procs" || true; done <"$root/sys/fs/cgroup/cgroup.procs"
      sed 's/^/+/; s/ / +/g' "$root/sys/fs/cgroup/cgroup.controllers" >"$root/sys/fs/cgroup/cgroup.subtree_control"
    fi
  done </proc/self/cgroup
  for file in "$@"; do
    if [ -d "$file" ]; then mkdir -p "$root$file"; else mkdir -p "$root${file%/*}" && touch "$root$file"; fi
    mount --rbind "$file" "$root$file"
    mount -o remount,ro,bind "$root$file"
  done
  mkdir -p "$root/.old"
  cd "$root"
  pivot_root . .old
  umount -l /.old
  exec bash /root/run
}

if [ "${1:-}" = --enter ]; then shift && enter "$@"; fi

suite=${1:?usage: $0 bookworm|trixie [COMMAND …]}
shift
[ "$(id -u)" -eq 0 ] || { echo "This makes namespaces and needs root: run it with sudo." >&2; exit 1; }
for program in mmdebstrap unshare pivot_root ip iptables git; do
  command -v "$program" >/dev/null || { echo "$program is missing here: \`sudo make setup-dev\` installs what this needs." >&2; exit 1; }
done
[ $# -gt 0 ] || set -- \
  "make up" "python -m tests.fresh.main_job" "make down" "make up" "python -m tests.fresh.main_job" \
  "make setup-dev" "tests/run lint unit contract" "make down"

mirror=${GPUHUB_FRESH_MIRROR:-$(apt-get indextargets --format '$(SITE)' | head -n 1)}
folder=${GPUHUB_FRESH_FOLDER:-/var/tmp/gpuhub-fresh}
root=$folder/$suite-$$
# One at a time: the end of another one would take back the forwarding that this one needs.
exec 9>/run/lock/gpuhub-clean-room
flock 9
name=frsh$(($$ % 10000))
subnet=10.231.$(($$ % 250))
outside=$(ip -4 route show default | sed -n 's/.* dev \([^ ]*\).*/\1/p;q')
forwarding=$(cat "/proc/sys/net/ipv4/conf/$outside/forwarding")
groups=()

clean_up() {
  iptables -w -t nat -D POSTROUTING -s "$subnet.0/30" -j MASQUERADE 2>/dev/null || true
  iptables -w -D FORWARD -s "$subnet.0/30" -j ACCEPT 2>/dev/null || true
  iptables -w -D FORWARD -d "$subnet.0/30" -j ACCEPT 2>/dev/null || true
  echo "$forwarding" >"/proc/sys/net/ipv4/conf/$outside/forwarding"
  ip netns del "$name" 2>/dev/null || true
  local group
  for group in "${groups[@]}"; do find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true; done
  [ -n "${KEEP:-}" ] || rm -rf --one-file-system "$root"
}
trap clean_up EXIT

echo "── a minimal $suite in $root"
mkdir -p "$root"
mmdebstrap --quiet --variant=minbase "$suite" "$root" "$mirror" 2>"$folder/$suite.log" || { tail "$folder/$suite.log"; exit 1; }
# What a person has who can type README's commands: a clone and make.
{
  echo "deb $mirror $suite main"
  echo "deb $mirror $suite-updates main"
} >"$root/etc/apt/sources.list"
mkdir -p "$root/root/gpuhub"
git -C "$here" archive HEAD | tar -x -C "$root/root/gpuhub"
cp /etc/resolv.conf "$root/etc/resolv.conf"
printf '127.0.0.1 localhost\n127.0.1.1 fresh\n' >"$root/etc/hosts"
echo fresh >"$root/etc/hostname"
{
  echo 'set -eu'
  echo "export PATH=/root/gpuhub/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8"
  for variable in ${GPUHUB_FRESH_ENV:-}; do
    [ -z "${!variable+set}" ] || printf 'export %s=%q\n' "$variable" "${!variable}"
  done
  echo 'apt-get update -qq && apt-get install -y -qq --no-install-recommends make git ca-certificates >/dev/null 2>/root/apt.log || { cat /root/apt.log; exit 1; }'
  echo 'cd /root/gpuhub; git init -q; git add -A; git -c user.name=fresh -c user.email=fresh@localhost commit -qm clone'
  for command in "$@"; do
    printf 'echo; echo "── %s ($SECONDS s)"\n%s\n' "${command//\"/\\\"}" "$command"
  done
  echo 'echo; echo "── passed ($SECONDS s)"'
} >"$root/root/run"

ip netns add "$name"
ip link add "$name" type veth peer name eth0 netns "$name"
ip address add "$subnet.1/30" dev "$name"
ip link set "$name" up
ip -n "$name" link set lo up
ip -n "$name" address add "$subnet.2/30" dev eth0
ip -n "$name" link set eth0 up
ip -n "$name" route add default via "$subnet.1"
# Only packets that come from these two interfaces are passed on.
for interface in "$name" "$outside"; do echo 1 >"/proc/sys/net/ipv4/conf/$interface/forwarding"; done
iptables -w -t nat -A POSTROUTING -s "$subnet.0/30" -j MASQUERADE
iptables -w -I FORWARD -s "$subnet.0/30" -j ACCEPT
iptables -w -I FORWARD -d "$subnet.0/30" -j ACCEPT

for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/*; do
  [ -f "$hierarchy/cgroup.procs" ] || continue
  mkdir -p "$hierarchy/$name"
  groups+=("$hierarchy/$name")
  # Without CPUs and memory, a cpuset accepts no process.
  for file in cpuset.cpus cpuset.mems; do
    if [ -f "$hierarchy/$name/$file" ] && [ ! -f "$hierarchy/cgroup.controllers" ]; then
      cat "$hierarchy/$file" >"$hierarchy/$name/$file"
    fi
  done
done
# A process of its own enters the groups, so that the end of the clean room finds them empty.
bash -euc '
  groups=$1; shift
  for group in $groups; do echo $$ >"$group/cgroup.procs"; done
  exec "$@"
' sh "${groups[*]}" ip netns exec "$name" env -i PATH="$PATH" unshare --mount --uts --ipc --cgroup --pid --fork \
  --kill-child=KILL -- "$0" --enter "$root" ${GPUHUB_FRESH_CARRY:-}
