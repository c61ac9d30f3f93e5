"""Lists and copies of datasets: what is refused, and streams between nodes that break or lie."""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuhub.storage import staging_script as staging
from gpuhub.storage.staging_script import StagingError

SECRET = "5ecret"


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    root = tmp_path / "digits"
    (root / "train").mkdir(parents=True)
    (root / "train" / "0.bin").write_bytes(os.urandom(3 * 1024 * 1024 + 17))
    (root / "train" / "empty").touch()
    (root / "labels").symlink_to("train/0.bin")
    for path in (root, root / "train"):
        path.chmod(0o755)
    for file in (root / "train").iterdir():
        file.chmod(0o644)
    return root


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "copy"
    folder.mkdir()
    return folder


def run(task: dict[str, Any]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    staging.run(task, SECRET, lines.append)
    return lines


def copy_task(root: Path, **changes: Any) -> dict[str, Any]:
    (listed,) = run({"do": "list", "folder": str(root)})
    task = {"do": "copy", "digest": listed["digest"], "bytes": listed["bytes"], "spare": 1}
    return {**task, "read": str(root), "write": None, "next": None, **changes}


def stream_of(root: Path) -> bytes:
    """Return what a node sends for a folder."""
    sender = staging.Sender.__new__(staging.Sender)
    sent = io.BytesIO(SECRET.encode())
    sent.seek(0, io.SEEK_END)
    sender.error, sender._peer = None, _Peer(sent)  # type: ignore[assignment]
    for entry, content in staging.read_folder(root):
        for _ in sender.write(entry, content):
            pass
    sender._send(struct.pack(">I", 0))
    return sent.getvalue()


class _Peer:
    def __init__(self, sent: io.BytesIO) -> None:
        self.sendall = sent.write

    def close(self) -> None:
        return


def receive(stream: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    for entry, content in staging.receive(io.BytesIO(stream), SECRET):
        yield entry, b"".join(content)


def test_list_is_of_names_sizes_and_times(dataset: Path) -> None:
    """The digest is that of an equal folder, and changes with a file's name, size, time and mode."""
    (before,) = run({"do": "list", "folder": str(dataset)})
    assert before == {"digest": before["digest"], "files": 2, "bytes": 3 * 1024 * 1024 + 17}
    digests = {before["digest"]}
    file = dataset / "train" / "0.bin"
    for change in (
        lambda: os.utime(file, ns=(1, 1)),
        lambda: file.chmod(0o744),
        lambda: (dataset / "train" / "new").write_bytes(b""),
        lambda: (dataset / "train" / "new").write_bytes(b"1"),
    ):
        change()
        digests.add(run({"do": "list", "folder": str(dataset)})[0]["digest"])
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (
            lambda root: (root / "train" / "0.bin").chmod(0o640),
            r"train/0.bin \(mode 0640\) may not be read by all users",
        ),
        (lambda root: (root / "train").chmod(0o754), r"train \(mode 0754\) may not be read by all users"),
        (lambda root: root.chmod(0o700), r"the folder itself \(mode 0700\) may not be read by all users"),
        (lambda root: os.mkfifo(root / "pipe", 0o644), "pipe is neither a file nor a folder nor a link"),
        (lambda root: (root / os.fsdecode(b"\xff")).touch(), "the name is not UTF-8"),
        (lambda root: root.rename(root.with_name("gone")), "there is no .*digits"),
    ],
)
def test_what_all_users_may_not_read_is_refused(dataset: Path, change: Any, refusal: str) -> None:
    """The text names the file and why it matters."""
    change(dataset)
    with pytest.raises(StagingError, match=refusal):
        run({"do": "list", "folder": str(dataset)})


def test_copy_is_equal_and_passed_on(dataset: Path, tmp_path: Path, copy: Path) -> None:
    """One node reads the folder and writes its copy, the next gets the same bytes, times and modes over TCP."""
    second = tmp_path / "second"
    second.mkdir()
    task = copy_task(dataset)
    ends: list[dict[str, Any]] = []
    node = threading.Thread(target=lambda: ends.extend(run({**task, "read": None, "write": str(second)})))
    node.start()
    assert run({**task, "write": str(copy), "next": "127.0.0.1"})[-1] == {"done": True, "next_error": None}
    node.join(30)
    assert ends[-1] == {"done": True, "next_error": None}
    for folder in (copy, second):
        assert (folder / "train" / "0.bin").read_bytes() == (dataset / "train" / "0.bin").read_bytes()
        assert (folder / "labels").readlink() == Path("train/0.bin")
        assert run({"do": "list", "folder": str(folder)}) == run({"do": "list", "folder": str(dataset)})


def test_interrupted_copy_is_not_taken_for_a_whole_one(dataset: Path, copy: Path) -> None:
    """A stream that ends early leaves a folder with another digest, and the reason."""
    stream = stream_of(dataset)
    writer = staging.FolderWriter(copy)
    with pytest.raises(StagingError, match="the previous node stopped sending"):
        for entry, content in staging.receive(io.BytesIO(stream[:-100_000]), SECRET):
            for _ in writer.write(entry, content):
                pass
    whole = run({"do": "list", "folder": str(dataset)})
    copy.chmod(0o755)
    (copy / "train").chmod(0o755)
    for file in (copy / "train").iterdir():
        file.chmod(0o644)
    assert run({"do": "list", "folder": str(copy)}) != whole


def test_lies_of_the_previous_node_are_found(dataset: Path) -> None:
    """Other contents than the hash says, another secret, and entries that are too long."""
    stream = stream_of(dataset)
    content = (dataset / "train" / "0.bin").read_bytes()
    assert {entry["path"]: data for entry, data in receive(stream)}["train/0.bin"] == content
    with pytest.raises(StagingError, match=r"train/0.bin arrived with other contents than were sent"):
        list(receive(stream.replace(content, b"x" * len(content))))
    with pytest.raises(StagingError, match="another secret"):
        list(receive(b"5ecreT" + stream[len(SECRET) :]))
    with pytest.raises(StagingError, match="an entry that is too long"):
        list(receive(SECRET.encode() + struct.pack(">I", 1 << 20)))


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "train/../../outside"])
def test_path_out_of_the_dataset_is_refused(copy: Path, path: str) -> None:
    """The previous node cannot make this one write elsewhere."""
    entry = {"path": path, "kind": "file", "mode": 0o644, "size": 1, "mtime": 1, "target": ""}
    with pytest.raises(StagingError, match="leads out of the dataset"):
        list(staging.FolderWriter(copy).write(entry, iter([b"x"])))


def test_dataset_that_changes_during_the_copy_fails(dataset: Path, copy: Path) -> None:
    """By a file that is written while it is read, and by a list of before."""
    task = copy_task(dataset, write=str(copy))
    reader = staging.read_folder(dataset)
    entry, chunks = next((entry, chunks) for entry, chunks in reader if entry["path"] == "train/0.bin")
    next(chunks)
    os.utime(dataset / "train" / "0.bin", ns=(5, 5))
    with pytest.raises(StagingError, match=r"train/0.bin changed while it was copied"):
        list(chunks)
    assert entry["size"] == 3 * 1024 * 1024 + 17
    with pytest.raises(StagingError, match="the dataset changed since it was listed"):
        run(task)


def test_copy_goes_on_without_the_next_node(dataset: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next node's failure is reported, and this node's copy is whole."""
    monkeypatch.setattr(staging, "_CONNECT_S", 0.0)
    last = run(copy_task(dataset, write=str(copy), next="127.0.0.1"))[-1]
    assert last["done"] is True
    assert "the next node cannot be reached" in last["next_error"]
    assert run({"do": "list", "folder": str(copy)}) == run({"do": "list", "folder": str(dataset)})


def test_space_is_checked_before_the_copy(dataset: Path, copy: Path) -> None:
    """What should remain free counts as needed."""
    with pytest.raises(StagingError, match=r"need 1000000.0 GB, and the disk has"):
        run(copy_task(dataset, write=str(copy), spare=10**15))
    assert list(copy.iterdir()) == []


def test_copy_ends_before_it_takes_the_space_to_be_left_free(
    dataset: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another copy fills the same disk meanwhile: there was enough space for each of them alone."""
    read_space = os.statvfs

    def read_filled(folder: Path) -> os.statvfs_result:
        space = list(read_space(folder))
        # Blocks that are free, of 1 MiB each: 5 at first, less what the other copy has taken since the first check.
        space[1], space[4] = 1024**2, 5 - 2 * len(spaces)
        spaces.append(space[4])
        return os.statvfs_result(space)

    spaces: list[int] = []
    task = copy_task(dataset, write=str(copy), spare=1024**2)
    monkeypatch.setattr(staging.os, "statvfs", read_filled)
    with pytest.raises(StagingError, match="the space to be left free need"):
        run(task)
    assert spaces == [5, 3, 1]
    assert (copy / "train" / "0.bin").stat().st_size == 1024**2


def test_program_prints_errors_as_json(dataset: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """The caller reads the last line, and the exit code."""
    monkeypatch.setattr("sys.argv", ["-c", json.dumps({"do": "list", "folder": str(dataset / "none")})])
    with pytest.raises(SystemExit) as ended:
        staging.main()
    assert ended.value.code == 1
    assert json.loads(capfd.readouterr().out) == {"error": f"there is no {dataset / 'none'}"}


def test_digest_does_not_depend_on_the_order_of_the_folder(tmp_path: Path) -> None:
    """Names are sorted, folder by folder."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir(mode=0o755)
        for file in sorted("abc", reverse=name == "two"):
            (tmp_path / name / file).write_text(file)
            (tmp_path / name / file).chmod(0o644)
            os.utime(tmp_path / name / file, ns=(7, 7))
        os.utime(tmp_path / name, ns=(7, 7))
    lists = [run({"do": "list", "folder": str(tmp_path / name)}) for name in ("one", "two")]
    assert lists[0] == lists[1]
    assert len(lists[0][0]["digest"]) == len(hashlib.sha256().hexdigest())
