#!/bin/sh
# Slurm's Epilog for nodes on which gpuhub runs containers: what a job that has ended left there is removed, and only
# then does Slurm give its GPUs to somebody else.
#
# Install it on every node, owned by root and for nobody else to write, and name it in slurm.conf:
#   Epilog=/etc/slurm/gpuhub-epilog.sh
# Where slurm.conf has an Epilog already, call this one from it. It asks the Docker daemon that DOCKER_HOST names, or
# the usual one, and needs Docker's command line there. A job without containers costs it one question.
#
# Where Docker does not answer for two minutes, or cannot remove a container, it fails: Slurm then drains the node with
# the reason "Epilog error", since a GPU there may still be in use. `scontrol update nodename=NODE state=resume` takes
# the node back.
set -u
# slurmd says little of a PATH.
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
GPUHUB_EPILOG_WAIT=${GPUHUB_EPILOG_WAIT:-120}

case ${SLURM_JOB_ID:-} in
'' | *[!0-9]*)
    echo "gpuhub's Epilog: SLURM_JOB_ID is no number: this is for slurmd to run" >&2
    exit 1
    ;;
esac
# No Docker, no containers.
command -v docker >/dev/null || exit 0

# The same question until nothing is left: a container may vanish, or be created, while it is asked.
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
