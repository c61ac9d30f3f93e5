"""What a courier packs from a home."""

from __future__ import annotations

import io
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
