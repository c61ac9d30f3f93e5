"""Use up what a container is given; print how far it got.

Arguments: kind: "processes", "memory", "shm", "output", "files"; seconds: how long it is kept up.
"""

import errno
import json
import os
import signal
import sys
import time

wanted = json.load(sys.stdin)
end = time.monotonic() + wanted.get("seconds", 0)
MIB = 2**20


def exhaust_processes():
    """Fork until refused, however long that takes, and continue trying."""
    children, refused = [], 0
    while time.monotonic() < end or (not refused and time.monotonic() < end + 60):
        try:
            pid = os.fork()
        except OSError as error:
            assert error.errno == errno.EAGAIN
            refused += 1
            time.sleep(0.01)
            continue
        if pid == 0:
            signal.alarm(int(wanted["seconds"]) + 90)
            signal.pause()
        children.append(pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)
    return {"processes": len(children), "refused": refused}


def exhaust_memory():
    """Let a child allocate until it is killed."""
    pid = os.fork()
    if pid == 0:
        # The kernel may kill any process of the container; this one asks to be the first.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        held = []
        while True:
            held.append(b"a" * (64 * MIB))
    return {"signal": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}


def fill(folder):
    """Write one file until there is no space, at most `bytes`; remove it."""
    path, written = os.path.join(folder, "filling"), 0
    try:
        with open(path, "wb", buffering=0) as file:
            while written < wanted["bytes"]:
                written += file.write(b"\0" * MIB)
        return {"written": written, "error": None}
    except OSError as error:
        return {"written": written, "error": errno.errorcode[error.errno]}
    finally:
        os.unlink(path)


def flood_output():
    """Write lines to the container's own output, which Docker keeps."""
    written, line = 0, b"\x1b[31mforged line\r" + b"a" * 4000 + b"\n"
    with open("/proc/1/fd/1", "wb", buffering=0) as output:
        while written < wanted["bytes"]:
            written += output.write(line * 16)
    return {"written": written}


match wanted["kind"]:
    case "processes":
        found = exhaust_processes()
    case "memory":
        found = exhaust_memory()
    case "output":
        found = flood_output()
    case folder:
        found = fill(folder)
print(json.dumps(found))
