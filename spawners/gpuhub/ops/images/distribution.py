"""Distribution of the images to all nodes: built on one node, and streamed to those that lack them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from gpuhub.common.errors import GpuhubError, ImageMissing, NotFound, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.docker.client import CallKind, DockerClients
from gpuhub.ops.console import StepReport
from gpuhub.ops.images.build_plan import BASE, FAMILIES, NOTEBOOK, PARENTS, SERVICES, read_sources
from gpuhub.ops.images.builder import BuiltImage, build_images, find_image, tag_latest
from gpuhub.ops.images.image_source import ImageSource, count_known_layers
from gpuhub.ops.images.lab_assets import ensure_lab_assets
from gpuhub.ops.images.progress import ProgressCallback, ProgressStep, ProgressTerminal

#: File in the folder of the images: when `gpuhub up --refresh` was last done.
_REFRESH_FILE = "refreshed"
#: First letters of the tags that `pin` gives, and digits of an image's id in them.
PINNED = "pinned-"
_ID_DIGITS = 12


async def ensure_images(
    daemons: DockerClients,
    cluster: ClusterSettings,
    paths: Paths,
    source: Path,
    report: StepReport,
    *,
    refresh: bool = False,
    progress: ProgressCallback | None = None,
) -> None:
    """Build missing images on one node, and send them to every node that lacks them.

    Args:
        source: The root of gpuhub's source tree.
        refresh: Build all images again, with Debian's current packages.

    Raises:
        GpuhubError: A step failed; the text names what to install or repair.
    """
    progress = progress or ProgressTerminal()
    images = await build(daemons, cluster, paths, source, refresh=refresh, progress=progress)
    builder = choose_builder(cluster)
    await send_images(daemons, [image.name for image in images], builder, progress)
    await send_foreign_images(daemons, list_foreign_images(cluster), builder, progress)
    sizes = ", ".join(f"{image.name} {image.size / 1e9:.1f} GB" for image in images)
    report.note(f"  ✓ Images on every node: {sizes}")


async def build(
    daemons: DockerClients,
    cluster: ClusterSettings,
    paths: Paths,
    source: Path,
    *,
    refresh: bool = False,
    progress: ProgressCallback,
) -> list[BuiltImage]:
    """Build missing images on one node, copy JupyterLab's files out of them, and return them with the base last.

    Args:
        source: The root of gpuhub's source tree.
        refresh: Build all images again, with Debian's current packages.

    Raises:
        GpuhubError: A step failed; the text names what to install or repair.
    """
    sources = read_sources(source)
    builder = choose_builder(cluster)
    refreshed = f"{datetime.now(UTC):%Y-%m-%dT%H:%M}" if refresh else read_refresh(paths.images)
    images = await daemons.run(
        builder,
        lambda client: build_images(
            client,
            paths.images,
            sources,
            cluster.images,
            progress,
            refreshed=refreshed,
            families=list_families(cluster),
        ),
        kind=CallKind.LONG,
    )
    # Only now: after a failed refresh the images of before are still the current ones.
    paths.images.mkdir(parents=True, exist_ok=True)
    (paths.images / _REFRESH_FILE).write_text(refreshed, encoding="utf-8")
    await daemons.run(
        builder, lambda client: ensure_lab_assets(client, images[0].name, paths.lab_assets), kind=CallKind.LONG
    )
    return images


async def push(
    daemons: DockerClients, cluster: ClusterSettings, names: Sequence[str], progress: ProgressCallback
) -> None:
    """Send images from the node that builds to all others; without names, all that nodes need.

    The newest images of gpuhub get the tag of their build there as well: without it, they would have no name any more
    once there are newer ones, and nothing would remove them.

    Raises:
        GpuhubError: The node that builds lacks an image, or another node did not accept it.
    """
    builder = choose_builder(cluster)
    needed = [f"{image}:latest" for image in (*list_families(cluster), BASE)] + list_foreign_images(cluster)
    for name in names:
        await _require_image(daemons, builder, name)
    built = {name: await _find_build(daemons, builder, name) for name in names or needed}
    await send_images(daemons, [name for name in built.values() if name is not None], builder, progress)
    await send_foreign_images(daemons, [name for name in built if built[name] is None], builder, progress)


async def _find_build(daemons: DockerClients, builder: str, name: str) -> str | None:
    """Return the newest image of a repository of gpuhub with the tag of its build; None for other images."""
    repository, _, tag = with_tag(name).rpartition(":")
    image = await daemons.run(builder, partial(find_image, name=name))
    if image is None or tag != "latest" or repository not in {BASE, *PARENTS}:
        return None
    others = (other for other in image["RepoTags"] if other.rpartition(":")[0] == repository)
    tags = (other for other in others if not other.rpartition(":")[2].startswith((PINNED, "latest")))
    return next(tags, None)


async def pin(daemons: DockerClients, cluster: ClusterSettings, name: str, progress: ProgressCallback) -> str:
    """Give an image of the node that builds a tag made of its id, send it to all nodes, and return the new name.

    Raises:
        GpuhubError: The node that builds lacks the image, or another node did not accept it.
    """
    builder = choose_builder(cluster)
    image = await _require_image(daemons, builder, name)
    repository = with_tag(name.partition("@")[0]).rpartition(":")[0]
    tag = f"{PINNED}{image['Id'].removeprefix('sha256:')[:_ID_DIGITS]}"
    await daemons.call(builder, "tag", name, repository, tag)
    await send_foreign_images(daemons, [f"{repository}:{tag}"], builder, progress)
    return f"{repository}:{tag}"


async def _require_image(daemons: DockerClients, builder: str, name: str) -> dict[str, Any]:
    image = await daemons.run(builder, partial(find_image, name=name))
    if image is None:
        raise NotFound(f"node {builder}, which builds, has no image {name!r}: `gpuhub image list` shows what there is")
    return image


def read_refresh(folder: Path) -> str:
    """Return when the images were last refreshed; empty for never."""
    file = folder / _REFRESH_FILE
    return file.read_text(encoding="utf-8") if file.exists() else ""


async def send_images(daemons: DockerClients, names: Sequence[str], builder: str, progress: ProgressCallback) -> None:
    """Send images of the builder's node to all other nodes at the same time, and set their tag `latest` there.

    This works for any image that was built there, such as one based on gpuhub/notebook.
    """
    origin = await daemons.run(builder, lambda client: client, kind=CallKind.LONG)

    with ImageSource(origin) as source:
        await _send_to_others(daemons, builder, lambda node, client: ensure_sent(names, source, client, node, progress))


async def _send_to_others(daemons: DockerClients, builder: str, send: Callable[[str, Any], None]) -> None:
    """Call `send` with name and client of each node but the builder's; one that fails does not stop the others.

    Raises:
        GpuhubError: At least one failed; the text has what each of them says.
    """
    others = [node.name for node in daemons.nodes if node.name != builder]
    results = await asyncio.gather(
        *(daemons.run(node, partial(send, node), kind=CallKind.LONG) for node in others), return_exceptions=True
    )
    failures = [result for result in results if isinstance(result, BaseException)]
    if len(failures) > 1 and all(isinstance(failure, GpuhubError) for failure in failures):
        raise GpuhubError("\n".join(map(str, failures)))
    for failure in failures:
        raise failure


def list_families(cluster: ClusterSettings) -> list[str]:
    """Return the images that gpuhub builds: gpuhub/notebook, and others that profiles offer or services use."""
    used = {with_tag(image) for profile in cluster.profiles for image in profile.offered_images}
    used |= {with_tag(service.image) for service in cluster.services}
    further = (image for image in (*FAMILIES, SERVICES) if image != NOTEBOOK)
    return [NOTEBOOK, *(image for image in further if f"{image}:latest" in used)]


def list_foreign_images(cluster: ClusterSettings) -> list[str]:
    """Return the images of profiles that gpuhub does not build, such as those based on gpuhub/notebook."""
    offered = {image for profile in cluster.profiles for image in profile.offered_images}
    return sorted(image for image in offered if with_tag(image) not in {f"{family}:latest" for family in FAMILIES})


def with_tag(image: str) -> str:
    """Return an image's name with the tag that Docker takes where there is none."""
    return image if ":" in image.rpartition("/")[2] else f"{image}:latest"


async def send_foreign_images(
    daemons: DockerClients, names: Sequence[str], builder: str, progress: ProgressCallback
) -> None:
    """Send images that gpuhub did not build from the builder's node to all others.

    Raises:
        SetupError: The builder's node does not have the image.
    """
    origin = await daemons.run(builder, lambda client: client, kind=CallKind.LONG)
    # Docker would save all tags of a name without one.
    names = [with_tag(name) for name in names]
    for name in names:
        if await daemons.run(builder, partial(find_image, name=name)) is None:
            raise SetupError(
                f"a profile uses the image {name}, and node {builder} does not have it: "
                "build or load it there, then `sudo make up` sends it to the other nodes"
            )

    with ImageSource(origin) as source:

        def send_all(node: str, client: Any) -> None:
            for name in names:
                send_image(name, source, client, node, progress)

        await _send_to_others(daemons, builder, send_all)


def choose_builder(cluster: ClusterSettings) -> str:
    """Return the node to build on: one with its daemon on the head node if there is one, else the first."""
    return min(cluster.own_nodes, key=_is_remote).name


def _is_remote(node: NodeSettings) -> bool:
    return not node.docker.startswith("unix://")


def send_image(name: str, source: ImageSource, target: Any, node: str, progress: ProgressCallback) -> bool:
    """Send an image to the target's daemon if it lacks it, and return whether it was sent.

    Layers that the target has in other images are not sent again.

    Args:
        source: The daemon that has the image.
        target: The docker.APIClient of the other daemon.

    Raises:
        ImageMissing: The source does not have the image.
        SetupError: The target did not accept it.
    """
    original = source.find(name)
    if original is None:
        raise ImageMissing(f"{name}: the node that should send it does not have this image")
    if is_same_image(original, find_image(target, name)):
        return False
    label = f"{node}: {name}"
    known = count_known_layers(original, target)
    sent = 0

    def report(chunks: Iterator[bytes]) -> Iterator[bytes]:
        nonlocal sent
        for chunk in chunks:
            yield chunk
            sent += len(chunk)
            progress(ProgressStep(label=label, done=sent, total=0 if known else original["Size"]))

    for event in target.load_image(report(source.archive(name, without=known))):
        if "error" in event:
            raise SetupError(f"{label}: Docker refused it: {event['error']}")
    if not is_same_image(original, find_image(target, name)):
        raise SetupError(f"{label}: Docker loaded another image than the one that was sent")
    text = f"sent, {known} of its layers were there" if known else "sent"
    progress(ProgressStep(label=label, done=sent, text=text, is_finished=True))
    return True


def is_same_image(image: Mapping[str, Any], other: Mapping[str, Any] | None) -> bool:
    """Return whether two daemons' descriptions are of the same image.

    Ids differ between kinds of image stores, so equal layers and settings count as well.
    """
    return other is not None and (image["Id"] == other["Id"] or _content(image) == _content(other))


def _content(image: Mapping[str, Any]) -> list[Any]:
    config = image["Config"]
    settings = [config.get(key) for key in ("User", "Env", "Entrypoint", "Cmd", "WorkingDir")]
    return [image["RootFS"].get("Layers"), settings]


def ensure_sent(names: Sequence[str], source: ImageSource, target: Any, node: str, progress: ProgressCallback) -> None:
    """Send every image that the target lacks, and set its tag `latest` there. Raises as `send_image` does."""
    for name in names:
        send_image(name, source, target, node, progress)
        tag_latest(target, name)
