#!/usr/bin/env bash
# Installs on a Debian or Ubuntu machine what gpuhub needs and the machine lacks. Quick when nothing is missing.
#   usage: setup.sh run|dev [slurm]   dev adds what tests and checks need; slurm: what the practice closet's Slurm needs
#   With MONITORING=1 in the environment, also Prometheus.
set -euo pipefail
mode=${1:?usage: $0 run|dev [slurm]}
engine=${2:-}
here=$(cd "$(dirname "$0")/.." && pwd)
export DEBIAN_FRONTEND=noninteractive

[ "$(id -u)" -eq 0 ] || { echo "This needs root, for Docker and for packages: run it with sudo." >&2; exit 1; }
command -v apt-get >/dev/null || { echo "Debian or Ubuntu is needed: there is no apt-get here." >&2; exit 1; }

# command:package for each of these places in the list of programs
programs_of() {
  local where
  for where in "$@"; do
    sed -nE "s/^$where +([^ ]+) +([^ ]+)\$/\1:\2/p" "$here/spawners/gpuhub/common/programs.txt"
  done
}
mapfile -t wanted < <(programs_of head closet)
mapfile -t for_slurm < <(programs_of slurm)
mapfile -t for_metrics < <(programs_of metrics)
mapfile -t for_tests < <(programs_of rest)
for_tests+=(faketime:faketime systemd-analyze:systemd ganesha.nfsd:nfs-ganesha-vfs nfs-ls:libnfs-utils bindfs:bindfs sshd:openssh-server wireguard-go:wireguard-go wg:wireguard-tools chromium:chromium chromium-headless-shell:chromium-headless-shell certutil:libnss3-tools slapd:slapd ldapwhoami:ldap-utils objdump:binutils nft:nftables slurmdbd:slurmdbd mariadbd:mariadb-server prometheus-alertmanager:prometheus-alertmanager rsync:rsync busybox:busybox-static pg_createcluster:postgresql firefox-esr:firefox-esr WebKitWebDriver:webkit2gtk-driver Xvfb:xvfb mksquashfs:squashfs-tools squashfuse:squashfuse newuidmap:uidmap patchelf:patchelf sudo:sudo ipmitool:ipmitool ipmi_sim:openipmi)
missing=()
# $@: command:package …; adds to `missing`
look_for() {
  local pair
  for pair in "$@"; do
    command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
  done
}
install() {
  echo "Installing $* …"
  apt-get update -qq
  # A docker.io without systemd has no service to start; that is no failure here.
  apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

look_for "${wanted[@]}"
[ -f /usr/include/stdio.h ] || missing+=(libc6-dev)
/usr/bin/python3 -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
[ -f /usr/share/keyrings/debian-archive-keyring.gpg ] || missing+=(debian-archive-keyring)
[ -f /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
[ ${#missing[@]} -eq 0 ] || install "${missing[@]}"

policy=/usr/sbin/policy-rc.d
# $@: packages with services that shall not run here: the tests and the closet start servers of their own.
install_quietly() {
  local service
  if [ ! -e "$policy" ]; then
    # Runs when this script ends, where a function's own variables are gone.
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
  fi
  install "$@"
  if [ -d /run/systemd/system ]; then
    for service in slapd:slapd openssh-server:ssh nfs-ganesha-vfs:nfs-ganesha munge:munge slurmd:slurmd slurmctld:slurmctld slurmdbd:slurmdbd slurmrestd:slurmrestd mariadb-server:mariadb prometheus:prometheus prometheus-alertmanager:prometheus-alertmanager postgresql:postgresql ipmitool:ipmievd openipmi:openipmi; do
      [[ " $* " != *" ${service%%:*} "* ]] || systemctl disable --quiet "${service##*:}"
    done
  fi
}

missing=()
if [ "$mode" = dev ] || [ "$engine" = slurm ]; then
  look_for "${for_slurm[@]}"
fi
if [ "$mode" = dev ] || [ "${MONITORING:-0}" = 1 ]; then
  look_for "${for_metrics[@]}"
fi
if [ "$mode" = dev ]; then
  look_for "${for_tests[@]}"
  # A plugin has no command of its own.
  compgen -G '/usr/lib/*/slurm*/auth_jwt.so' >/dev/null || missing+=(slurm-wlm-jwt-plugin)
  # Python's own tests of executors. Not every release has a package of this kind without the version in its name.
  /usr/bin/python3 -c 'import test.test_concurrent_futures' 2>/dev/null ||
    missing+=("$(/usr/bin/python3 -c 'import sys; print("libpython{}.{}-testsuite".format(*sys.version_info))')")
fi
[ ${#missing[@]} -eq 0 ] || install_quietly "${missing[@]}"

if { [ "$mode" = dev ] || [ "$engine" = slurm ]; } && ! command -v docker >/dev/null; then
  # From Debian 13 on, the command line is a package of its own.
  apt-get install -y -qq --no-install-recommends docker-cli >/dev/null
fi

[ "$mode" != dev ] || "$here/spawners/apptainer.sh"
if [ "$mode" = dev ]; then "$here/spawners/venv.sh" torch; else "$here/spawners/venv.sh" run; fi

# `sudo gpuhub …` in any folder. Another clone's command stays while that clone exists.
command=/usr/local/bin/gpuhub
[ -e "$command" ] || ln -sfn "$here/.venv/bin/gpuhub" "$command"

. "$here/spawners/stamps.sh"
sum=$(sha256sum <"$here/spawners/proxy/package-lock.json")
if [ ! -x "$here/spawners/proxy/node_modules/.bin/configurable-http-proxy" ] || changed proxy "$sum"; then
  echo "Installing JupyterHub's proxy …"
  (cd "$here/spawners/proxy" && npm ci --silent --no-audit --no-fund)
  stamp proxy "$sum"
fi

# What tests run in pages.
if [ "$mode" = dev ]; then
  sum=$(sha256sum <"$here/tests/support/browser/package-lock.json")
  if [ ! -f "$here/tests/support/browser/node_modules/axe-core/axe.min.js" ] || changed axe "$sum"; then
    (cd "$here/tests/support/browser" && npm ci --silent --no-audit --no-fund)
    stamp axe "$sum"
  fi
fi
