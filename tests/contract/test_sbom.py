"""The bills of materials: complete, and valid in CycloneDX."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support import sbom
from tests.support.sbom import ROOT

STATUS = """Package: git
Status: install ok installed
Architecture: amd64
Version: 1:2.39.5-0+deb12u3

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1.0
"""


def write_root_tar(file: Path) -> Path:
    with tarfile.open(file, "w") as archive:
        entry = tarfile.TarInfo("./var/lib/dpkg/status")
        entry.size = len(STATUS)
        archive.addfile(entry, io.BytesIO(STATUS.encode()))
    return file


def test_every_package_of_a_lock_is_listed(tmp_path: Path) -> None:
    """Python packages as in the lock, and the proxy's with their hashes."""
    lock = ROOT / "spawners/requirements.lock"
    pins = [line for line in lock.read_text(encoding="utf-8").splitlines() if "==" in line]
    proxy = json.loads((ROOT / "spawners/proxy/package-lock.json").read_text(encoding="utf-8"))
    components = [*sbom.list_locked_packages(lock), *sbom.list_npm_packages(ROOT / "spawners/proxy/package-lock.json")]
    assert len(components) == len(pins) + len(proxy["packages"]) - 1
    file = tmp_path / "head.json"
    assert sbom.write_bill(file, "head", components) == len({str(component.purl) for component in components})
    listed = {component["purl"]: component for component in json.loads(file.read_text())["components"]}
    hub = next(line.split()[0].partition("==")[2] for line in pins if line.startswith("jupyterhub=="))
    assert f"pkg:pypi/jupyterhub@{hub}" in listed
    (digest,) = listed["pkg:npm/configurable-http-proxy@5.1.0"]["hashes"]
    assert (digest["alg"], len(digest["content"])) == ("SHA-512", 128)


def test_images_are_listed_with_debian_packages_and_wheels(tmp_path: Path) -> None:
    """A package that was removed is not one of the image."""
    with zipfile.ZipFile(tmp_path / "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl", "w"):
        pass
    components = [
        *sbom.list_debian_packages(write_root_tar(tmp_path / "root.tar")),
        *sbom.list_wheels(tmp_path),
    ]
    assert [component.bom_ref.value for component in components] == [
        "pkg:deb/debian/git@1:2.39.5-0%2Bdeb12u3?arch=amd64",
        "pkg:pypi/torch@2.13.0%2Bcpu",
    ]
    assert sbom.write_bill(tmp_path / "images.json", "images", components) == 2


def test_a_bill_that_breaks_the_schema_is_refused(tmp_path: Path) -> None:
    """And is not written."""
    (component,) = sbom.list_debian_packages(write_root_tar(tmp_path / "root.tar"))
    component.hashes.add(sbom.HashType(alg=sbom.HashAlgorithm.SHA_256, content="no digest"))
    with pytest.raises(ValueError, match="no digest"):
        sbom.write_bill(tmp_path / "images.json", "images", [component])
    assert not (tmp_path / "images.json").exists()
