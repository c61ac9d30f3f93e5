# Prints facts about this machine as lines KEY=VALUE. POSIX sh; changes nothing. `gpuhub node add` sends it over SSH, and
# `gpuhub doctor` runs it in a short-lived container on the node's file system.
#   $1        the folder of Docker's data
#   $2        the head node's address
#   others    tcp:HOST:PORT  can it be reached?    account:NAME  which number does the account have here?
#             link:ADDRESS   which port has this address, how fast is it, and is it Wi-Fi?    data:ADDRESS  the same
#             disk:FOLDER    on which file system is it, and does that have project quotas?
#             slurm:FOLDER   does the cgroup.conf there limit jobs to their devices?    epilog:FILE  is it gpuhub's?
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
export PATH
LC_ALL=C
export LC_ALL
root=$1
head=$2
shift 2

has() { command -v "$1" >/dev/null 2>&1; }

report_link() {
    name=
    if has ip; then
        name=$(ip -o addr show to "$2" 2>/dev/null | awk 'NR == 1 { print $2 }')
    fi
    port=/sys/class/net/$name
    # Virtual interfaces have no device.
    if [ -n "$name" ] && [ -e "$port/device" ]; then
        kind=wired
        if [ -e "$port/wireless" ] || [ -e "$port/phy80211" ]; then
            kind=wireless
        fi
        # The kernel refuses to read speed and duplex of a port that is down.
        speed=$(cat "$port/speed" 2>/dev/null)
        duplex=$(cat "$port/duplex" 2>/dev/null)
        echo "$1=$name ${speed:--1} ${duplex:-unknown} $kind"
    fi
}

reach() {
    if has bash && has timeout; then
        timeout 3 bash -c ': 3<>"/dev/tcp/$0/$1"' "$1" "$2" >/dev/null 2>&1 && echo yes || echo no
    elif has nc; then
        nc -z -w 3 "$1" "$2" >/dev/null 2>&1 && echo yes || echo no
    elif has python3; then
        python3 -c 'import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)' "$1" "$2" \
            >/dev/null 2>&1 && echo yes || echo no
    else
        echo unknown
    fi
}

echo "user=$(id -un 2>/dev/null || id -u)"
if [ "$(id -u)" -eq 0 ]; then
    echo sudo=root
elif has sudo && sudo -n true 2>/dev/null; then
    echo sudo=yes
else
    echo sudo=no
fi
socket=/var/run/docker.sock
if [ ! -S "$socket" ]; then
    echo socket=missing
elif [ -r "$socket" ] && [ -w "$socket" ]; then
    echo socket=usable
else
    echo socket=refused
fi
# Client's and server's address and port.
echo "ssh=${SSH_CONNECTION:-}"
if [ -r /etc/os-release ]; then
    (. /etc/os-release && echo "os=${PRETTY_NAME:-$NAME}")
fi
echo "kernel=$(uname -r)"
if [ -d /run/systemd/system ]; then
    echo systemd=yes
    echo "docker_start=$(systemctl show --property=ExecStart --value docker.service 2>/dev/null | head -n 1)"
else
    echo systemd=no
fi
if has df && [ -e "$root" ]; then
    echo "free_kib=$(df -Pk "$root" 2>/dev/null | awk 'NR == 2 { print $4 }')"
fi
if has ip; then
    device=$(ip -o route get "$head" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p')
    if [ -n "$device" ]; then
        echo "device=$device"
        echo "mtu=$(ip -o link show dev "$device" | sed -n 's/.* mtu \([0-9]*\).*/\1/p')"
        if ip -d link show dev "$device" 2>/dev/null | grep -qw wireguard; then
            echo device_kind=wireguard
        fi
    fi
fi
if grep -q '^nf_tables ' /proc/modules 2>/dev/null || [ -d /sys/module/nf_tables ]; then
    echo nf_tables=yes
elif has modinfo && modinfo nf_tables >/dev/null 2>&1; then
    echo nf_tables=yes
elif has nft && nft list tables >/dev/null 2>&1; then
    echo nf_tables=yes
else
    echo nf_tables=unknown
fi
if grep -qw nfs4 /proc/filesystems 2>/dev/null || { has modinfo && modinfo nfsv4 >/dev/null 2>&1; }; then
    echo nfs_client=yes
else
    echo nfs_client=no
fi
if cat /proc/[0-9]*/comm 2>/dev/null | grep -qx cachefilesd; then
    echo cachefilesd=yes
else
    echo cachefilesd=no
fi
if has nvidia-ctk; then
    echo "toolkit=$(nvidia-ctk --version 2>/dev/null | sed -n 's/.*version //p' | head -n 1)"
elif has nvidia-container-cli; then
    echo "toolkit=$(nvidia-container-cli --version 2>/dev/null | sed -n 's/^cli-version: //p' | head -n 1)"
elif has nvidia-container-runtime-hook; then
    echo toolkit=
fi
if has nvidia-smi; then
    if cards=$(nvidia-smi --query-gpu=uuid,driver_version,memory.total,name --format=csv,noheader,nounits 2>&1); then
        printf '%s\n' "$cards" | sed 's/^/gpu=/'
    else
        echo "gpu_error=$(printf '%s\n' "$cards" | head -n 1)"
    fi
fi
for word; do
    case $word in
    tcp:*)
        place=${word#tcp:}
        echo "reach=$(reach "${place%:*}" "${place##*:}") $place"
        ;;
    account:*)
        name=${word#account:}
        number=$(getent passwd "$name" 2>/dev/null | cut -d: -f3)
        if [ -n "$number" ]; then
            echo "account=$number $name"
        fi
        ;;
    link:*)
        report_link link "${word#link:}"
        ;;
    data:*)
        if has ip; then
            [ -n "$(ip -o addr show to "${word#data:}" 2>/dev/null)" ] && echo has_data=yes || echo has_data=no
        fi
        report_link data_link "${word#data:}"
        ;;
    disk:*)
        path=${word#disk:}
        if number=$(stat -c %d "$path" 2>/dev/null); then
            # As mountinfo has it: major and minor number are spread over the bits of the device's number.
            device=$((number >> 8 & 4095)):$((number & 255 | number >> 12 & 1048320))
            quota=no
            awk -v device="$device" '$3 == device' /proc/1/mountinfo 2>/dev/null | grep -Eq 'p(rj)?quota' && quota=yes
            echo "disk=$number $quota $path"
        fi
        ;;
    slurm:*)
        devices=unknown
        # slurmd stores the files that slurmctld sent it in the second folder.
        for file in "${word#slurm:}/cgroup.conf" /run/slurm/conf/cgroup.conf; do
            if [ -r "$file" ]; then
                devices=no
                grep -qi '^[[:space:]]*ConstrainDevices[[:space:]]*=[[:space:]]*yes' "$file" && devices=yes
                break
            fi
        done
        echo "slurm_devices=$devices"
        ;;
    epilog:*)
        file=${word#epilog:}
        if [ ! -e "$file" ]; then
            echo epilog=missing
        elif [ ! -f "$file" ] || [ ! -x "$file" ]; then
            echo epilog=refused
        elif grep -q gpuhub "$file" 2>/dev/null; then
            echo epilog=ok
        else
            echo epilog=other
        fi
        ;;
    esac
done
echo end=
