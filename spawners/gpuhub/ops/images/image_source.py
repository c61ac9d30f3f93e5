"""Images of one Docker daemon as archives for others, without the layers that they have.

Docker's API always saves an image whole. When it loads an archive, it does not read the layers that it has, so these
can be left out of it.
"""

from __future__ import annotations

import json
import posixpath
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self

from gpuhub.ops.images.builder import find_image

_CHUNK_BYTES = 1 << 20
#: Archives are as large as images, and /tmp is in memory on some machines.
_FOLDER = "/var/tmp"  # noqa: S108  the file has no name
_END_OF_ARCHIVE = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True, slots=True)
class _Member:
    """A file of an archive, which is there with headers and padding from byte `start` to before `stop`."""

    start: int
    stop: int
    #: The number of the layer that it is; None for others.
    layer: int | None


class ImageSource:
    """The images of one daemon. Several threads may use it at the same time; an image is saved once for all of them."""

    def __init__(self, client: Any) -> None:
        """Read from this daemon, a docker.APIClient with a timeout for large images."""
        self._client = client
        self._saved: dict[str, tuple[IO[bytes], list[_Member]]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file, _ in self._saved.values():
            file.close()
        self._saved.clear()

    def find(self, name: str) -> dict[str, Any] | None:
        """Return Docker's description of an image; None if the daemon does not have it."""
        return find_image(self._client, name)

    def archive(self, name: str, without: int = 0) -> Iterator[bytes]:
        """Return an archive of an image as Docker loads it, in pieces.

        Args:
            without: How many layers are left out, counted from the lowest.
        """
        if not without:
            chunks: Iterator[bytes] = self._client.get_image(name, chunk_size=_CHUNK_BYTES)
            return chunks
        return self._read(name, without)

    def _read(self, name: str, without: int) -> Iterator[bytes]:
        file, members = self._save(name)
        for member in members:
            if member.layer is not None and member.layer < without:
                continue
            position = member.start
            while position < member.stop:
                with self._lock:
                    file.seek(position)
                    chunk = file.read(min(_CHUNK_BYTES, member.stop - position))
                position += len(chunk)
                yield chunk
        yield _END_OF_ARCHIVE

    def _save(self, name: str) -> tuple[IO[bytes], list[_Member]]:
        with self._lock:
            if name not in self._saved:
                file = tempfile.TemporaryFile(dir=_FOLDER)  # noqa: SIM115  closed by __exit__
                for chunk in self._client.get_image(name, chunk_size=_CHUNK_BYTES):
                    file.write(chunk)
                self._saved[name] = (file, _list_members(file))
            return self._saved[name]


def count_known_layers(image: Mapping[str, Any], target: Any) -> int:
    """Return how many layers of an image, from the lowest, a daemon has and can load an archive without.

    Args:
        image: Docker's description of the image.
        target: The daemon's docker.APIClient.
    """
    if _keeps_layers_as_blobs(target.info()):
        return 0
    layers = image["RootFS"].get("Layers") or []
    found = (target.inspect_image(other["Id"])["RootFS"].get("Layers") or [] for other in target.images())
    return max((_count_common(layers, others) for others in found), default=0)


def _keeps_layers_as_blobs(info: Mapping[str, Any]) -> bool:
    """Return whether the daemon uses containerd's image store, which wants every blob in an archive."""
    return any("io.containerd.snapshotter" in str(value) for _, value in info.get("DriverStatus") or ())


def _count_common(layers: Sequence[str], others: Sequence[str]) -> int:
    count = 0
    for layer, other in zip(layers, others, strict=False):
        if layer != other:
            break
        count += 1
    return count


def _list_members(file: IO[bytes]) -> list[_Member]:
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:") as archive:
        infos = archive.getmembers()
        end = archive.offset
    manifest = next(info for info in infos if info.name == "manifest.json")
    file.seek(manifest.offset_data)
    [image] = json.loads(file.read(manifest.size))
    # Equal layers are one file, or links to one, which is needed as long as the highest of them is.
    layers = {path: number for number, path in enumerate(image["Layers"])}
    for info in infos:
        if info.issym() and info.name in layers:
            target = posixpath.normpath(posixpath.join(posixpath.dirname(info.name), info.linkname))
            layers[target] = max(layers[info.name], layers.get(target, 0))
    stops = [info.offset for info in infos[1:]] + [end]
    return [
        _Member(start=info.offset, stop=stop, layer=layers.get(info.name))
        for info, stop in zip(infos, stops, strict=True)
    ]
