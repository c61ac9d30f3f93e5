"""What a courier packs from a home."""

from __future__ import annotations

import io
import os
import socket
import tarfile

from gpu_launch.cli import cp
from gpu_launch.courier import files


def test_every_name_of_a_file_arrives_with_its_content(tmp_path):
    """A laptop refuses hard links, so that none may be in the tar."""
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "step-100.pt").write_bytes(b"weights")
    (folder / "last.pt").hardlink_to(folder / "step-100.pt")
    (folder / "best.pt").symlink_to("last.pt")
    sink = io.BytesIO()
    assert files.write_tar(folder, sink) == {"files": 3, "bytes": 14}
    sink.seek(0)
    with tarfile.open(fileobj=sink, mode="r|") as tar:
        assert cp.unpack(tar, tmp_path / "copy", into=False) == (3, 14)
    assert [(tmp_path / "copy" / name).read_bytes() for name in ("step-100.pt", "last.pt", "best.pt")] == [
        b"weights"
    ] * 3


class _RemovingSink(io.BytesIO):
    """Removes a file as soon as something is written."""

    def __init__(self, file):
        super().__init__()
        self._file = file

    def write(self, data):
        self._file.unlink(missing_ok=True)
        return super().write(data)


def test_what_is_removed_meanwhile_is_left_out(tmp_path):
    """A job that runs removes its older checkpoints; sockets and pipes are never sent."""
    folder = tmp_path / "train"
    (folder / "logs" / "empty").mkdir(parents=True)
    (folder / "a.pt").write_bytes(bytes(1 << 20))
    (folder / "b.pt").write_bytes(b"old")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
    sink = _RemovingSink(folder / "b.pt")
    assert files.write_tar(folder, sink) == {"files": 1, "bytes": 1 << 20}
    sink.seek(0)
    with tarfile.open(fileobj=sink) as tar:
        assert tar.getnames() == ["train", "train/a.pt", "train/logs", "train/logs/empty"]
