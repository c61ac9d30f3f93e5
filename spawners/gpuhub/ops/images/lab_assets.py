"""JupyterLab's files for browsers, copied out of the notebook image, so that the hub serves them to everybody.

A user's own server has the same files, but under an address of its own, which browsers do not share or keep.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from gpuhub.common.errors import SetupError
from gpuhub.ops.images.builder import find_image
from gpuhub.web.lab_assets import CURRENT_FILE, MAIN_FILE

#: Where the notebook image has them.
STATIC_FOLDER = "/opt/gpuhub/share/jupyter/lab/static"
#: Versions that are kept: notebooks that run longer than an update use the files of theirs.
KEPT_VERSIONS = 4
#: Fonts and pictures are compressed already; small files do not pay.
_COMPRESSED_SUFFIXES = frozenset({".js", ".css", ".svg", ".json", ".map", ".html"})
_LEAST_BYTES = 1024


def ensure_lab_assets(client: Any, image: str, folder: Path) -> None:
    """Copy the files of an image to `folder/KEY`, where KEY is the content hash that JupyterLab's build gave them.

    Args:
        client: The docker.APIClient of a daemon that has the image.

    Raises:
        SetupError: The image has no JupyterLab where it should be.
    """
    description = find_image(client, image) or {}
    current = folder / CURRENT_FILE
    known = json.loads(current.read_text(encoding="utf-8")) if current.exists() else {}
    if known.get("image") == description.get("Id") and (folder / known["key"]).is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        copied = Path(temporary, "static")
        copied.mkdir(mode=0o755)
        _copy_out(client, image, copied)
        key = _find_key(copied, image)
        if not (folder / key).exists():
            _compress(copied)
            copied.rename(folder / key)
        fresh = Path(temporary, CURRENT_FILE)
        fresh.write_text(json.dumps({"image": description.get("Id"), "key": key}), encoding="utf-8")
        fresh.replace(current)
    (folder / key).touch()
    versions = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for old in versions[:-KEPT_VERSIONS]:
        shutil.rmtree(old)


def _copy_out(client: Any, image: str, target: Path) -> None:
    container = client.create_container(image, command=["true"], network_disabled=True)["Id"]
    try:
        chunks, _ = client.get_archive(container, STATIC_FOLDER)
        with tarfile.open(fileobj=cast("IO[bytes]", _ChunkReader(chunks)), mode="r|") as archive:
            # All are in one folder, so only their names count.
            for member in archive:
                if (file := archive.extractfile(member)) is not None:
                    (target / Path(member.name).name).write_bytes(file.read())
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


def _compress(static: Path) -> None:
    for file in static.iterdir():
        if file.suffix in _COMPRESSED_SUFFIXES and file.stat().st_size >= _LEAST_BYTES:
            file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes(), 6, mtime=0))
