# Prints what a machine has of Slurm as lines KEY=VALUE, after machine_basics.sh. POSIX sh; changes nothing. `gpuhub slurm
# init` runs it.
echo "hostname=$(hostname -s)"
echo "cpus=$(nproc --all)"
sed -n 's/^MemTotal: *\([0-9]*\) kB$/memory_kib=\1/p' /proc/meminfo
# In the order of the PCI bus, which is NVML's.
for file in /proc/driver/nvidia/gpus/*/information; do
    [ ! -r "$file" ] || sed -n 's/^Device Minor:[^0-9]*\([0-9]*\)$/minor=\1/p' "$file"
done
dpkg-query -W -f='${db:Status-Status} ${Package} ${Version}\n' munge slurmctld slurmd slurm-client slurmdbd slurmrestd \
    slurm-wlm-jwt-plugin slurm-wlm-mysql-plugin mariadb-server 2>/dev/null |
    sed -n 's/^installed \([^ ]*\) .*/package=\1/p'
id slurmrest >/dev/null 2>&1 && echo "rest_user=yes"

# Mode, owner, time of the last change, checksum and, unless it is secret, content; then the path.
describe_file() {
    as_root test -f "$2" || return 0
    content=-
    [ "$1" = secret ] || content=$(as_root base64 -w0 "$2")
    sum=$(as_root sha256sum "$2")
    echo "file=$(as_root stat -c '%a %U %Y' "$2") ${sum%% *} ${content:--} $2"
}
for path in slurm.conf gres.conf cgroup.conf gpuhub-epilog.sh gpuhub-health.sh gpuhub-power.sh gpuhub-suspend.sh \
    gpuhub-resume.sh; do
    describe_file public "/etc/slurm/$path"
done
describe_file public /etc/slurm-llnl/slurm.conf
describe_file public /etc/systemd/system/slurmrestd.service.d/gpuhub.conf
for path in /etc/munge/munge.key /etc/slurm/slurmdbd.conf /etc/slurm/jwt_hs256.key /etc/sudoers.d/gpuhub-slurm-power; do
    describe_file secret "$path"
done

for unit in munge mariadb slurmdbd slurmctld slurmrestd slurmd; do
    enabled=$(systemctl is-enabled "$unit" 2>/dev/null </dev/null)
    active=$(systemctl is-active "$unit" 2>/dev/null </dev/null)
    since=$(systemctl show --timestamp=unix -p ActiveEnterTimestamp --value "$unit" 2>/dev/null </dev/null)
    since=${since#@}
    echo "unit=$unit ${enabled:-unknown} ${active:-unknown} ${since:-0}"
done
echo end=
