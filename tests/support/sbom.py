"""Write CycloneDX bills of materials into a folder: `python -m tests.support.sbom DIST [INSTANCE]` (`make sbom`).

`head-node.cdx.json` has the locked packages of the head node and its proxy, `tests.cdx.json` those of the tests. With the
images of an instance on this machine, `images.cdx.json` has their Debian packages and wheels.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.utils import parse_wheel_filename

from gpuhub.common.paths import Paths

ROOT = Path(__file__).parents[2]
_PIN = re.compile(r"^([a-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)
_DPKG_STATUS = "./var/lib/dpkg/status"


def list_locked_packages(lock: Path) -> Iterator[Component]:
    """Return the packages of a lock of Python packages.

    Without their hashes: those in CycloneDX are of one file, and the lock has those of each platform's file.
    """
    for name, version in _PIN.findall(lock.read_text(encoding="utf-8")):
        yield _build_component("pypi", name, version)


def list_npm_packages(lock: Path) -> Iterator[Component]:
    """Return the packages of a package-lock.json, with the hashes of their archives."""
    packages: dict[str, dict[str, Any]] = json.loads(lock.read_text(encoding="utf-8"))["packages"]
    for path, entry in packages.items():
        if path:
            scope, _, name = path.rpartition("node_modules/")[2].rpartition("/")
            digest = base64.b64decode(entry["integrity"].removeprefix("sha512-")).hex()
            yield _build_component("npm", name, entry["version"], namespace=scope, sha512=digest)


def list_debian_packages(root_tar: Path) -> Iterator[Component]:
    """Return the installed packages of the base image's file system."""
    with tarfile.open(root_tar) as archive:
        status = archive.extractfile(_DPKG_STATUS)
        if status is None:
            raise ValueError(f"{root_tar}: {_DPKG_STATUS} is not a file")
        for paragraph in status.read().decode().split("\n\n"):
            fields = dict(re.findall(r"^(Package|Version|Architecture|Status): (.+)$", paragraph, re.MULTILINE))
            if fields.get("Status") == "install ok installed":
                qualifiers = {"arch": fields["Architecture"]}
                yield _build_component(
                    "deb", fields["Package"], fields["Version"], namespace="debian", qualifiers=qualifiers
                )


def list_wheels(folder: Path) -> Iterator[Component]:
    """Return the packages of a folder of wheels, with the hashes of the wheels."""
    for wheel in sorted(folder.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(wheel.name)
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        yield _build_component("pypi", name, str(version), sha256=digest)


def _build_component(
    kind: str,
    name: str,
    version: str,
    *,
    namespace: str = "",
    qualifiers: dict[str, str] | None = None,
    sha256: str = "",
    sha512: str = "",
) -> Component:
    purl = PackageURL(kind, namespace or None, name, version, qualifiers)
    hashes = [
        HashType(alg=algorithm, content=content)
        for algorithm, content in ((HashAlgorithm.SHA_256, sha256), (HashAlgorithm.SHA_512, sha512))
        if content
    ]
    return Component(
        name=name,
        version=version,
        group=namespace or None,
        type=ComponentType.LIBRARY,
        purl=purl,
        bom_ref=purl.to_string(),
        hashes=hashes,
    )


def write_bill(file: Path, name: str, components: Iterable[Component]) -> int:
    """Write a bill of materials, and return its number of components.

    Raises:
        ValueError: The bill does not follow the schema.
    """
    bom = Bom(components={component.bom_ref.value: component for component in components}.values())
    bom.metadata.component = Component(name=name, type=ComponentType.APPLICATION, bom_ref=name)
    bom.register_dependency(bom.metadata.component, bom.components)
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if problem is not None:
        raise ValueError(f"{file}: {problem}")
    file.write_text(text + "\n", encoding="utf-8")
    return len(bom.components)


def main(folder: Path, instance: str) -> None:
    """Write all bills of materials that can be made on this machine."""
    folder.mkdir(exist_ok=True)
    head = list(list_locked_packages(ROOT / "spawners/requirements.lock"))
    head += list_npm_packages(ROOT / "spawners/proxy/package-lock.json")
    bills = {"head-node": head, "tests": list(list_locked_packages(ROOT / "tests/requirements.lock"))}
    images = Paths(instance).images
    roots, wheels = list(images.glob("base/*.tar")), list(images.glob("wheels/*[0-9a-f]"))
    if len(roots) == 1 and wheels:
        bills["images"] = [*list_debian_packages(roots[0]), *chain.from_iterable(map(list_wheels, wheels))]
    else:
        print(f"{images} has no images: `sudo make up` builds them. Without them there is no images.cdx.json.")
    for name, components in bills.items():
        file = folder / f"{name}.cdx.json"
        print(f"{file}: {write_bill(file, f'gpuhub {name}', components)} packages")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "gpuhub")
