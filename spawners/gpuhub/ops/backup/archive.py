"""The archive of a backup: a gzipped tar whose first member lists all others with their sizes and checksums."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import re
import shutil
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Annotated, BinaryIO, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.units import format_size
from gpuhub.ops.backup.encryption import MAGIC, DecryptingReader, EncryptingWriter

#: Version of the archive's format; a program refuses later ones.
FORMAT = 1
MANIFEST = "manifest.json"
#: Bounds of what is read: a manifest's size, the number of files, and the bytes before and besides them.
MAX_MANIFEST_BYTES = 4 << 20
MAX_FILES = 10_000
_OVERHEAD_BYTES, _FILE_OVERHEAD_BYTES = 8 << 20, 4096
_BLOCK = 1 << 20
#: Errors of file systems without hard links: those of USB sticks (FAT, exFAT), and some in the network.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
#: Names that archives have, and so no path outside of the folder to which they are extracted.
_NAME = re.compile(
    r"cluster\.toml|databases/(broker|hub)\.sqlite|databases/postgresql\.dump|named/[0-9]{1,4}"
    r"|(state|jupyterhub_config\.d)(/(?!\.{1,2}(/|$))[^/\x00]{1,255}){1,8}"
)


class ArchivedFile(BaseModel):
    """One file of the archive."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(max_length=1000)]
    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    #: Permissions.
    mode: Annotated[int, Field(ge=0, le=0o777)]
    #: The absolute path of a file that cluster.toml names.
    target: Annotated[str, Field(max_length=4096)] | None = None


class Manifest(BaseModel):
    """What the archive has, and of which head node."""

    model_config = ConfigDict(frozen=True)

    format: int
    #: Version of gpuhub that wrote it.
    version: str
    instance: str
    host: str
    #: Seconds since 1970.
    created_at: float
    #: Revision of the tables of the broker's store; None without a store.
    revision: str | None
    files: Annotated[tuple[ArchivedFile, ...], Field(max_length=MAX_FILES)]

    def find(self, name: str) -> ArchivedFile | None:
        return next((file for file in self.files if file.name == name), None)


def describe_file(name: str, path: Path, mode: int, target: Path | None = None) -> ArchivedFile:
    """Return a file's entry of the manifest."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = 0
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return ArchivedFile(
        name=name, size=size, sha256=digest.hexdigest(), mode=mode, target=None if target is None else str(target)
    )


def check_new_file(file: Path) -> None:
    """Check that a backup can be written to this file.

    Raises:
        SettingsError: It exists, or its folder does not.
    """
    if os.path.lexists(file):
        raise SettingsError(f"{file} exists: name another file, or remove it")
    if not file.parent.is_dir():
        raise SettingsError(f"{file.parent} is not a folder: create it, or name another file")


def write_archive(file: Path, manifest: Manifest, sources: Sequence[Path], passphrase: str | None) -> None:
    """Write the archive, readable by its owner only; a failure leaves no file.

    Args:
        file: Must not exist.
        manifest: The entries, in the order of `sources`.
        sources: The files, which nobody changes meanwhile.
        passphrase: Encrypts the archive; None: not encrypted.
    """
    check_new_file(file)
    part = file.with_name(f".{file.name}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as output:
            with ExitStack() as stack:
                sink: BinaryIO = output
                if passphrase is not None:
                    sink = cast("BinaryIO", stack.enter_context(EncryptingWriter(output, passphrase)))
                packed = stack.enter_context(gzip.GzipFile(filename="", fileobj=sink, mode="wb", compresslevel=6))
                tar = stack.enter_context(tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT))
                text = manifest.model_dump_json(indent=1).encode()
                tar.addfile(_build_member(MANIFEST, len(text)), io.BytesIO(text))
                for entry, source in zip(manifest.files, sources, strict=True):
                    with source.open("rb") as content:
                        tar.addfile(_build_member(entry.name, entry.size), content)
            output.flush()
            os.fsync(output.fileno())
        _name_new_file(part, file)
    except OSError as error:
        raise SetupError(f"the backup {file} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _name_new_file(part: Path, file: Path) -> None:
    """Give a finished file its name, unless another file has it in the meantime."""
    try:
        os.link(part, file)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        check_new_file(file)
        part.rename(file)


def is_encrypted(file: Path) -> bool:
    """Return whether a backup needs a passphrase.

    Raises:
        SettingsError: It cannot be read.
    """
    try:
        with file.open("rb") as content:
            return content.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise SettingsError(f"{file} cannot be read: {error.strerror}") from error


def extract_archive(file: Path, folder: Path, passphrase: str | None) -> Manifest:
    """Extract everything to an empty folder, check it, and return the manifest.

    Raises:
        SettingsError: It is not a backup, is damaged, is of a later version, or the passphrase is wrong.
        SetupError: It does not fit on the disk.
    """
    try:
        with _open_tar(file, passphrase) as (tar, source):
            manifest = _read_manifest(file, tar)
            total = sum(entry.size for entry in manifest.files)
            if total > (free := shutil.disk_usage(folder).free):
                raise SetupError(f"the backup needs {format_size(total)}, and {folder} has {format_size(free)} left")
            source.allow(total + len(manifest.files) * _FILE_OVERHEAD_BYTES + _OVERHEAD_BYTES)
            _extract_members(file, tar, manifest, folder)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise SetupError(f"{file} cannot be extracted: {error.strerror}") from error
        raise SettingsError(f"{file} is not a whole backup of gpuhub: {error}") from error
    return manifest


def _build_member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o600
    return member


class _BoundedReader(io.RawIOBase):
    """Reads no more than is allowed, so that a small file cannot become a large one."""

    def __init__(self, source: IO[bytes], limit: int) -> None:
        super().__init__()
        self._source, self._left = source, limit

    def readable(self) -> bool:
        return True

    def allow(self, limit: int) -> None:
        """Allow this number of bytes from here on."""
        self._left = limit

    def read(self, size: int = -1, /) -> bytes:
        if size < 0 or size > self._left:
            raise tarfile.ReadError("it has more than it lists")
        data = self._source.read(size)
        self._left -= len(data)
        return data


@contextmanager
def _open_tar(file: Path, passphrase: str | None) -> Iterator[tuple[tarfile.TarFile, _BoundedReader]]:
    with ExitStack() as stack:
        source: BinaryIO = stack.enter_context(file.open("rb"))
        if passphrase is not None:
            source = io.BufferedReader(cast("io.RawIOBase", DecryptingReader(source, passphrase)))
        packed = stack.enter_context(gzip.GzipFile(fileobj=source, mode="rb"))
        bounded = _BoundedReader(cast("IO[bytes]", packed), MAX_MANIFEST_BYTES + _OVERHEAD_BYTES)
        yield stack.enter_context(tarfile.open(fileobj=bounded, mode="r|")), bounded


def _read_manifest(file: Path, tar: tarfile.TarFile) -> Manifest:
    member = tar.next()
    if member is None or member.name != MANIFEST or not member.isreg() or member.size > MAX_MANIFEST_BYTES:
        raise SettingsError(f"{file} is not a backup of gpuhub: its first file is not {MANIFEST}")
    text = cast("IO[bytes]", tar.extractfile(member)).read()
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise SettingsError(f"{file}: {MANIFEST} is not valid: {where}: {first['msg']}") from None
    if manifest.format > FORMAT:
        raise SettingsError(
            f"{file} was written by gpuhub {manifest.version} in a format that this version does not know: install "
            f"gpuhub {manifest.version}"
        )
    counts = Counter(entry.name for entry in manifest.files)
    wrong = [name for name, count in counts.items() if not _NAME.fullmatch(name) or count > 1]
    if wrong:
        raise SettingsError(f"{file} lists {wrong[0]!r}, which no backup has, or has twice")
    return manifest


def _extract_members(file: Path, tar: tarfile.TarFile, manifest: Manifest, folder: Path) -> None:
    for entry in manifest.files:
        member = tar.next()
        if member is None or (member.name, member.size) != (entry.name, entry.size) or not member.isreg():
            raise SettingsError(f"{file} is damaged: {entry.name} does not follow where it should")
        path = folder / entry.name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        digest = hashlib.sha256()
        source = cast("IO[bytes]", tar.extractfile(member))
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as output:
            while block := source.read(_BLOCK):
                digest.update(block)
                output.write(block)
            output.flush()
            os.fsync(output.fileno())
        if digest.hexdigest() != entry.sha256:
            raise SettingsError(f"{file} is damaged: the checksum of {entry.name} is wrong")
    if tar.next() is not None:
        raise SettingsError(f"{file} has more than it lists")
