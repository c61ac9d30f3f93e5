"""An administrator's images on the closet: an own one in a profile, an update of gpuhub's, and the removal of old ones."""

from __future__ import annotations

import fnmatch
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import docker
import pytest
import tomlkit

from gpuhub_closet.paths import node_paths
from tests.acceptance.notebook_container import Notebook
from tests.support.hub.browser import Product, User, gpuhub
from tests.support.product import ROOT, join_columns, wait_for

#: The profile that offers the own image, and one with gpuhub's.
OFFERS, PLAIN = "rtx5060", "cpu"
OWN, NOTEBOOK = "lab/own:1", "gpuhub/notebook"
#: The pinned ones.
PINNED = f"{NOTEBOOK}:pinned-*"
DOCKERFILE = f"""\
FROM {NOTEBOOK}
USER root
COPY mine /tmp/mine
RUN pip install --quiet --no-index --no-build-isolation --no-cache-dir /tmp/mine
USER nobody
"""
PACKAGE = '[project]\nname = "mine"\nversion = "1"\n[tool.setuptools]\npy-modules = ["mine"]\n'
#: The folders of a clone from which gpuhub builds its images.
SOURCES = ("images", "extensions", "notebooks")
#: What an update of gpuhub adds to the notebook image.
ADDED = "etc/added-by-an-update"
pytestmark = pytest.mark.backend("builtin")


class Images:
    """`gpuhub image`, and the images of the closet's nodes as Docker has them."""

    def __init__(self, product: Product) -> None:
        self._product = product
        self.nodes = [node.name for node in product.cluster.nodes]

    def run(self, command: str, *words: str | Path) -> str:
        """Run `gpuhub image` with the closet's settings and return its output."""
        settings = self._product.paths.closet_cluster_file
        return join_columns(gpuhub("image", command, *map(str, words), "--cluster-file", str(settings), timeout_s=300))

    def client(self, node: str) -> docker.DockerClient:
        return docker.DockerClient(base_url=node_paths(self._product.paths, node).docker_url, timeout=300)

    def find(self, name: str) -> dict[str, str]:
        """Return the image's id by node, for the nodes that have it."""
        return {node: str(image.id) for node in self.nodes for image in self._list(node, name)}

    def remove(self, pattern: str) -> None:
        """Remove the names that match from all nodes, as `docker rmi` does."""
        for node in self.nodes:
            names = [name for image in self._list(node, pattern) for name in fnmatch.filter(image.tags, pattern)]
            with closing(self.client(node)) as client:
                for name in names:
                    client.images.remove(name)

    def _list(self, node: str, pattern: str) -> list[Any]:
        with closing(self.client(node)) as client:
            return list(client.images.list(filters={"reference": pattern}))


@pytest.fixture(scope="module")
def images(product: Product) -> Iterator[Images]:
    """The closet's images; at the end it has its own settings, and these images alone, again."""
    images = Images(product)
    images.remove(PINNED)
    before = product.paths.closet_cluster_file.read_text(encoding="utf-8")
    current = images.find(f"{NOTEBOOK}:latest")
    yield images
    product.restart(before)
    images.run("build")
    images.run("push")
    assert images.find(f"{NOTEBOOK}:latest") == current
    for pattern in (OWN, PINNED):
        images.remove(pattern)
    images.run("gc", "--yes")


@pytest.fixture(scope="module")
def ada(make_user: Callable[[str], User]) -> User:
    """ada in the browser."""
    return make_user("ada")


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration file in a newer version's folder, whose notebook image has one more file."""
    folder = tmp_path_factory.mktemp("updated")
    for source in SOURCES:
        shutil.copytree(ROOT / source, folder / source, ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    (folder / "images/notebook" / ADDED).write_text("new")
    return Path(shutil.copy(ROOT / "jupyterhub_config.py", folder))


def test_all_nodes_have_the_images_after_up(images: Images):
    """The list names each image once, with the nodes that have it."""
    listed = images.run("list")
    assert re.search(rf"^{NOTEBOOK}:\w+, {NOTEBOOK}:latest [\d.]+ GB .* rig1, rig2, rig3 \d+$", listed, re.MULTILINE)
    assert re.search(r"^gpuhub/base:\w+, gpuhub/base:latest .* rig1, rig2, rig3 [1-9]", listed, re.MULTILINE)


def test_own_image_is_sent_without_the_layers_that_nodes_have(images: Images, tmp_path: Path):
    """It is built on the node that builds gpuhub's, with any Docker tool."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / "mine/pyproject.toml").write_text(PACKAGE)
    (tmp_path / "mine/mine.py").write_text("place = __file__\n")
    with closing(images.client("rig1")) as client:
        client.images.build(path=str(tmp_path), tag=OWN, rm=True)
    sent = images.run("push", OWN)
    for node in ("rig2", "rig3"):
        assert re.search(rf"✓ {node}: {OWN} [0-9] MB sent, \d+ of its layers were there", sent), sent
    assert images.find(OWN).keys() == {*images.nodes}


def test_notebook_runs_in_the_own_image(product: Product, images: Images, ada: User):
    """The profile offers it, and what it adds can be imported."""
    settings = tomlkit.parse(product.paths.closet_cluster_file.read_text(encoding="utf-8")).unwrap()
    [profile] = [one for one in settings["profiles"] if one["name"] == OFFERS]
    profile["image"] = OWN
    product.restart(tomlkit.dumps(settings))
    notebook = Notebook(product, ada, OFFERS)
    assert notebook.run("import mine; print(mine.place)").startswith("/opt/gpuhub/lib/")
    assert re.search(rf"^{OWN} .* rig1, rig2, rig3 1$", images.run("list"), re.MULTILINE)


def test_update_is_sent_and_the_pinned_image_stays(images: Images, updated: Path):
    """A new notebook image is built on one node, and sent to the others; all keep what is pinned, used and offered."""
    before = images.find(f"{NOTEBOOK}:latest")
    [pinned] = re.findall(r'image = "(\S+)"', images.run("pin", NOTEBOOK))
    assert f"Built: {NOTEBOOK}:" in images.run("build", "--hub-config", updated)
    assert {node for node, id_ in images.find(f"{NOTEBOOK}:latest").items() if id_ != before[node]} == {"rig1"}
    sent = images.run("push")
    assert re.search(rf"✓ rig3: {NOTEBOOK}:\w+ [0-9] MB sent, \d+ of its layers were there", sent), sent
    assert set(images.find(f"{NOTEBOOK}:latest").values()).isdisjoint(before.values())
    images.run("gc", "--yes")
    assert images.find(pinned) == before
    assert images.find(OWN).keys() == {*images.nodes}


def test_gc_removes_old_images_but_those_that_containers_use(
    product: Product, images: Images, ada: User, make_user: Callable[[str], User]
):
    """A notebook keeps its image on its node until it is stopped, also when gpuhub goes back to the one before."""
    ben = make_user("ben")
    notebook = Notebook(product, ben, PLAIN)
    assert notebook.run(f"print(open('/{ADDED}').read())") == "new\n"
    [name] = re.findall(rf"^({NOTEBOOK}:\w+), {NOTEBOOK}:latest ", images.run("list"), re.MULTILINE)
    images.run("build")
    images.run("push")
    assert name in images.run("gc", "--yes")
    assert images.find(name).keys() == {notebook.node.name}
    for user in (ben, ada):
        user.click_stop()
    wait_for(lambda: images.run("gc", "--yes") and not images.find(name), "the image goes after its notebook")
