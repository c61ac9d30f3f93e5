"""The images as users get them: built in the closet, run without privileges, sent to another node."""

import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import docker
import pytest

from gpuhub.config import settings
from gpuhub.config.containers.images import ImageSettings
from gpuhub.docker.client import DockerClients
from gpuhub.ops.images import inventory
from gpuhub.ops.images.build_plan import read_sources
from gpuhub.ops.images.builder import BuiltImage, build_images
from gpuhub.ops.images.distribution import ensure_sent, send_image
from gpuhub.ops.images.image_source import ImageSource
from gpuhub.ops.images.progress import ProgressTerminal
from gpuhub_closet.paths import node_paths

ROOT = Path(__file__).resolve().parents[3]
HOME = "/home/alice"

PACKAGES = (
    "gpu_launch",
    "ipyparallel",
    "ipywidgets",
    "jupyterhub",
    "jupyterlab",
    "jupyterlab_nvdashboard",
    "matplotlib",
    "numpy",
    "pandas",
    "pyarrow",
    "pynvml",
    "scipy",
    "sklearn",
    "torch",
)
PROGRAMS = ("c++", "cc", "curl", "git", "git-lfs", "htop", "make", "python3-config", "rsync", "tmux", "uv")
#: A function that torch translates to C++, compiles and loads.
COMPILE = "import torch; assert torch.compile(lambda x: x.sin() * 2)(torch.zeros(8)).sum() == 0"
#: Writes a table as a Parquet file, and reads it again.
PARQUET = """
import pandas
table = pandas.DataFrame({"step": [1, 2], "name": ["a", "b"]})
table.to_parquet("table.parquet")
print(pandas.read_parquet("table.parquet").equals(table))
"""
FACTS = f"""
import importlib, importlib.util, json, os, pathlib, shutil, stat, torch.distributed
facts = {{"missing": [], "setuid": [], "wheels": [], "writable": [], "uid": os.getuid()}}
for name in {PACKAGES!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        facts["missing"].append(f"{{name}}: {{error}}")
facts["gpuhub"] = importlib.util.find_spec("gpuhub") is not None
facts["missing"] += [name for name in {PROGRAMS!r} if not shutil.which(name)]
facts["torch"] = torch.__version__
for folder, folders, files in os.walk("/"):
    folders[:] = [name for name in folders if os.path.join(folder, name) not in ("/proc", "/sys", "/dev", {HOME!r})]
    facts["writable"] += [folder] if os.access(folder, os.W_OK) else []
    for name in files:
        path = pathlib.Path(folder, name)
        if path.suffix == ".whl" and "ensurepip" not in folder and "python-wheels" not in folder:
            facts["wheels"].append(str(path))
        if path.lstat().st_mode & (stat.S_ISUID | stat.S_ISGID):
            facts["setuid"].append(str(path))
        if not path.is_symlink() and os.access(path, os.W_OK):
            facts["writable"].append(str(path))
facts["suites"] = [line.split()[3] for line in open("/etc/apt/sources.list") if line.startswith("deb ")]
print(json.dumps(facts))
"""
PROJECT = '[project]\\nname = "mine"\\nversion = "1"\\n[tool.setuptools]\\npy-modules = ["mine"]\\n'
OWN_PACKAGE = f"""
set -e
mkdir /tmp/mine && cd /tmp/mine
printf '{PROJECT}' > pyproject.toml
echo 'place = __file__' > mine.py
pip install --quiet --no-index --no-build-isolation .
cd && python -c 'import mine; print(mine.place)'
"""
#: Kernels of environments that are broken in every way: no JSON, no interpreter, and no kernel in it.
BROKEN = """
set -e
mkdir -p ~/.local/share/jupyter/kernels
cd ~/.local/share/jupyter/kernels
mkdir -p torn gone empty ~/envs/gone/bin
echo '{' > torn/kernel.json
ln -sf /usr/bin/python2.7 ~/envs/gone/bin/python
echo '{"argv": ["'$HOME'/envs/gone/bin/python", "-m", "ipykernel_launcher"], "display_name": "gone"}' > gone/kernel.json
"""
#: Makes an environment, installs a package in its kernel, and shows what that kernel has.
ENVIRONMENT = f"""
import json, subprocess, sys
from pathlib import Path
subprocess.run(["gpu-launch", "env", "create", "mine"], check=True, stdout=subprocess.DEVNULL)
source = Path("/tmp/own")
source.mkdir()
(source / "pyproject.toml").write_text('{PROJECT}')
(source / "mine.py").write_text("place = __file__")
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="mine", startup_timeout=120)
said = []
def show(message):
    said.append(message["content"].get("text", ""))
def run(code):
    return client.execute_interactive(code, output_hook=show, timeout=120)["content"]["status"]
statuses = [run("%pip install --quiet --no-index --no-build-isolation --no-deps /tmp/own"), run(
    "import sys, shutil, torch, mine; assert get_ipython().find_line_magic('gpu_launch');"
    "print('FOUND', sys.prefix, torch.__file__, mine.place, shutil.which('python'))"
)]
manager.shutdown_kernel(now=True)
print(json.dumps({{"statuses": statuses, "found": "".join(said).partition("FOUND ")[2].split()}}))
"""
SERVER = """
import json, subprocess, sys, time, urllib.request
server = subprocess.Popen(["jupyter", "lab", "--no-browser", "--port=8765", "--IdentityProvider.token="])
deadline = time.monotonic() + 180
while True:
    try:
        page = urllib.request.urlopen("http://127.0.0.1:8765/lab", timeout=5).read().decode()
        break
    except OSError:
        if server.poll() is not None or time.monotonic() > deadline:
            sys.exit("the server does not answer")
        time.sleep(0.05)
kernels = json.loads(urllib.request.urlopen("http://127.0.0.1:8765/api/kernelspecs", timeout=30).read())["kernelspecs"]
server.terminate()
server.wait()
print(json.dumps({"kernels": sorted(kernels), "is_lab": "JupyterLab" in page, "has_gpu_panel": "jupyterlab-nvdashboard" in page}))
"""


def _client(closet: Any, node: str) -> docker.APIClient:
    return docker.APIClient(base_url=node_paths(closet.paths, node).docker_url, version="auto", timeout=1800)


@pytest.fixture(scope="module")
def built(closet: Any) -> list[BuiltImage]:
    """The notebook and the base image on rig1; the build takes minutes on a clean machine."""
    with closing(_client(closet, "rig1")) as client:
        return build_images(client, closet.paths.images, read_sources(ROOT), ImageSettings(), ProgressTerminal())


@pytest.fixture(scope="module")
def container(closet: Any, built: list[BuiltImage]) -> Iterator[Any]:
    """A running container of the notebook image as users have it: without privileges, with a home."""
    with closing(docker.DockerClient(base_url=node_paths(closet.paths, "rig1").docker_url, timeout=900)) as client:
        container = client.containers.create(
            built[0].name,
            ["sleep", "600"],
            user="20001:20001",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            network_mode="none",
            init=True,
            environment={"HOME": HOME},
            tmpfs={HOME: "uid=20001,gid=20001,mode=0700"},
            working_dir=HOME,
        )
        try:
            container.put_archive("/var/lib/extrausers", _names())
            container.start()
            yield container
        finally:
            container.remove(force=True)


def _names() -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for name, line in {"passwd": f"alice:x:20001:20001::{HOME}:/bin/bash\n", "group": "lab:x:20001:\n"}.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(line), 0o644
            tar.addfile(entry, io.BytesIO(line.encode()))
    return output.getvalue()


def _run(container: Any, *command: str, limit_s: int = 150) -> str:
    done = container.exec_run(["timeout", str(limit_s), *command], demux=True)
    out, err = (part.decode() if part else "" for part in done.output)
    assert done.exit_code == 0, f"{out}\n{err}"
    return out


@pytest.fixture(scope="module")
def facts(container: Any) -> dict[str, Any]:
    """Facts that a script collects inside the container."""
    return json.loads(_run(container, "python", "-c", FACTS).splitlines()[-1])


def test_every_library_can_be_imported_without_rights(facts: dict[str, Any], built: list[BuiltImage]):
    """Every library can be imported under an ordinary UID without an account in the image."""
    print(f"{built[0].name}: {built[0].size / 1e6:.0f} MB, torch {facts['torch']}; base {built[1].size / 1e6:.0f} MB")
    assert facts["missing"] == []
    assert facts["uid"] == 20001


def test_image_has_no_setuid_program_and_no_leftovers(facts: dict[str, Any]):
    """The image has no setuid program, no wheel, and none of the head node's software."""
    assert facts["setuid"] == []
    assert facts["wheels"] == []
    assert not facts["gpuhub"]


def test_users_can_write_in_two_folders_of_the_image(facts: dict[str, Any]):
    """Containers get a file system of limited size there, so that nobody can fill Docker's disk."""
    outermost = {path for path in facts["writable"] if not path.startswith(("/tmp/", "/var/tmp/"))}
    assert outermost == {"/tmp", "/var/tmp"}


def test_debian_has_its_security_updates(closet: Any, facts: dict[str, Any], built: list[BuiltImage]):
    """The image states the date, from which `gpuhub doctor` knows its age."""
    assert facts["suites"] == ["bookworm", "bookworm-updates", "bookworm-security"]
    with closing(_client(closet, "rig1")) as client:
        for image in built:
            labels = client.inspect_image(image.id)["Config"]["Labels"]
            assert abs((date.fromisoformat(labels["gpuhub.debian"]) - datetime.now(UTC).date()).days) < 3


def test_torch_compiles(container: Any):
    """With the image's compiler and torch's headers, as an ordinary user."""
    _run(container, "python", "-c", COMPILE, limit_s=600)


def test_pandas_reads_parquet_files(container: Any):
    """Most public data sets come as such files."""
    assert _run(container, "python", "-c", PARQUET) == "True\n"


def test_user_has_an_account_name(container: Any):
    """The user's name comes from the files that are copied into the container before it starts."""
    assert _run(container, "id", "-un").strip() == "alice"
    assert _run(container, "id", "-gn").strip() == "lab"


def test_user_installed_packages_persist_in_the_home(container: Any):
    """Plain `pip install` persists, because the home does."""
    assert _run(container, "bash", "-c", OWN_PACKAGE).strip().startswith(f"{HOME}/.local/lib/python3.11/site-packages/")


def test_lab_starts_with_its_gpu_panel(container: Any):
    """JupyterLab starts with its GPU panel on a machine without any NVIDIA library."""
    assert json.loads(_run(container, "python", "-c", SERVER).splitlines()[-1]) == {
        "kernels": ["python3"],
        "is_lab": True,
        "has_gpu_panel": True,
    }


def test_own_environment_is_a_kernel_with_the_images_packages(container: Any):
    """With %gpu_launch and torch of the image; what is installed in it is in the home."""
    lines = _run(container, "env", "GPUHUB_BROKER_URL=http://broker", "python", "-c", ENVIRONMENT).splitlines()
    told = json.loads(lines[-1])
    packages = "lib/python3.11/site-packages"
    own = f"{HOME}/envs/mine"
    assert told == {
        "statuses": ["ok", "ok"],
        "found": [
            own, f"/opt/gpuhub/{packages}/torch/__init__.py", f"{own}/{packages}/mine.py", f"{own}/bin/python"
        ],
    }  # fmt: skip


def test_lab_starts_with_broken_environments(container: Any):
    """They are missing from its list, or fail when they are started; the others work."""
    _run(container, "bash", "-c", BROKEN)
    told = json.loads(_run(container, "python", "-c", SERVER).splitlines()[-1])
    assert told["is_lab"]
    assert {"python3", "gone"} <= {*told["kernels"]} <= {"python3", "gone", "mine"}


def test_kernels_have_gpu_launch(container: Any):
    """The image's IPython settings load it."""
    code = "get_ipython().find_line_magic('gpu_launch') is not None or 1/0"
    assert _run(container, "ipython", "--no-banner", "-c", code).strip().endswith("True")


def test_image_is_transferred_once(closet: Any, built: list[BuiltImage]):
    """Another node has the same image afterwards, and a second call transfers nothing."""
    base = built[1]
    with (
        closing(_client(closet, "rig1")) as client,
        closing(_client(closet, "rig2")) as target,
        ImageSource(client) as source,
    ):
        ensure_sent([base.name], source, target, "rig2", ProgressTerminal())
        assert target.inspect_image("gpuhub/base:latest")["Id"] == base.id
        assert not send_image(base.name, source, target, "rig2", ProgressTerminal())


def test_only_missing_layers_are_transferred(closet: Any, built: list[BuiltImage]):
    """A node that has the base gets the layers above it, and the image works there."""
    base, name = built[1], "gpuhub/probe:layers"
    sent: list[int] = []
    with (
        closing(_client(closet, "rig1")) as client,
        closing(_client(closet, "rig2")) as target,
        ImageSource(client) as source,
    ):
        ensure_sent([base.name], source, target, "rig2", ProgressTerminal())
        _build(client, name, f"FROM {base.name}\nCOPY new /new\nCOPY new /again\n", b"content")
        try:
            assert send_image(name, source, target, "rig2", lambda step: sent.append(step.done))
            assert max(sent) < 100_000
            container = target.create_container(name, ["cat", "/new", "/again"])
            try:
                target.start(container)
                assert target.wait(container)["StatusCode"] == 0
                assert target.logs(container) == b"contentcontent"
            finally:
                target.remove_container(container, force=True)
        finally:
            for daemon in (client, target):
                daemon.remove_image(name, force=True)


async def test_an_older_image_is_removed_unless_a_container_uses_it(closet: Any, built: list[BuiltImage]):
    """On all nodes, with Docker's own refusal as the last word; the current images stay."""
    cluster = settings.load(closet.cluster_file)
    daemons = DockerClients(cluster.nodes, instance=closet.paths.instance, run_dir=closet.paths.run)
    try:
        with closing(_client(closet, "rig1")) as client:
            for tag in ("probe-used", "probe-unused"):
                _build(client, f"gpuhub/base:{tag}", f"FROM {built[1].name}\nCOPY new /{tag}\n", b"content")
            container = client.create_container("gpuhub/base:probe-used", ["true"])
            try:
                images, problems = await inventory.read_images(daemons, cluster)
                unused = [image for image in inventory.find_unused(images, cluster) if "probe" in image.names[0]]
                assert ([image.names for image in unused], problems) == ([("gpuhub/base:probe-unused",)], {})
                assert (await inventory.remove_images(daemons, unused)).keys() == {"rig1"}
                assert client.images("gpuhub/base:probe-unused") == []
            finally:
                client.remove_container(container)
                client.remove_image("gpuhub/base:probe-used")
            assert client.inspect_image("gpuhub/notebook:latest")["Id"] == built[0].id
    finally:
        daemons.close()


def _build(client: Any, name: str, dockerfile: str, content: bytes) -> None:
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        for file, text in (("Dockerfile", dockerfile.encode()), ("new", content)):
            info = tarfile.TarInfo(file)
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
    context.seek(0)
    for event in client.build(fileobj=context, custom_context=True, tag=name, rm=True, decode=True):
        assert "error" not in event, event
