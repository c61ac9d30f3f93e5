"""A Docker daemon of a test's own, without any network: its containers have a loopback at most."""

from __future__ import annotations

import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import docker

from gpuhub.docker.containers.container_spec import BASE_IMAGE
from gpuhub_closet.docker_daemons import is_socket_answering
from tests.support.docker.tiny_image import build_root_filesystem
from tests.support.product import wait_for

#: The image of this machine's own files.
TINY = f"gpuhub-test/tiny:{sysconfig.get_python_version()}"


@dataclass(frozen=True)
class OwnDaemon:
    """A daemon that runs."""

    folder: Path
    log: Path

    @property
    def url(self) -> str:
        """Its address for gpuhub."""
        return f"unix://{self.folder}/docker.sock"

    def client(self) -> docker.DockerClient:
        """Return a client, which the caller closes."""
        return docker.DockerClient(base_url=self.url, timeout=60)


@contextmanager
def own_daemon() -> Iterator[OwnDaemon]:
    """Run a daemon with the tiny image, which it also has under the name of gpuhub's base image.

    It has mounts of its own, so that nothing of it is left when its last process has ended.
    """
    # Sockets need short paths.
    with tempfile.TemporaryDirectory(prefix="ghd", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        daemon = OwnDaemon(folder, folder / "dockerd.log")
        command = [
            *("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "dockerd"),
            *(
                "--host",
                daemon.url,
                "--group",
                "root",
                "--data-root",
                f"{folder}/data",
                "--exec-root",
                f"{folder}/exec",
            ),
            *("--pidfile", f"{folder}/pid", "--config-file", f"{folder}/none.json", "--bridge", "none"),
            *("--iptables=false", "--ip6tables=false", "--ip-forward=false", "--shutdown-timeout", "5"),
            *(
                "--exec-opt",
                "native.cgroupdriver=cgroupfs",
                "--cgroup-parent",
                f"/{folder.name}",
                "--log-level",
                "warn",
            ),
        ]
        (folder / "none.json").write_text("{}", encoding="utf-8")
        with daemon.log.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_for(lambda: _is_answering(daemon, process), lambda: f"dockerd\n{daemon.log.read_text()[-2000:]}")
            with closing(daemon.client()) as client:
                repository, tag = TINY.split(":")
                client.api.import_image_from_data(build_root_filesystem(), repository=repository, tag=tag)
                client.images.get(TINY).tag(*BASE_IMAGE.split(":"))
            yield daemon
            with closing(daemon.client()) as client:
                for container in client.containers.list(all=True, ignore_removed=True):
                    container.remove(force=True)
        finally:
            # All its processes end with it, as they have a namespace of their own.
            process.kill()
            process.wait(timeout=30)
            wait_for(lambda: _has_no_cgroups(folder.name), f"no cgroup {folder.name} is left", 30)


def _has_no_cgroups(name: str) -> bool:
    """Remove the daemon's cgroups, which are there until the last process has ended, and return whether all are gone."""
    root = Path("/sys/fs/cgroup")
    for top in (*root.glob(name), *root.glob(f"*/{name}")):
        for folder in sorted((top, *top.rglob("*/")), reverse=True):
            with suppress(OSError):
                folder.rmdir()
    return not any((*root.glob(name), *root.glob(f"*/{name}")))


def _is_answering(daemon: OwnDaemon, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, daemon.log.read_text()[-2000:]
    return is_socket_answering(daemon.folder / "docker.sock")
