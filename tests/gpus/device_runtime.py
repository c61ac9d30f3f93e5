#!/usr/bin/env python3
"""A container runtime for machines with NVIDIA's driver but without its container toolkit: runc, and before it the GPUs.

Docker calls it in place of runc. When a container is created that asks for GPUs (NVIDIA_VISIBLE_DEVICES, which Docker sets
for `--gpus`), its configuration gets the device nodes, the rules of its device list, and the driver's libraries, as
NVIDIA's runtime does it. Only the GPUs that the node's settings list exist there.

The settings are `runtime.json` next to this file: {"runc": path, "gpus": {UUID: minor number}, "libraries": folder,
"smi": path, "folders": [shown read-only in every container whose image has such a folder]}.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

LIBRARIES = "/usr/lib/x86_64-linux-gnu"
#: What compute and nvidia-smi need of the driver's libraries.
_STEMS = (
    "libcuda.so.",
    "libcudadebugger.so.",
    "libnvidia-ml.so.",
    "libnvidia-nvvm.so.",
    "libnvidia-ptxjitcompiler.so.",
)
_SHARED_DEVICES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


def choose_gpus(wanted: str, gpus: dict[str, int]) -> list[int]:
    """Return the minor numbers of the wanted GPUs: `all`, or a comma list of UUIDs or positions.

    Raises:
        ValueError: This node has no such GPU.
    """
    if wanted in ("", "void", "none"):
        return []
    if wanted == "all":
        return list(gpus.values())
    uuids = list(gpus)
    names = [uuids[int(name)] if name.isdigit() and int(name) < len(uuids) else name for name in wanted.split(",")]
    if missing := [name for name in names if name not in gpus]:
        raise ValueError(f"this node has no GPU {', '.join(missing)}; it has {', '.join(uuids)}")
    return [gpus[name] for name in names]


def add_gpus(config: dict[str, Any], minors: list[int], settings: dict[str, Any]) -> None:
    """Add device nodes, their rules and the driver's files to a container's configuration."""
    devices = config["linux"].setdefault("devices", [])
    rules = config["linux"].setdefault("resources", {}).setdefault("devices", [])
    for path in (*(f"/dev/nvidia{minor}" for minor in minors), *_SHARED_DEVICES):
        if not Path(path).exists():
            continue
        number = Path(path).stat().st_rdev
        common = {"type": "c", "major": os.major(number), "minor": os.minor(number)}
        devices.append({**common, "path": path, "fileMode": stat.S_IFCHR | 0o666, "uid": 0, "gid": 0})
        rules.append({**common, "allow": True, "access": "rw"})
    for file in sorted(Path(settings["libraries"]).iterdir()):
        if file.name.startswith(_STEMS):
            add_mount(config, str(file.resolve()), f"{LIBRARIES}/{file.name}")
    add_mount(config, settings["smi"], "/usr/bin/nvidia-smi")


def add_mount(config: dict[str, Any], source: str, target: str) -> None:
    """Show a file or folder of the machine read-only in the container."""
    options = ["rbind", "ro", "nosuid", "nodev"]
    config["mounts"].append({"type": "bind", "source": source, "destination": target, "options": options})


def equip(bundle: Path, settings: dict[str, Any]) -> None:
    """Rewrite the configuration of a container that is to be created."""
    file = bundle / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    environment = dict(item.partition("=")[::2] for item in config["process"].get("env", []))
    minors = choose_gpus(environment.get("NVIDIA_VISIBLE_DEVICES", ""), settings["gpus"])
    if minors:
        add_gpus(config, minors, settings)
    root = bundle / config["root"]["path"]
    for folder in settings["folders"]:
        if (root / folder.lstrip("/")).is_dir():
            add_mount(config, folder, folder)
    file.write_text(json.dumps(config), encoding="utf-8")


def main(arguments: list[str]) -> None:
    """Equip the container of `create`, and become runc."""
    settings = json.loads((Path(__file__).resolve().parent / "runtime.json").read_text(encoding="utf-8"))
    if "create" in arguments:
        try:
            equip(Path(arguments[arguments.index("--bundle") + 1]), settings)
        except (ValueError, OSError) as error:
            sys.exit(f"device_runtime: {error}")
    os.execv(settings["runc"], [settings["runc"], *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
