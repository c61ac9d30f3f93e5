"""The image file of nodes with Apptainer: made, copied over SSH and tried with the real Apptainer."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gpuhub.common.errors import SetupError
from gpuhub.config.settings import NodeSettings
from gpuhub.docker.ssh import scan_host_keys
from gpuhub.ops.provision.ssh_session import SshSession, SshTarget
from gpuhub.ops.slurm import image_file
from gpuhub.ops.slurm.image_file import convert_image, hash_file, read_image_file, send_image_file
from gpuhub.ops.slurm.machines import SlurmMachine
from tests.support.closet.ssh_machines import loopback_sshd, make_key, ssh_agent
from tests.support.slurm.apptainer_image import require_apptainer

pytestmark = [pytest.mark.slurm, pytest.mark.root]

NODE = NodeSettings(name="rig1", address="127.0.0.1")


class OtherFolder:
    """A session with a machine on which the image's folder is another one."""

    def __init__(self, session: SshSession, here: Path, there: Path) -> None:
        self.session, self.here, self.there = session, here, there

    def run(self, script: str, arguments: Sequence[str] = (), *, as_root: bool = False, timeout_s: float = 90) -> str:
        return self.session.run(script, self._move(arguments), as_root=as_root, timeout_s=timeout_s)

    def send_file(
        self, file: Path, script: str, arguments: Sequence[str] = (), *, as_root: bool = False, timeout_s: float
    ) -> None:
        self.session.send_file(file, script, self._move(arguments), as_root=as_root, timeout_s=timeout_s)

    def _move(self, arguments: Sequence[str]) -> list[str]:
        return [argument.replace(str(self.here), str(self.there)) for argument in arguments]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="gpuhub-image-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def image(folder: Path) -> Path:
    """An image file with the two programs that a notebook needs, as far as their names go."""
    require_apptainer()
    root = folder / "root"
    for name in ("bin", "dev", "etc", "proc", "sys", "tmp", "var/tmp"):
        (root / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin/sh")
    for name in ("python3", "jupyterhub-singleuser"):
        (root / "bin" / name).symlink_to("sh")
    file = folder / "here" / "notebook.sif"
    file.parent.mkdir()
    convert_image(str(root), file, folder)
    return file


@pytest.fixture
def machine(folder: Path, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmMachine]:
    """This machine over SSH, with another folder in place of the image's."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    for name in ("host", "own"):
        make_key(tmp_path / name)
    shutil.rmtree(folder / "there", ignore_errors=True)
    with (
        loopback_sshd(tmp_path, port, tmp_path / "host", authorized=tmp_path / "own.pub"),
        ssh_agent(tmp_path / "own") as agent,
    ):
        monkeypatch.setenv("SSH_AUTH_SOCK", agent)
        target = SshTarget(user="root", host="127.0.0.1", port=port)
        with SshSession(target, scan_host_keys("127.0.0.1", port)) as session:
            yield SlurmMachine(name="rig1", runner=OtherFolder(session, image.parent, folder / "there"), node=NODE)


def list_files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "there").iterdir())


def test_file_is_copied_once_and_runs(machine: SlurmMachine, folder: Path, image: Path) -> None:
    missing = read_image_file(machine, image)
    assert missing.problem.endswith("notebook.sif is missing: `gpuhub image push` copies it")
    sent = send_image_file(machine, image, hash_file(image))
    assert (sent.problem, sent.size, sent.sha256) == ("", image.stat().st_size, hash_file(image))
    assert sent.version.startswith("1.")
    copy = folder / "there" / image.name
    assert (list_files(folder), copy.stat().st_mode & 0o777) == ([image.name], 0o644)
    before = copy.stat().st_ino
    assert send_image_file(machine, image, hash_file(image)) == sent == read_image_file(machine, image)
    assert copy.stat().st_ino == before
    # Another file is replaced, also while a program uses it.
    copy.write_bytes(b"other")
    assert send_image_file(machine, image, hash_file(image)) == sent


def test_partial_copy_never_counts(machine: SlurmMachine, folder: Path, image: Path) -> None:
    left = folder / "there" / f"{image.name}.12345678.partial"
    left.parent.mkdir()
    left.touch()
    os.utime(left, (0, 0))
    result = send_image_file(machine, image, "0" * 64)
    assert result.problem == "on 127.0.0.1: the copy is incomplete"
    assert list_files(folder) == []


def test_unusable_image_is_reported(machine: SlurmMachine, folder: Path, image: Path) -> None:
    copy = folder / "there" / image.name
    copy.parent.mkdir()
    copy.write_bytes(b"no image")
    assert "Apptainer cannot run" in read_image_file(machine, image).problem
    shutil.copy(image, copy)
    copy.chmod(0o600)
    assert "is not readable" in read_image_file(machine, image).problem


def test_missing_apptainer_is_reported(
    machine: SlurmMachine, folder: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_file, "_TRY", image_file._TRY.replace("PATH=/usr/local/bin", "PATH=/usr/nowhere"))
    assert "install Apptainer" in send_image_file(machine, image, hash_file(image)).problem


def test_failed_build_leaves_the_current_file(folder: Path, image: Path) -> None:
    before = hash_file(image)
    with pytest.raises(SetupError, match=r"apptainer could not make .*notebook\.sif of docker-archive:"):
        convert_image("docker-archive:/nowhere.tar", image, folder)
    assert hash_file(image) == before
    assert [path.name for path in image.parent.iterdir()] == [image.name]
    with pytest.raises(SetupError, match=r"the folder /nowhere of slurm\.image is missing"):
        convert_image(str(folder / "root"), Path("/nowhere/notebook.sif"), folder)


def test_image_of_docker_keeps_its_environment(folder: Path, image: Path) -> None:
    """An archive as `docker save` writes it becomes an image file with the variables of the image."""
    file = folder / "docker.sif"
    convert_image(f"docker-archive:{write_archive(folder)}", file, folder)
    options = ["--containall", "--cleanenv", "--no-privs", "--no-home", "--pwd", "/"]
    done = subprocess.run(
        ["apptainer", "--quiet", "exec", *options, str(file), "/bin/sh", "-c", "echo $PATH $LANG"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    path, language = done.stdout.split()
    assert path.startswith("/opt/gpuhub/bin:/bin")
    assert language == "C.UTF-8"


def write_archive(folder: Path) -> Path:
    """Write the archive of a Docker image with one layer."""
    layout = folder / "layout"
    layout.mkdir()
    subprocess.run(["tar", "-C", str(folder / "root"), "-cf", str(layout / "layer.tar"), "."], check=True)
    digest = f"sha256:{hash_file(layout / 'layer.tar')}"
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/opt/gpuhub/bin:/bin", "LANG=C.UTF-8"]},
        "rootfs": {"type": "layers", "diff_ids": [digest]},
    }
    (layout / "config.json").write_text(json.dumps(config))
    manifest = [{"Config": "config.json", "RepoTags": ["lab:latest"], "Layers": ["layer.tar"]}]
    (layout / "manifest.json").write_text(json.dumps(manifest))
    archive = folder / "image.tar"
    subprocess.run(
        ["tar", "-C", str(layout), "-cf", str(archive), *sorted(path.name for path in layout.iterdir())], check=True
    )
    return archive
