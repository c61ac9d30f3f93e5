"""The build of the images on one Docker daemon, with its classic builder instead of BuildKit."""

from __future__ import annotations

import platform
import tarfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import docker.errors

from gpuhub.common.errors import SetupError
from gpuhub.common.names import LABEL_DEBIAN
from gpuhub.config.containers.images import ImageSettings
from gpuhub.ops.images import build_plan
from gpuhub.ops.images.build_plan import ImagePlan, ImageSources
from gpuhub.ops.images.progress import ProgressCallback, ProgressStep
from gpuhub.ops.images.root_file_system import ensure_root_tar
from gpuhub.ops.images.wheels import ensure_lab_wheel, ensure_locked_wheels, ensure_torch_wheels, read_wheel_file

_BLOCK = 512
_CHUNK = 1 << 20
#: Maximum time without output of a running build, which unpacks the CUDA libraries on a slow disk; seconds.
_OUTPUT_TIMEOUT_S = 1800.0
_KEPT_LINES = 20
_STAGE_LABEL = "gpuhub.stage=build"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltImage:
    """An image on the daemon that built it."""

    #: Name of the image, with the hash as tag.
    name: str
    id: str
    #: Size of the image, bytes.
    size: int


def build_images(
    client: Any,
    folder: Path,
    sources: ImageSources,
    settings: ImageSettings,
    report: ProgressCallback,
    *,
    refreshed: str = "",
    families: Sequence[str] = (build_plan.NOTEBOOK,),
) -> list[BuiltImage]:
    """Build the images that nodes need where they are missing, and return the families, and then the base.

    Safe to call again at any time; blocks for minutes.

    Args:
        client: A docker.APIClient of the daemon that builds.
        folder: A folder on the head node that keeps packages for the next build.
        refreshed: When Debian's packages were last to be downloaded again; another value builds all images again.
        families: Images to build: some of `build_plan.FAMILIES`, and that of services.

    Raises:
        SetupError: A step failed; the text has its last lines.
    """
    plan = build_plan.build_plan(sources, settings, platform.machine(), refreshed=refreshed)
    missing = plan.list_missing(families, lambda name: find_image(client, name) is not None)
    downloaded = {*missing} & {build_plan.TORCH, *build_plan.LOCKS}
    if downloaded or build_plan.BASE in missing:
        # This package set has pip for all builds, and NVIDIA's module for the base.
        downloaded.add(build_plan.SCIENCE)
    # All kinds of packages are downloaded at the same time, also while the first images are built.
    with ThreadPoolExecutor(len(downloaded) + 1, "wheels") as pool:
        ensure = partial(
            _ensure_wheels, folder / "wheels", plan=plan, sources=sources, settings=settings, report=report
        )
        wheels = {image: pool.submit(ensure, image) for image in sorted(downloaded)}
        if not {*missing}.isdisjoint(build_plan.FAMILIES):
            lab = pool.submit(ensure_lab_wheel, folder / "wheels", key=plan.lab, files=sources.lab, report=report)
            wheels |= dict.fromkeys(build_plan.FAMILIES, lab)
        for image in missing:
            name = plan.tagged(image)
            if image == build_plan.BASE:
                root = ensure_root_tar(
                    folder / "base",
                    tag=plan.tags[image],
                    suite=settings.debian_suite,
                    sources=sources,
                    read_pynvml=lambda: read_wheel_file(
                        wheels[build_plan.SCIENCE].result(), "nvidia_ml_py", "pynvml.py"
                    ),
                    report=report,
                )
                _import_base(client, name, root, report)
            else:
                pip, own = (wheels[kind].result() if kind in wheels else None for kind in (build_plan.SCIENCE, image))
                context = _build_context(image, sources, pip=pip, wheels=own)
                _build(client, name, plan.tagged(build_plan.PARENTS[image]), context, report)
                tag_latest(client, name)
    return [_latest(client, plan.tagged(image)) for image in (*families, build_plan.BASE)]


def _ensure_wheels(
    folder: Path,
    image: str,
    *,
    plan: ImagePlan,
    sources: ImageSources,
    settings: ImageSettings,
    report: ProgressCallback,
) -> Path:
    key, machine = plan.wheels[image], platform.machine()
    if image != build_plan.TORCH:
        name, lock = build_plan.LOCKS[image], build_plan.read_lock(sources, image)
        return ensure_locked_wheels(folder, name=name, key=key, lock=lock, machine=machine, report=report)
    locks = (build_plan.read_lock(sources, other) for other in build_plan.LOCKS)
    locked = {name for lock in locks for name in build_plan.list_locked_names(lock)}
    return ensure_torch_wheels(folder, key=key, settings=settings, locked=locked, machine=machine, report=report)


def find_image(client: Any, name: str) -> dict[str, Any] | None:
    """Return the daemon's description of an image; None if it does not have the image."""
    try:
        description: dict[str, Any] = client.inspect_image(name)
    except docker.errors.ImageNotFound:
        return None
    return description


def tag_latest(client: Any, name: str) -> None:
    """Set the tag `latest` to the image of this name."""
    client.tag(name, name.partition(":")[0], "latest")


def _latest(client: Any, name: str) -> BuiltImage:
    tag_latest(client, name)
    description = client.inspect_image(name)
    return BuiltImage(name=name, id=description["Id"], size=description["Size"])


def _import_base(client: Any, name: str, root: Path, report: ProgressCallback) -> None:
    report(ProgressStep(label=name, text="importing"))
    repository, _, tag = name.partition(":")
    with root.open("rb") as stream:
        client.import_image_from_data(
            stream,
            repository=repository,
            tag=tag,
            changes=["ENV LANG=C.UTF-8", 'CMD ["bash"]', f"LABEL {LABEL_DEBIAN}={_format_date(root)}"],
        )
    if find_image(client, name) is None:
        raise SetupError(f"{name}: Docker imported the file system but does not have the image")
    report(ProgressStep(label=name, is_finished=True))


def _format_date(file: Path) -> str:
    return datetime.fromtimestamp(file.stat().st_mtime, UTC).date().isoformat()


def _build_context(
    image: str, sources: ImageSources, *, pip: Path | None, wheels: Path | None
) -> dict[str, bytes | Path]:
    """Return the files of an image's build; of the wheels in the folder `pip`, it has only pip."""
    if image in build_plan.FAMILIES:
        extensions = {f"extensions/{name}": data for name, data in sources.extensions.items()}
        notebooks = {f"notebooks/{name}": data for name, data in sources.notebooks.items()}
        extension = {f"wheels/{wheel.name}": wheel for wheel in (wheels.glob("*.whl") if wheels else ())}
        return {**sources.notebook, **extensions, **notebooks, **extension}
    recipe = build_plan.TORCH_RECIPE if image == build_plan.TORCH else build_plan.PACKAGES_RECIPE
    files: dict[str, bytes | Path] = {
        "Dockerfile": sources.python[recipe],
        build_plan.TIDY: sources.python[build_plan.TIDY],
    }
    if image in build_plan.LOCKS:
        files["requirements.lock"] = build_plan.read_lock(sources, image).encode()
    for part, folder, pattern in (("pip", pip, "pip-*.whl"), ("wheels", wheels, "*.whl")):
        files |= {f"{part}/{wheel.name}": wheel for wheel in (folder.glob(pattern) if folder else ())}
    return files


def _build(client: Any, name: str, parent: str, context: Mapping[str, bytes | Path], report: ProgressCallback) -> None:
    report(ProgressStep(label=name, text="building"))
    try:
        events = client.build(
            fileobj=stream_context(context),
            custom_context=True,
            tag=name,
            buildargs={"PARENT": parent},
            network_mode="none",
            rm=True,
            forcerm=True,
            decode=True,
            timeout=_OUTPUT_TIMEOUT_S,
        )
        _follow(name, events, report)
    except docker.errors.APIError as error:
        raise SetupError(f"{name}: the build failed: {error.explanation or error}") from error
    finally:
        _remove_stages(client)
    report(ProgressStep(label=name, is_finished=True))


def _follow(name: str, events: Iterable[Mapping[str, Any]], report: ProgressCallback) -> None:
    last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
    for event in events:
        text = str(event.get("stream", "")).strip()
        if text:
            last_lines.append(text)
            report(ProgressStep(label=name, text=text.splitlines()[0]))
        if "error" in event:
            raise SetupError(f"{name}: the build failed: {event['error']}\n" + "\n".join(last_lines))


def _remove_stages(client: Any) -> None:
    """Remove the first stages of builds, which contain all wheels; a stage in use by another build stays."""
    for stage in client.images(quiet=True, filters={"label": _STAGE_LABEL, "dangling": True}):
        try:
            client.remove_image(stage)
        except docker.errors.APIError:
            continue


def stream_context(files: Mapping[str, bytes | Path]) -> Iterator[bytes]:
    """Stream a build context: regular files of root with mode 0644; files given as paths are read in chunks."""
    for name, content in sorted(files.items()):
        entry = tarfile.TarInfo(name)
        entry.mode = 0o644
        entry.size = content.stat().st_size if isinstance(content, Path) else len(content)
        yield entry.tobuf(tarfile.PAX_FORMAT)
        if isinstance(content, Path):
            with content.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
        else:
            yield content
        yield b"\0" * (-entry.size % _BLOCK)
    yield b"\0" * (2 * _BLOCK)
