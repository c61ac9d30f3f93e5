"""JupyterLab's files and its extensions', copied out of the notebook image, so that the hub serves them to everybody.

A user's own server has the same files, but under an address of its own, which browsers do not share or keep.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from gpuhub.common.errors import SetupError
from gpuhub.ops.images.builder import find_image
from gpuhub.web.lab_assets import CURRENT_FILE, MAIN_FILE, LabAssets, read_current

#: Where the notebook image has them.
STATIC_FOLDER = "/opt/gpuhub/share/jupyter/lab/static"
EXTENSIONS_FOLDER = "/opt/gpuhub/share/jupyter/labextensions"
#: Versions of each of the two that are kept: notebooks that run longer than an update use the files of theirs.
KEPT_VERSIONS = 4
#: Fonts and pictures are compressed already; small files do not pay.
_COMPRESSED_SUFFIXES = frozenset({".js", ".css", ".svg", ".json", ".map", ".html"})
_LEAST_BYTES = 1024


def ensure_lab_assets(client: Any, image: str, folder: Path) -> None:
    """Copy the files of an image to folders of `folder`, named by keys that are hashes of their content.

    The key of JupyterLab's own files is the one that its build gave them.

    Args:
        client: The docker.APIClient of a daemon that has the image.

    Raises:
        SetupError: The image has no JupyterLab where it should be.
    """
    description = find_image(client, image) or {}
    known = read_current(folder)
    if known and known.image == description.get("Id") and all((folder / key).is_dir() for key in known.keys):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        static, extensions = Path(temporary, "static"), Path(temporary, "labextensions")
        _copy_out(client, image, Path(temporary))
        key, extensions_key = _find_key(static, image), _hash_files(extensions)
        for copied, name in ((static, key), (extensions, extensions_key)):
            if not (folder / name).exists():
                _compress(copied)
                copied.rename(folder / name)
            (folder / name).touch()
        current = LabAssets(
            image=description.get("Id"),
            key=key,
            extensions_key=extensions_key,
            extensions=_list_extensions(folder / extensions_key),
        )
        fresh = Path(temporary, CURRENT_FILE)
        fresh.write_text(json.dumps(asdict(current)), encoding="utf-8")
        fresh.replace(folder / CURRENT_FILE)
    _remove_old_versions(folder)


def _remove_old_versions(folder: Path) -> None:
    by_kind: dict[bool, list[Path]] = {}
    for path in folder.iterdir():
        if path.is_dir():
            by_kind.setdefault(any(path.glob("main.*.js")), []).append(path)
    for versions in by_kind.values():
        for old in sorted(versions, key=lambda path: path.stat().st_mtime)[:-KEPT_VERSIONS]:
            shutil.rmtree(old)


def _copy_out(client: Any, image: str, target: Path) -> None:
    """Copy both folders below `target`, with the names that they have in the image."""
    container = client.create_container(image, command=["true"], network_disabled=True)["Id"]
    try:
        for source in (STATIC_FOLDER, EXTENSIONS_FOLDER):
            (target / Path(source).name).mkdir(mode=0o755)
            chunks, _ = client.get_archive(container, source)
            with tarfile.open(fileobj=cast("IO[bytes]", _ChunkReader(chunks)), mode="r|") as archive:
                for member in archive:
                    if member.isreg() and (file := archive.extractfile(member)) is not None:
                        copy = target / PurePosixPath(member.name)
                        copy.parent.mkdir(parents=True, exist_ok=True)
                        copy.write_bytes(file.read())
    finally:
        client.remove_container(container, force=True)


class _ChunkReader:
    """A file to read from over pieces of bytes."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (chunk := next(self._chunks, b"")):
            self._rest += chunk
        piece, self._rest = self._rest[:size], self._rest[size:]
        return piece


def _find_key(static: Path, image: str) -> str:
    names = [match[1] for file in static.iterdir() if (match := MAIN_FILE.fullmatch(file.name))]
    if len(names) != 1:
        raise SetupError(f"{image} has {len(names)} files main.HASH.js in {STATIC_FOLDER}, and one is expected")
    return names[0]


def _hash_files(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(folder)}\n{file.stat().st_size}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _list_extensions(folder: Path) -> dict[str, str]:
    """Return the path of the file that JupyterLab loads first of each extension, by the extension's name."""
    files = [*folder.glob("*/package.json"), *folder.glob("@*/*/package.json")]
    packages = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return {package["name"]: package["jupyterlab"]["_build"]["load"] for package in packages}


def _compress(folder: Path) -> None:
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        if file.suffix in _COMPRESSED_SUFFIXES and file.stat().st_size >= _LEAST_BYTES:
            file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes(), 6, mtime=0))
