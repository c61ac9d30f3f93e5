#!/bin/bash
# The workers of a launch, written by gpuhub for one job. It contains no secret.
export HOME=/srv/home/ada USER=ada LOGNAME=ada SHELL=/bin/bash LANG=C.UTF-8 PATH=/opt/gpuhub/bin:/usr/local/bin:/usr/bin:/bin:/opt/slurm/bin
umask 077
cd "$HOME" && mkdir -p .gpu_launch/jobs/run-1/logs && cd .gpu_launch/jobs/run-1/logs || exit 1
exec >"slurm-$SLURM_JOB_ID.log" 2>&1
umask 022
cd "$HOME" || exit 1
GPUHUB_JOB_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit 1
export GPUHUB_JOB_NODES
instructions='{"addresses": {"rig2": "fd00::12", "sx1": "10.0.0.11"}, "command": ["/opt/gpuhub/bin/gpu-launch-worker"], "environment": {"GPU_LAUNCH_RUN": "run-1", "HOME": "/srv/home/ada", "OMP_NUM_THREADS": "4", "SHELL": "/bin/bash", "USER": "ada"}, "first_worker": 2, "is_detached": false, "names": {"rig2": "rig2", "sx1": "rig1"}}'
exec srun --nodes=$SLURM_JOB_NUM_NODES --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 --cpus-per-task=4 --kill-on-bad-exit=0 --wait=0 --mpi=none --export=ALL --no-kill /opt/gpuhub/bin/python3 -I -c <node_main.py> <<<"$instructions"
