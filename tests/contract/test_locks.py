"""Locks: each package has one version, and each of its files a hash."""

from __future__ import annotations

import json
import re
import tomllib
from itertools import combinations
from pathlib import Path

import pytest

from gpuhub.ops.images.build_plan import list_locked_names

ROOT = Path(__file__).parents[2]
#: Locks of the images' layers, lowest first.
LAYERS = tuple(f"images/python/{layer}.lock" for layer in ("science", "lab", "llm"))
#: That of an image beside those, which is based on the first.
SERVICES = "images/python/services.lock"
LOCKS = ("spawners/requirements.lock", "tests/requirements.lock", *LAYERS, SERVICES)
_PIN = re.compile(r"[a-z0-9._-]+(\[[a-z0-9,_-]+\])?==[^ ;]+( ; [^\\]+)?( --hash=sha256:[0-9a-f]{64})+")


@pytest.mark.parametrize("lock", LOCKS)
def test_each_line_of_a_lock_has_a_version_and_hashes(lock: str) -> None:
    """pip would install a line without a hash from any file that an index serves under the name."""
    text = (ROOT / lock).read_text(encoding="utf-8").replace(" \\\n   ", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) > 20
    assert [line for line in lines if not _PIN.fullmatch(line)] == []


@pytest.mark.parametrize("lock", [*LAYERS, SERVICES])
def test_the_locks_of_the_images_have_no_conditions(lock: str) -> None:
    """pip would compare them with the head node's Python instead of the images'."""
    assert ";" not in (ROOT / lock).read_text(encoding="utf-8")


def test_no_package_is_in_two_layers_of_the_images() -> None:
    """An upper layer could not replace it, and torch's own layer changes with torch alone."""
    names = [list_locked_names((ROOT / lock).read_text(encoding="utf-8")) for lock in LAYERS]
    assert [first & second for first, second in combinations(names, 2)] == [set(), set(), set()]
    services = list_locked_names((ROOT / SERVICES).read_text(encoding="utf-8"))
    assert services & names[0] == set()
    assert not [name for name in services.union(*names) if re.match(r"torch$|triton$|nvidia-(?!ml-py)", name)]


@pytest.mark.parametrize("folder", ["spawners/proxy", "extensions/gpuhub_lab"])
def test_each_package_of_npm_has_its_integrity(folder: str) -> None:
    """npm refuses another file; the entry without a name is the project itself, and must ask for what the lock has."""
    lock = json.loads((ROOT / folder / "package-lock.json").read_text(encoding="utf-8"))
    assert [name for name, entry in lock["packages"].items() if name and "integrity" not in entry] == []
    project = json.loads((ROOT / folder / "package.json").read_text(encoding="utf-8"))
    for kind in ("dependencies", "devDependencies"):
        assert lock["packages"][""].get(kind, {}) == project.get(kind, {})


def test_the_proxy_is_installed_from_its_lock() -> None:
    """`npm install` would write another lock where the two differ."""
    assert "npm ci" in (ROOT / "spawners/setup.sh").read_text(encoding="utf-8")


def test_installations_accept_nothing_but_the_locks() -> None:
    """Each installation from a lock asks for hashes and refuses source distributions."""
    script = (ROOT / "spawners/venv.sh").read_text(encoding="utf-8")
    assert "locked=(--require-hashes --only-binary :all:)" in script
    installations = [line for line in script.splitlines() if "requirements.lock" in line and "pip[@]" in line]
    assert len(installations) == 2
    assert all('"${locked[@]}"' in line for line in installations)
    assert "--require-hashes" in (ROOT / "images/python/packages.Dockerfile").read_text(encoding="utf-8")


def test_the_lab_extension_has_one_version_and_runs_no_package() -> None:
    """`gpuhub up` builds it as root: npm runs no script of a package, and brings the bundler alone."""
    folder = ROOT / "extensions/gpuhub_lab"
    project = json.loads((folder / "package.json").read_text(encoding="utf-8"))
    version = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert project["version"] == version
    assert list(project["dependencies"]) == ["esbuild"]
    settings = (folder / ".npmrc").read_text(encoding="utf-8").split()
    assert {"ignore-scripts=true", "omit=dev"} <= {*settings}
