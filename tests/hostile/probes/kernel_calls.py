"""Call what only root may, straight at the kernel; print each call's error, or "allowed"."""

import ctypes
import errno
import json
import os
import platform
import resource
import socket

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWPID = 0x20000, 0x10000000, 0x40000000, 0x20000000
MACHINES = ("x86_64", "aarch64")
#: Numbers of system calls that the C library has no function for: x86-64, ARM64 (Linux: unistd.h).
NUMBERS = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "finit_module": (313, 273),
    "fsopen": (430, 430),
    "init_module": (175, 105),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
}


def call(name, *arguments):
    """Call a function of the C library."""
    ctypes.set_errno(0)
    return name_error(getattr(LIBC, name)(*arguments))


def syscall(name, *arguments):
    """Make a system call by number."""
    ctypes.set_errno(0)
    number = NUMBERS[name][MACHINES.index(platform.machine())]
    return name_error(LIBC.syscall(ctypes.c_long(number), *(ctypes.c_long(one) for one in arguments)))


def name_error(status):
    return "allowed" if status != -1 else errno.errorcode[ctypes.get_errno()]


def attempt(action):
    """Call a function of Python."""
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno]
    except ValueError:
        return "EPERM"  # resource.setrlimit
    return "allowed"


def in_child(action):
    """Call in a child: what would succeed must not change this process."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, action().encode())
        os._exit(0)
    os.close(write)
    text = os.read(read, 100).decode()
    os.wait()
    return text


net = os.open("/proc/self/ns/net", os.O_RDONLY)
core = resource.RLIMIT_CORE
calls = {
    "unshare user": lambda: call("unshare", CLONE_NEWUSER),
    "unshare mounts": lambda: call("unshare", CLONE_NEWNS),
    "unshare network": lambda: call("unshare", CLONE_NEWNET),
    "unshare processes": lambda: call("unshare", CLONE_NEWPID),
    "unshare user and mounts": lambda: call("unshare", CLONE_NEWUSER | CLONE_NEWNS),
    "setns": lambda: call("setns", net, CLONE_NEWNET),
    "mount": lambda: call("mount", b"none", b"/mnt", b"tmpfs", 0, None),
    "remount": lambda: call("mount", b"none", b"/proc/sys", None, 32, None),
    "umount": lambda: call("umount2", b"/proc/sys", 2),
    "chroot": lambda: call("chroot", b"/tmp"),
    "swapon": lambda: call("swapon", b"/tmp", 0),
    "reboot": lambda: call("reboot", 0),
    "acct": lambda: call("acct", None),
    "sethostname": lambda: call("sethostname", b"other", 5),
    "kernel log": lambda: call("klogctl", 5, None, 0),
    **{name: (lambda name=name: syscall(name, 0, 0, 0, 0, 0, 0)) for name in NUMBERS},
    "setuid 0": lambda: attempt(lambda: os.setuid(0)),
    "setgid 0": lambda: attempt(lambda: os.setgid(0)),
    "setgroups": lambda: attempt(lambda: os.setgroups([0])),
    "priority": lambda: attempt(lambda: os.setpriority(os.PRIO_PROCESS, 0, -20)),
    "real-time": lambda: attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))),
    "core dumps": lambda: attempt(lambda: resource.setrlimit(core, (resource.RLIM_INFINITY,) * 2)),
    "raw socket": lambda: attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)),
    "packet socket": lambda: attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x300)),
    "device of a GPU": lambda: attempt(lambda: os.mknod("/tmp/card", 0o20666, os.makedev(195, 0))),
    "disk device": lambda: attempt(lambda: os.mknod("/tmp/disk", 0o60666, os.makedev(254, 0))),
    "own file for root": lambda: attempt(lambda: os.chown("/tmp", 0, 0)),
}
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(
    json.dumps(
        {
            "calls": {name: in_child(action) for name, action in calls.items()},
            "capabilities": {
                name: int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
            },
            "no_new_privileges": status["NoNewPrivs"].strip(),
            "seccomp": status["Seccomp"].strip(),
            "uid": os.getuid(),
            "owners": sorted({os.stat(f"/proc/{pid}").st_uid for pid in os.listdir("/proc") if pid.isdigit()}),
        }
    )
)
