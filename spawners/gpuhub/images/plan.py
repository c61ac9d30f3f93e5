"""What is built and under which tags: pure. A tag is a digest of everything that goes into the image."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from gpuhub.tables import Images

BASE = "gpuhub/base"
PYTHON = "gpuhub/python"
NOTEBOOK = "gpuhub/notebook"

#: Raise it when the code that makes the base image's file system changes what comes out.
_BASE_RECIPE = 1

#: A source file's path below its root, and its content.
Files = Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The files from which images are built, by their paths below the folder named."""

    #: images/base
    base: Files
    #: images/python
    python: Files
    #: images/notebook
    notebook: Files
    #: extensions: the gpu-launch distribution.
    extensions: Files
    #: notebooks: the examples.
    notebooks: Files


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Tags of the three images, and the key of the wheels for the middle one."""

    base: str
    python: str
    notebook: str
    wheels: str

    @property
    def wanted_on_nodes(self) -> tuple[str, str]:
        """The full names that every node needs: notebooks and workers run the first, the GPU agent the second."""
        return f"{NOTEBOOK}:{self.notebook}", f"{BASE}:{self.base}"


def build_plan(sources: Sources, settings: Images, machine: str) -> Plan:
    """The plan for a machine type such as `x86_64`."""
    torch = [settings.torch, settings.torch_build, settings.torch_index, machine]
    lock = sources.python["requirements.lock"].decode()
    wheels = digest(lock, torch)
    driver = [line for line in lock.splitlines() if line.startswith("nvidia-ml-py==")]
    base = digest(_BASE_RECIPE, settings.debian_suite, machine, driver, sources.base)
    python = digest(base, wheels, sources.python)
    return Plan(
        base=base,
        python=python,
        notebook=digest(python, sources.notebook, sources.extensions, sources.notebooks),
        wheels=wheels,
    )


def digest(*parts: object) -> str:
    """Twelve hexadecimal digits that differ whenever the parts do; mappings of files count in any order."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, Mapping):
            content = {name: hashlib.sha256(data).hexdigest() for name, data in part.items()}
            total.update(json.dumps(content, sort_keys=True).encode())
        else:
            total.update(json.dumps(part).encode())
        total.update(b"\n")
    return total.hexdigest()[:12]


def packages_of(text: str) -> list[str]:
    """Package names from a file with one a line and `#` comments."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]
