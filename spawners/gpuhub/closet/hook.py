#!/usr/bin/python3 -IS
"""The simulated container toolkit: puts the granted cards into a starting container, as NVIDIA's own hook would.

Installed as `nvidia-container-runtime-hook` on a node's PATH, beside its settings `hook.json`. runc calls it with the
argument `prestart` and the container's state on standard input, after the container's mounts are made and before its
root is entered. It must be quick, so it imports little, nothing of gpuhub, and runs without site packages.

What a container gets: the library and nvidia-smi (written through the root file system, never through its mounts),
the granted cards' folders at /usr/share/nvidia-simulated/0, 1 … (bound read-only, so that load and faults are live),
beside them the file mig_visible with the UUIDs of the granted MIG devices, and /dev/nvidia0 … with /dev/nvidiactl.
These device nodes are the null device by another name: they give access to nothing, and only those of the granted
cards are there.

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


class Refused(Exception):
    """The container cannot start; the text is shown to whoever starts it."""


def visible_devices(environment: list[str]) -> str:
    """What the container is to see: a comma list of UUIDs and indexes, `all`, or nothing."""
    values = {}
    for item in environment:
        key, _, value = item.partition("=")
        values[key] = value
    capabilities = values.get("NVIDIA_DRIVER_CAPABILITIES") or "utility,compute"
    if not {"all", "utility"} & set(capabilities.split(",")):
        return ""
    return values.get("NVIDIA_VISIBLE_DEVICES", "")


def choose_cards(wanted: str, cards: list[dict[str, str]]) -> list[dict[str, str]]:
    """The wanted cards in the order of their indexes; Refused for one that the node lacks or that is broken."""
    if wanted in ("", "void", "none"):
        return []
    if wanted == "all":
        return cards
    by_name = {name: card for card in cards for name in (card["index"], card["uuid"], *mig_devices(card))}
    chosen = []
    for name in wanted.split(","):
        card = by_name.get(name)
        if card is None:
            raise Refused(f"device error: {name}: unknown device")
        if card.get("fault") in ("lost", "fallen_off_bus"):
            raise Refused(f"detection error: nvml error: {name}: gpu is lost")
        if card not in chosen:
            chosen.append(card)
    return sorted(chosen, key=lambda card: int(card["index"]))


def mig_devices(card: dict[str, str]) -> list[str]:
    """The UUIDs of a card's MIG devices."""
    return card.get("mig_devices", "").split()


def choose_mig_devices(wanted: str, chosen: list[dict[str, str]]) -> list[str]:
    """The MIG devices to show of the chosen cards: those named, and all of a card that is named itself."""
    names = set(wanted.split(","))
    return [
        uuid
        for card in chosen
        for uuid in mig_devices(card)
        if wanted == "all" or names & {uuid, card["uuid"], card["index"]}
    ]


def read_cards(folder: str) -> list[dict[str, str]]:
    """All cards of the node, by index, with their `path`."""
    cards = []
    for name in sorted(filter(str.isdigit, os.listdir(folder)), key=int):
        path = f"{folder}/{name}"
        card = {"path": path}
        for file in ("card", "live"):
            with open(f"{path}/{file}", encoding="utf-8") as lines:
                for line in lines:
                    key, _, value = line.rstrip("\n").partition(" ")
                    if key == "mig_device":
                        card["mig_devices"] = f"{card.get('mig_devices', '')} {value.split()[1]}"
                    else:
                        card[key] = value
        cards.append(card)
    return cards


def open_folder(base: int, path: str, *, make: bool = False) -> int:
    """Open a folder below `base` without following links; make what is missing when `make`."""
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
            raise Refused(f"{path} in the image is not a plain folder: {error.strerror}") from error
        os.close(current)
        current = following
    return current


def install_file(source: str, folder: int, name: str) -> None:
    """Copy a file into an open folder, in the place of whatever has its name."""
    fresh = f".{name}.new"
    _unlink(fresh, folder)
    target = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o755, dir_fd=folder)
    origin = os.open(source, os.O_RDONLY)
    remaining = os.fstat(origin).st_size
    while remaining > 0:
        remaining -= os.sendfile(target, origin, None, remaining)
    os.fchmod(target, 0o755)
    os.close(origin)
    os.close(target)
    os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)


def write_text(text: str, folder: int, name: str) -> None:
    """Write a small file into an open folder, in the place of whatever has its name."""
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


class Kernel:
    """The two system calls that Python 3.11 lacks."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def enter_mounts(self, pid: int) -> None:
        """Go on in the mount namespace of a process."""
        namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
        self._check(self._libc.setns(namespace, CLONE_NEWNS), "enter the container's mounts")
        os.close(namespace)

    def bind_read_only(self, source: str, folder: int) -> None:
        """Show the folder `source` at an open folder."""
        target = f"/proc/self/fd/{folder}".encode()
        flags = MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY
        self._check(self._libc.mount(source.encode(), target, None, MS_BIND, None), f"bind {source}")
        # The folder that was opened lies beneath the new mount: the remount needs the name of what is on top.
        top = os.readlink(target)
        self._check(self._libc.mount(None, top, None, MS_BIND | MS_REMOUNT | flags, None), f"protect {source}")

    def _check(self, result: int, what: str) -> None:
        if result:
            raise Refused(f"cannot {what}: {os.strerror(ctypes.get_errno())}")


def prestart(state: dict[str, Any], settings: dict[str, str]) -> None:
    """Equip the container whose state is given."""
    with open(f"{state['bundle']}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    wanted = visible_devices(config["process"]["env"])
    cards = choose_cards(wanted, read_cards(settings["cards"]))
    if not cards:
        return
    path = os.path.join(state["bundle"], config["root"]["path"])
    os.umask(0o022)
    root = os.open(path, FOLDER)
    install_file(settings["smi"], open_folder(root, "usr/bin", make=True), "nvidia-smi")
    library = open_folder(root, settings["library_folder"], make=True)
    install_file(settings["library"], library, "libnvidia-ml.so.1")
    for number in range(len(cards)):
        os.close(open_folder(root, f"{SHARE}/{number}", make=True))
    visible = "".join(f"{uuid}\n" for uuid in choose_mig_devices(wanted, cards))
    write_text(visible, open_folder(root, SHARE), "mig_visible")
    own_dev = os.stat("/dev").st_dev
    kernel = Kernel()
    kernel.enter_mounts(int(state["pid"]))
    root = os.open(path, FOLDER)
    for number, card in enumerate(cards):
        kernel.bind_read_only(card["path"], open_folder(root, f"{SHARE}/{number}"))
    devices = open_folder(root, "dev")
    if os.fstat(devices).st_dev == own_dev:
        raise Refused("the container was given the machine's own /dev")
    for name in ("nvidiactl", *(f"nvidia{card['minor']}" for card in cards)):
        make_device(devices, name)


def main(arguments: list[str]) -> int:
    """Run the hook; NVIDIA's also knows `poststart` and `poststop`, and does nothing then."""
    if arguments[-1:] != ["prestart"]:
        return 0
    try:
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook.json"), encoding="utf-8") as file:
            settings = json.load(file)
        prestart(json.load(sys.stdin), settings)
    except (Refused, OSError) as error:
        sys.stderr.write(f"nvidia-container-cli (simulated): {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
