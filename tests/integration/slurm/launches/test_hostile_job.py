"""A plain Slurm job of ben's reaches nothing of ada's launch on the same machine, where there is no Docker.

It searches /proc, homes and temporary folders, signals ada's processes, and asks the broker for her job with its own token.
"""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

from tests.support.hub.kernel_client import Kernel
from tests.support.product import wait_for
from tests.support.slurm.hub import Cluster, leases
from tests.support.slurm.launches import jobs, launches, wait_free, write
from tests.support.slurm.site import USERS

pytestmark = [pytest.mark.slurm, pytest.mark.root, pytest.mark.torch]

#: In files of ada's, and in the output of her ranks.
SECRET = "ada-knows-4711"
#: Its arguments: ada's number and home, the broker's address, ben's token, and the ids of ada's lease and job.
PROBE = """
import glob, json, os, signal, sys, urllib.error, urllib.request
uid, home, broker, token, lease, job = int(sys.argv[1]), *sys.argv[2:7]
found = {"processes": 0, "environments": [], "memory": [], "folders": [], "signals": [], "shown": False, "answers": {}}

def attempt(kind, name, call):
    try:
        call()
        found[kind].append(name)
    except (PermissionError, ProcessLookupError, FileNotFoundError):
        pass

for entry in os.listdir("/proc"):
    if entry.isdigit():
        try:
            if os.stat(f"/proc/{entry}").st_uid != uid:
                continue
            command = open(f"/proc/{entry}/cmdline").read()
        except OSError:
            continue
        found["processes"] += 1
        found["shown"] |= SECRET in command
        attempt("environments", command, lambda: open(f"/proc/{entry}/environ").read())
        attempt("memory", command, lambda: open(f"/proc/{entry}/mem", "rb"))
        attempt("folders", command, lambda: os.listdir(f"/proc/{entry}/cwd/"))
        attempt("folders", command, lambda: os.listdir(f"/proc/{entry}/fd"))
        attempt("signals", command, lambda: os.kill(int(entry), signal.SIGTERM))
attempt("folders", home, lambda: os.listdir(home))
for folder in glob.glob("/tmp/*") + glob.glob("/dev/shm/*") + glob.glob("/var/tmp/*"):
    try:
        is_adas = os.stat(folder).st_uid == uid
    except OSError:
        continue
    if is_adas:
        attempt("folders", folder, lambda: os.listdir(folder) if os.path.isdir(folder) else open(folder, "rb").close())
for method, path in (
    ("GET", f"/jobs/{job}"), ("GET", f"/jobs/{job}/logs"), ("GET", f"/leases/{lease}"), ("DELETE", f"/jobs/{job}"),
    ("DELETE", f"/leases/{lease}"),
):
    request = urllib.request.Request(broker + path, method=method, headers={"Authorization": f"token {token}"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            found["answers"][f"{method} {path}"] = [answer.status, answer.read().decode(errors="replace")[:300]]
    except urllib.error.HTTPError as error:
        found["answers"][f"{method} {path}"] = [error.code, ""]
with open("found.new", "w") as file:
    json.dump(found, file)
os.rename("found.new", "found.json")
"""


def test_job_of_another_user_reaches_nothing_of_a_launch(cluster: Cluster, cell: Kernel) -> None:
    """It sees that the processes exist, as under any Slurm; ada's rank and notebook go on."""
    script = f"""
        import sys, time
        open("secret", "w").write({SECRET!r})
        print("holds", {SECRET!r}, flush=True)
        time.sleep(600)
    """
    write(cluster, "rank.py", script)
    cell.run("%gpu_launch --detach --nnodes 2 rank.py")
    job = jobs(cluster)[0]
    output = cluster.site.users["ada"].home / ".gpu_launch" / "jobs" / str(job["run_id"]) / "output.log"
    wait_for(lambda: output.exists() and SECRET in output.read_text(), "the ranks run", 120)
    [launch] = launches(cluster)
    found = probe(cluster, str(job["id"]))
    assert found["processes"] >= 4, found
    for kind in ("environments", "memory", "folders", "signals"):
        assert found[kind] == [], (kind, found)
    assert not found["shown"], found
    assert {status for status, _ in found["answers"].values()} == {404}, found
    assert SECRET not in json.dumps(found)
    assert launches(cluster) == [launch]
    assert cell.run("print('still', 'here')") == "still here\n"
    cluster.site.ask("scancel", str(launch), user="ada")
    wait_free(cluster)


def probe(cluster: Cluster, job: str) -> dict[str, Any]:
    """Run the probe as a Slurm job of ben's beside ada's worker, and return what it has found."""
    site, home = cluster.site, cluster.site.users["ben"].home
    file = home / "probe.py"
    file.write_text(PROBE.replace("SECRET", repr(SECRET)))
    shutil.chown(file, USERS["ben"], USERS["ben"])
    [lease] = [row["id"] for row in leases(cluster.ada) if row["purpose"] == "job"]
    broker = str(cluster.ben.broker.base_url).rstrip("/")
    words = (str(USERS["ada"]), str(site.users["ada"].home), broker, cluster.ben.token, str(lease), job)
    number = site.submit("ben", "-D", str(home), "--mem=50", script=f"exec /usr/bin/python3 probe.py {' '.join(words)}")
    site.wait_for_state(number, "COMPLETED", "FAILED")
    return dict(json.loads((home / "found.json").read_text()))
