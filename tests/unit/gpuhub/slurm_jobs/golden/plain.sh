#!/bin/bash
# A notebook's job, written by gpuhub for one start. It has the notebook's token: only its user may read it.
export HOME=/srv/home/ada USER=ada LOGNAME=ada SHELL=/bin/bash LANG=C.UTF-8 PATH=/opt/gpuhub/bin:/usr/local/bin:/usr/bin:/bin
umask 077
cd "$HOME" || exit 1
mkdir -p .gpuhub || exit 1
exec >.gpuhub/notebook.log 2>&1
umask 022
instructions='{"addresses": {"rig2": "fd00::12", "sx1": "10.0.0.11"}, "certificates": null, "command": ["/opt/gpuhub/bin/jupyterhub-singleuser", "--debug", "--KernelManager.transport=ipc"], "environment": {"GPUHUB_LEASE": "l1", "HOME": "/srv/home/ada", "JUPYTERHUB_API_TOKEN": "secret-token", "SHELL": "/bin/bash", "USER": "ada"}, "listen": {"rig2": "fd00::12", "sx1": "10.0.0.11"}, "names": {"rig2": "rig2", "sx1": "rig1"}, "prefix": "/user/ada/", "report": "http://10.0.0.1:8081/hub/api/gpuhub-port", "scheme": "http"}'
# Slurm's signals reach the program that runs the notebook, and the job ends with it.
exec /opt/gpuhub/bin/python3 -I -c <node_main.py> <<<"$instructions"
