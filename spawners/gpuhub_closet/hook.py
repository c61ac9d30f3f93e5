#!/usr/bin/python3 -IS
"""The simulated container toolkit: puts the granted GPUs into a starting container, as NVIDIA's own hook does.

Installed as `nvidia-container-runtime-hook` on a node's PATH, next to its settings `hook.json`. runc calls it with the
argument `prestart` and the container's state on standard input, after the container's mounts are made and before its
root is entered. It must be quick, so it imports little and nothing of gpuhub, and runs without site packages.

A container gets the libraries and nvidia-smi (written through the root file system, never through its mounts), the
granted GPUs' folders at /usr/share/nvidia-simulated/0, 1 … (bound read-only, so that load and faults are up to date),
next to them the file mig_visible with the UUIDs of the granted MIG devices, and /dev/nvidia0 … with /dev/nvidiactl.
These device nodes are the null device by another name: they give access to nothing, and only those of the granted
GPUs exist.

An image is not trusted: every folder is opened step by step and no symbolic link is followed.
"""

# Importing pathlib alone would double the time this takes, hence os.path.
# ruff: noqa: PTH100, PTH115, PTH116, PTH118, PTH120, PTH123, PTH208
import ctypes
import json
import os
import stat
import sys
from typing import Any

SHARE = "usr/share/nvidia-simulated"
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
CLONE_NEWNS = 0x00020000
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class HookError(Exception):
    """The container cannot start; the caller of its start sees the text."""


def parse_visible_devices(environment: list[str]) -> str:
    """Return which GPUs the container asks for: a comma list of UUIDs and indexes, `all`, or nothing."""
    values = {}
    for item in environment:
        key, _, value = item.partition("=")
        values[key] = value
    capabilities = values.get("NVIDIA_DRIVER_CAPABILITIES") or "utility,compute"
    if not {"all", "utility"} & set(capabilities.split(",")):
        return ""
    return values.get("NVIDIA_VISIBLE_DEVICES", "")


def select_gpus(wanted: str, gpus: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the wanted GPUs in the order of their indexes.

    Raises:
        HookError: The node lacks one of them, or it has a fault.
    """
    if wanted in ("", "void", "none"):
        return []
    if wanted == "all":
        return gpus
    by_name = {name: gpu for gpu in gpus for name in (gpu["index"], gpu["uuid"], *list_mig_devices(gpu))}
    chosen = []
    for name in wanted.split(","):
        gpu = by_name.get(name)
        if gpu is None:
            raise HookError(f"device error: {name}: unknown device")
        if gpu.get("fault") in ("lost", "fallen_off_bus"):
            raise HookError(f"detection error: nvml error: {name}: gpu is lost")
        if gpu not in chosen:
            chosen.append(gpu)
    return sorted(chosen, key=lambda gpu: int(gpu["index"]))


def list_mig_devices(gpu: dict[str, str]) -> list[str]:
    """Return the UUIDs of a GPU's MIG devices."""
    return gpu.get("mig_devices", "").split()


def select_mig_devices(wanted: str, chosen: list[dict[str, str]]) -> list[str]:
    """Return the MIG devices to show: those that are named, and all of a GPU that is named itself."""
    names = set(wanted.split(","))
    return [
        uuid
        for gpu in chosen
        for uuid in list_mig_devices(gpu)
        if wanted == "all" or names & {uuid, gpu["uuid"], gpu["index"]}
    ]


def read_gpus(folder: str) -> list[dict[str, str]]:
    """Return all GPUs of the node by index, with their `path`."""
    gpus = []
    for name in sorted(filter(str.isdigit, os.listdir(folder)), key=int):
        path = f"{folder}/{name}"
        gpu = {"path": path}
        for file in ("card", "live"):
            with open(f"{path}/{file}", encoding="utf-8") as lines:
                for line in lines:
                    key, _, value = line.rstrip("\n").partition(" ")
                    if key == "mig_device":
                        gpu["mig_devices"] = f"{gpu.get('mig_devices', '')} {value.split()[1]}"
                    else:
                        gpu[key] = value
        gpus.append(gpu)
    return gpus


def open_folder(base: int, path: str, *, make: bool = False) -> int:
    """Open a folder below `base` without following links; with `make`, missing folders are made."""
    current = os.dup(base)
    for name in filter(None, path.split("/")):
        if make:
            try:
                os.mkdir(name, 0o755, dir_fd=current)
                os.chmod(name, 0o755, dir_fd=current)  # noqa: S103  users read here, whatever the umask is
            except FileExistsError:
                pass
        try:
            following = os.open(name, FOLDER, dir_fd=current)
        except OSError as error:
            raise HookError(f"{path} in the image is not a plain folder: {error.strerror}") from error
        os.close(current)
        current = following
    return current


def install_file(source: str, folder: int, name: str) -> None:
    """Copy a file into an open folder; it replaces anything of that name."""
    temporary = f".{name}.new"
    _unlink(temporary, folder)
    target = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o755, dir_fd=folder)
    origin = os.open(source, os.O_RDONLY)
    remaining = os.fstat(origin).st_size
    while remaining > 0:
        remaining -= os.sendfile(target, origin, None, remaining)
    os.fchmod(target, 0o755)
    os.close(origin)
    os.close(target)
    os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def write_text(text: str, folder: int, name: str) -> None:
    """Write a small file into an open folder; it replaces anything of that name."""
    _unlink(name, folder)
    target = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=folder)
    os.write(target, text.encode())
    os.close(target)


def make_device(folder: int, name: str) -> None:
    """Make a null device of that name."""
    _unlink(name, folder)
    os.mknod(name, stat.S_IFCHR | 0o666, os.makedev(1, 3), dir_fd=folder)
    os.chmod(name, 0o666, dir_fd=folder)  # noqa: S103  as NVIDIA's own device nodes are


def _unlink(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return


class MountSyscalls:
    """The two system calls that Python 3.11 lacks."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def enter_mounts(self, pid: int) -> None:
        """Enter the mount namespace of a process."""
        namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
        self._check(self._libc.setns(namespace, CLONE_NEWNS), "enter the container's mounts")
        os.close(namespace)

    def bind_read_only(self, source: str, folder: int) -> None:
        """Show the folder `source` at an open folder."""
        target = f"/proc/self/fd/{folder}".encode()
        flags = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY
        self._check(self._libc.mount(source.encode(), target, None, MS_BIND, None), f"bind {source}")
        # The opened folder lies beneath the new mount: the remount needs the name of the mount on top.
        top = os.readlink(target)
        self._check(self._libc.mount(None, top, None, MS_BIND | MS_REMOUNT | flags, None), f"protect {source}")

    def _check(self, result: int, action: str) -> None:
        if result:
            raise HookError(f"cannot {action}: {os.strerror(ctypes.get_errno())}")


def equip_container(state: dict[str, Any], settings: dict[str, str]) -> None:
    """Put the library, the tools and the granted GPUs into the container with this state."""
    with open(f"{state['bundle']}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    wanted = parse_visible_devices(config["process"]["env"])
    gpus = select_gpus(wanted, read_gpus(settings["cards"]))
    if not gpus:
        return
    path = os.path.join(state["bundle"], config["root"]["path"])
    os.umask(0o022)
    root = os.open(path, FOLDER)
    install_file(settings["smi"], open_folder(root, "usr/bin", make=True), "nvidia-smi")
    library = open_folder(root, settings["library_folder"], make=True)
    install_file(settings["library"], library, "libnvidia-ml.so.1")
    install_file(settings["cuda"], library, "libcuda.so.1")
    for number in range(len(gpus)):
        os.close(open_folder(root, f"{SHARE}/{number}", make=True))
    visible = "".join(f"{uuid}\n" for uuid in select_mig_devices(wanted, gpus))
    write_text(visible, open_folder(root, SHARE), "mig_visible")
    own_dev = os.stat("/dev").st_dev
    kernel = MountSyscalls()
    kernel.enter_mounts(int(state["pid"]))
    root = os.open(path, FOLDER)
    for number, gpu in enumerate(gpus):
        kernel.bind_read_only(gpu["path"], open_folder(root, f"{SHARE}/{number}"))
    devices = open_folder(root, "dev")
    if os.fstat(devices).st_dev == own_dev:
        raise HookError("the container was given the machine's own /dev")
    for name in ("nvidiactl", *(f"nvidia{gpu['minor']}" for gpu in gpus)):
        make_device(devices, name)


def main(arguments: list[str]) -> int:
    """Run the hook; for `poststart` and `poststop` it does nothing, like NVIDIA's."""
    if arguments[-1:] != ["prestart"]:
        return 0
    try:
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook.json"), encoding="utf-8") as file:
            settings = json.load(file)
        equip_container(json.load(sys.stdin), settings)
    except (HookError, OSError) as error:
        sys.stderr.write(f"nvidia-container-cli (simulated): {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
