#!/bin/bash
# The workers of a launch, written by gpuhub for one job. It contains no secret.
export HOME=/srv/home/ada USER=ada LOGNAME=ada SHELL=/bin/bash LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin
umask 077
cd "$HOME" && mkdir -p .gpu_launch/jobs/run-1/logs && cd .gpu_launch/jobs/run-1/logs || exit 1
exec >"slurm-$SLURM_JOB_ID.log" 2>&1
umask 022
cd "$HOME" || exit 1
GPUHUB_JOB_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit 1
export GPUHUB_JOB_NODES
instructions='{"addresses": {"rig2": "fd00::12", "sx1": "10.0.0.11"}, "command": ["gpu-launch-worker"], "environment": {"GPU_LAUNCH_RUN": "run-1", "HOME": "/home/ada", "OMP_NUM_THREADS": "4", "SHELL": "/bin/bash", "USER": "ada"}, "first_worker": 0, "is_detached": true, "names": {"rig2": "rig2", "sx1": "rig1"}}'
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  srun --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks=$((SLURM_JOB_NUM_NODES - 1)) --ntasks-per-node=1 --cpus-per-task=4 --kill-on-bad-exit=0 --wait=0 --mpi=none --export=ALL --relative=1 /bin/bash -c '[ -z "${CUDA_VISIBLE_DEVICES+set}" ] || export APPTAINERENV_CUDA_VISIBLE_DEVICES="$CUDA_VISIBLE_DEVICES"
[ -z "${SLURM_JOB_GPUS+set}" ] || export APPTAINERENV_SLURM_JOB_GPUS="$SLURM_JOB_GPUS"
[ -z "${SLURM_STEP_GPUS+set}" ] || export APPTAINERENV_SLURM_STEP_GPUS="$SLURM_STEP_GPUS"
[ -z "${SLURM_JOB_ID+set}" ] || export APPTAINERENV_SLURM_JOB_ID="$SLURM_JOB_ID"
[ -z "${SLURMD_NODENAME+set}" ] || export APPTAINERENV_SLURMD_NODENAME="$SLURMD_NODENAME"
[ -z "${GPUHUB_JOB_NODES+set}" ] || export APPTAINERENV_GPUHUB_JOB_NODES="$GPUHUB_JOB_NODES"
# Apptainer'"'"'s own /tmp and /var/tmp have 64 MiB together. Here they are in a folder that only the user can enter. A killed
# job leaves its folder without a lock, and the user'"'"'s next job on the node removes it.
temporary=${TMPDIR:-/tmp}
remove() { chmod -R u+rwx "$1" && rm -rf "$1"; }
export -f remove
find "$temporary" -maxdepth 1 -name '"'"'gpuhub-job-*'"'"' -user "$UID" -mmin +1 \
  -exec flock --nonblock {} bash -c '"'"'remove "$1"'"'"' bash {} '"'"';'"'"'
folder=$(mktemp -d "$temporary/gpuhub-job-XXXXXXXX") && exec {lock}<"$folder" && flock "$lock" || exit 1
mkfifo "$folder/pause" && exec {pause}<>"$folder/pause" || exit 1
# Slurm signals only this script where it tracks processes by cgroup. Before the container starts, a signal ends the job.
before=$!
forward() {
  if [ "$!" = "$before" ]; then remove "$folder"; exit 1; fi
  kill "-$1" "$!" 2>/dev/null
}
for name in HUP INT TERM USR1 USR2; do trap "forward $name" "$name"; done
apptainer --quiet exec --containall --cleanenv --no-privs --home /srv/home/ada:/home/ada --pwd /home/ada --bind /srv/data:/datasets:ro --workdir "$folder" /srv/images/notebook.sif python3 -I -c <node_main.py> <&0 &
container=$!
# `wait` alone can miss a signal that follows another at once, until the container ends.
while kill -0 "$container" 2>/dev/null; do read -r -t 0.5 -u "$pause"; done
wait "$container"
status=$?
remove "$folder"
exit "$status"' <<<"$instructions" &
fi
[ -z "${CUDA_VISIBLE_DEVICES+set}" ] || export APPTAINERENV_CUDA_VISIBLE_DEVICES="$CUDA_VISIBLE_DEVICES"
[ -z "${SLURM_JOB_GPUS+set}" ] || export APPTAINERENV_SLURM_JOB_GPUS="$SLURM_JOB_GPUS"
[ -z "${SLURM_STEP_GPUS+set}" ] || export APPTAINERENV_SLURM_STEP_GPUS="$SLURM_STEP_GPUS"
[ -z "${SLURM_JOB_ID+set}" ] || export APPTAINERENV_SLURM_JOB_ID="$SLURM_JOB_ID"
[ -z "${SLURMD_NODENAME+set}" ] || export APPTAINERENV_SLURMD_NODENAME="$SLURMD_NODENAME"
[ -z "${GPUHUB_JOB_NODES+set}" ] || export APPTAINERENV_GPUHUB_JOB_NODES="$GPUHUB_JOB_NODES"
# Apptainer's own /tmp and /var/tmp have 64 MiB together. Here they are in a folder that only the user can enter. A killed
# job leaves its folder without a lock, and the user's next job on the node removes it.
temporary=${TMPDIR:-/tmp}
remove() { chmod -R u+rwx "$1" && rm -rf "$1"; }
export -f remove
find "$temporary" -maxdepth 1 -name 'gpuhub-job-*' -user "$UID" -mmin +1 \
  -exec flock --nonblock {} bash -c 'remove "$1"' bash {} ';'
folder=$(mktemp -d "$temporary/gpuhub-job-XXXXXXXX") && exec {lock}<"$folder" && flock "$lock" || exit 1
mkfifo "$folder/pause" && exec {pause}<>"$folder/pause" || exit 1
# Slurm signals only this script where it tracks processes by cgroup. Before the container starts, a signal ends the job.
before=$!
forward() {
  if [ "$!" = "$before" ]; then remove "$folder"; exit 1; fi
  kill "-$1" "$!" 2>/dev/null
}
for name in HUP INT TERM USR1 USR2; do trap "forward $name" "$name"; done
apptainer --quiet exec --containall --cleanenv --no-privs --home /srv/home/ada:/home/ada --pwd /home/ada --bind /srv/data:/datasets:ro --workdir "$folder" /srv/images/notebook.sif python3 -I -c <node_main.py> <<<"$instructions" &
container=$!
# `wait` alone can miss a signal that follows another at once, until the container ends.
while kill -0 "$container" 2>/dev/null; do read -r -t 0.5 -u "$pause"; done
wait "$container"
status=$?
remove "$folder"
exit "$status"
