#!/usr/bin/env python3
"""Writes the settings of `device_runtime.py` for GPUs of this machine.

usage: runtime_settings.py FILE [GPUS]    GPUS: their indexes, such as 0,1; all without it
FOLDERS: folders that every container shows read-only if its image has them, separated by colons
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path


def read_gpus(indexes: str) -> dict[str, int]:
    """Return the minor numbers of the GPUs with these indexes, or of all, by UUID."""
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader", *([f"--id={indexes}"] if indexes else [])]
    rows = [line.split(", ") for line in subprocess.check_output(query, text=True).splitlines()]
    return {uuid: int(index) for index, uuid in rows}


def find_libraries() -> str:
    """Return the folder of the driver's libraries."""
    [path] = re.findall(r"libcuda\.so\.1 .*=> (.+)", subprocess.check_output(["ldconfig", "-p"], text=True))[:1]
    return str(Path(path).parent)


def main(file: str, indexes: str = "") -> None:
    """Write the file."""
    settings = {
        "runc": shutil.which("runc"),
        "gpus": read_gpus(indexes),
        "libraries": find_libraries(),
        "smi": shutil.which("nvidia-smi"),
        "folders": [folder for folder in os.environ.get("FOLDERS", "").split(":") if folder],
    }
    Path(file).write_text(json.dumps(settings), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
