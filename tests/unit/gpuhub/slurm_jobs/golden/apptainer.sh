#!/bin/bash
# A notebook's job, written by gpuhub for one start. It has the notebook's token: only its user may read it.
export HOME=/srv/home/ada USER=ada LOGNAME=ada SHELL=/bin/bash LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin
umask 077
cd "$HOME" || exit 1
mkdir -p .gpuhub || exit 1
exec >.gpuhub/notebook-work.log 2>&1
umask 022
instructions='{"addresses": {"rig2": "fd00::12", "sx1": "10.0.0.11"}, "certificates": {"GPUHUB_BROKER_CA": "BROKER\n", "JUPYTERHUB_SSL_CERTFILE": "CERTIFICATE\n", "JUPYTERHUB_SSL_CLIENT_CA": "TRUST\n", "JUPYTERHUB_SSL_KEYFILE": "KEY\n"}, "command": ["jupyterhub-singleuser", "--debug", "--KernelManager.transport=ipc"], "environment": {"GPUHUB_LEASE": "l1", "HOME": "/home/ada", "JUPYTERHUB_API_TOKEN": "secret-token", "SHELL": "/bin/bash", "USER": "ada"}, "listen": {"rig2": "fd00::12", "sx1": "10.0.0.11"}, "names": {"rig2": "rig2", "sx1": "rig1"}, "prefix": "/user/ada/", "report": "http://10.0.0.1:8081/hub/api/gpuhub-port", "scheme": "https"}'
# Slurm's signals reach the program that runs the notebook, and the job ends with it.
[ -z "${CUDA_VISIBLE_DEVICES+set}" ] || export APPTAINERENV_CUDA_VISIBLE_DEVICES="$CUDA_VISIBLE_DEVICES"
[ -z "${SLURM_JOB_GPUS+set}" ] || export APPTAINERENV_SLURM_JOB_GPUS="$SLURM_JOB_GPUS"
[ -z "${SLURM_STEP_GPUS+set}" ] || export APPTAINERENV_SLURM_STEP_GPUS="$SLURM_STEP_GPUS"
[ -z "${SLURM_JOB_ID+set}" ] || export APPTAINERENV_SLURM_JOB_ID="$SLURM_JOB_ID"
[ -z "${SLURMD_NODENAME+set}" ] || export APPTAINERENV_SLURMD_NODENAME="$SLURMD_NODENAME"
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
apptainer --quiet exec --containall --cleanenv --no-privs --nv --home /srv/home/ada:/home/ada --pwd /home/ada --bind /srv/data:/datasets:ro --workdir "$folder" /srv/images/notebook.sif python3 -I -c <node_main.py> <<<"$instructions" &
container=$!
# `wait` alone can miss a signal that follows another at once, until the container ends.
while kill -0 "$container" 2>/dev/null; do read -r -t 0.5 -u "$pause"; done
wait "$container"
status=$?
remove "$folder"
exit "$status"
