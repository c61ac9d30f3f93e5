#!/bin/sh
# Slurm's Epilog for nodes on which gpuhub runs containers: it removes the containers of a job that has ended before
# Slurm grants the job's GPUs to another job.
#
# Install it on every node, owned and writable by root alone, and name it in slurm.conf:
#   Epilog=/etc/slurm/gpuhub-epilog.sh
# If slurm.conf has an Epilog already, call this one from it. It uses the Docker daemon of DOCKER_HOST, or the default
# one, and needs Docker's command line there. A job without containers costs one call.
#
# If Docker does not answer for two minutes, or cannot remove a container, the Epilog fails: Slurm then drains the node
# with the reason "Epilog error", because a GPU there may still be in use. `scontrol update nodename=NODE state=resume`
# brings the node back.
set -u
# slurmd sets hardly any PATH.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
GPUHUB_EPILOG_WAIT=${GPUHUB_EPILOG_WAIT:-120}

case ${SLURM_JOB_ID:-} in
'' | *[!0-9]*)
    echo "gpuhub's Epilog: SLURM_JOB_ID is not a number: only slurmd runs this script" >&2
    exit 1
    ;;
esac
# No Docker, no containers.
command -v docker >/dev/null || exit 0

# Repeat until no container is left, because one may vanish or be created in the meantime.
waited=0
while :; do
    if found=$(docker ps --all --quiet --no-trunc --filter "label=gpuhub.slurm-job=$SLURM_JOB_ID" 2>&1); then
        [ -n "$found" ] || exit 0
        # Split into words on purpose: these are ids.
        # shellcheck disable=SC2086
        found=$(docker rm --force $found 2>&1) && continue
    fi
    if [ "$waited" -ge "$GPUHUB_EPILOG_WAIT" ]; then
        echo "gpuhub's Epilog: containers of job $SLURM_JOB_ID may still run: $found" >&2
        exit 1
    fi
    sleep 1
    waited=$((waited + 1))
done
