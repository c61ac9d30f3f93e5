#!/bin/sh
# Slurm's HealthCheckProgram for nodes without Docker, where gpuhub has no GPU agent: it drains this node when one of its
# GPUs fails, and ends that drain when the GPU works again.
#
# Install it on every node, owned and writable by root alone, and name it in slurm.conf:
#   HealthCheckProgram=/etc/slurm/gpuhub-health.sh
#   HealthCheckInterval=60
# If slurm.conf has a HealthCheckProgram already, call this one from it.
#
# A GPU has failed while nvidia-smi reports uncorrectable memory errors or memory rows that could not be replaced or wait
# for it, while nvidia-smi fails, and from an Xid error that needs a reset on, until the node was rebooted. After a reset
# of the GPU, or when it was checked, `/etc/slurm/gpuhub-health.sh accept` as root on the node ends that: the errors so
# far do not count any more. A drain whose reason does not begin with "gpuhub: GPU" is not changed.
set -u
# slurmd sets no PATH.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# Removed by a reboot, which resets the GPUs.
state=${GPUHUB_HEALTH_STATE:-/run/gpuhub-health}
# The errors after which NVIDIA asks for a reset, as gpuhub's GPU agent knows them.
critical='48|62|64|74|79|95|119|120'

# The kernel's messages about such errors in this boot; they are kept here, because the kernel forgets old messages.
mkdir -p -m 700 "$state" || exit 1
touch "$state/seen" "$state/accepted" || exit 1
{ journalctl --quiet --no-pager --dmesg --boot --output=short-monotonic 2>/dev/null || dmesg; } |
    grep -E "NVRM: Xid \(PCI:[0-9A-Fa-f:.]+\): ($critical)," >>"$state/seen"
sort -u -o "$state/seen" "$state/seen"
if [ "${1:-}" = accept ]; then
    cp "$state/seen" "$state/accepted"
    exit
fi

# Lines `INDEX BUS UNCORRECTED PENDING FAILED`, where BUS is as in the kernel's messages (0000:01:00).
list_gpus() {
    timeout 20 nvidia-smi --format=csv,noheader,nounits \
        --query-gpu=index,pci.bus_id,ecc.errors.uncorrected.volatile.total,remapped_rows.pending,remapped_rows.failure
}
problems=
# $1: which GPU; $2: its problem
add() {
    problems="${problems:+$problems; }$1: $2"
}
# Without the driver there is no GPU.
command -v nvidia-smi >/dev/null || exit 0
gpus=$(list_gpus 2>&1)
status=$?
if [ "$status" -ne 0 ]; then
    add GPUs "nvidia-smi fails: $(printf '%s\n' "$gpus" | grep -v '^[0-9]*, ' | head -n 1)"
fi
gpus=$(printf '%s\n' "$gpus" | sed -nE 's/^([0-9]+), [0-9A-Fa-f]*([0-9A-Fa-f]{4}:[0-9A-Fa-f]+:[0-9A-Fa-f]+)\.[0-9]+, /\1 \2 /p' | tr -d ,)
while read -r index bus uncorrected pending failed; do
    case ${uncorrected:-} in
    '' | 0 | *[!0-9]*) ;;
    *) add "GPU $index" "$uncorrected uncorrectable memory errors (ECC) since the driver was loaded: reset the GPU or restart the node" ;;
    esac
    case ${failed:-} in 1 | [Yy]es) add "GPU $index" "a failing memory row could not be replaced: the card needs service" ;; esac
    case ${pending:-} in 1 | [Yy]es) add "GPU $index" "failing memory rows wait to be replaced: reset the GPU or restart the node" ;; esac
done <<end
$gpus
end
# `BUS CODE` of each error that was not accepted.
while read -r bus code; do
    [ -n "$bus" ] || continue
    index=$(printf '%s\n' "$gpus" | awk -v bus="$bus" 'tolower($2) == tolower(bus) { print $1 }')
    add "GPU ${index:-at $bus}" "Xid $code: reset the GPU or restart the node"
done <<end
$(grep -vxFf "$state/accepted" "$state/seen" | sed -nE 's/.*NVRM: Xid \(PCI:([0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f]+)[^)]*\): ([0-9]+),.*/\1 \2/p' | sort -u)
end

node=${SLURMD_NODENAME:-$(hostname -s)}
shown=$(scontrol show node --oneliner "$node") || exit 1
reason=$(printf '%s\n' "$shown" | sed -nE 's/.* Reason=(.*) \[[^][]*\].*/\1/p')
case $(printf '%s\n' "$shown" | sed -nE 's/.* State=([^ ]*) .*/\1/p') in
*DRAIN*) is_drained=yes ;;
*) is_drained= reason= ;;
esac
case $is_drained:$reason in yes:"gpuhub: GPU"*) ;; yes:*) exit 0 ;; esac
if [ -z "$problems" ]; then
    # Slurm may keep the last reason, also for a later drain by `scontrol reboot`: it must not be that of a failed GPU.
    [ -z "$is_drained" ] || scontrol update "NodeName=$node" State=UNDRAIN "Reason=gpuhub: all GPUs work again"
elif [ "$reason" != "gpuhub: $problems" ]; then
    scontrol update "NodeName=$node" State=DRAIN "Reason=gpuhub: $problems"
fi
