"""Builds the three images on one Docker daemon, through its classic builder: no command line, no BuildKit."""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker.errors

from gpuhub.errors import SetupError
from gpuhub.images import plan
from gpuhub.images.debian import ensure_root_tar
from gpuhub.images.plan import Plan, Sources
from gpuhub.images.progress import Report, Step
from gpuhub.images.tar import stream_context
from gpuhub.images.wheels import ensure_wheels, read_module
from gpuhub.tables import Images

#: The longest silence of a running build: unpacking the CUDA libraries on a slow disk.
_SILENCE_S = 1800.0
_KEPT_LINES = 20
_STAGE_LABEL = "gpuhub.stage=build"


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An image on the daemon that built it."""

    #: With the digest as tag.
    name: str
    id: str
    #: In bytes.
    size: int


def build_images(client: Any, folder: Path, sources: Sources, settings: Images, report: Report) -> list[Built]:
    """The images that nodes need, the notebook's first; built on a docker.APIClient's daemon where missing.

    `folder` (of the head node) keeps packages for the next build. Safe to call again at any time; blocks for minutes.

    Raises:
        SetupError: with the last lines of what failed.
    """
    wanted = plan.build_plan(sources, settings, platform.machine())
    notebook, base = wanted.wanted_on_nodes
    if find_image(client, base) is None:
        wheels = _wheels(folder, wanted, sources, settings, report)
        pynvml = read_module(wheels, "nvidia_ml_py", "pynvml.py")
        suite = settings.debian_suite
        root = ensure_root_tar(
            folder / "base", tag=wanted.base, suite=suite, sources=sources, pynvml=pynvml, report=report
        )
        _import_base(client, base, root, report)
    if find_image(client, notebook) is None:
        python = f"{plan.PYTHON}:{wanted.python}"
        if find_image(client, python) is None:
            wheels = _wheels(folder, wanted, sources, settings, report)
            _build(client, python, {"BASE": base, "TORCH": settings.torch}, _python_context(sources, wheels), report)
            tag_latest(client, python)
        _build(client, notebook, {"PYTHON": python}, _notebook_context(sources), report)
    return [_latest(client, name) for name in (notebook, base)]


def _wheels(folder: Path, wanted: Plan, sources: Sources, settings: Images, report: Report) -> Path:
    lock = sources.python["requirements.lock"]
    machine = platform.machine()
    return ensure_wheels(
        folder / "wheels", key=wanted.wheels, lock=lock, settings=settings, machine=machine, report=report
    )


def find_image(client: Any, name: str) -> dict[str, Any] | None:
    """What the daemon says about an image, or None."""
    try:
        found: dict[str, Any] = client.inspect_image(name)
    except docker.errors.ImageNotFound:
        return None
    return found


def tag_latest(client: Any, name: str) -> None:
    """Let `latest` mean the image of this name."""
    client.tag(name, name.partition(":")[0], "latest")


def _latest(client: Any, name: str) -> Built:
    tag_latest(client, name)
    found = client.inspect_image(name)
    return Built(name=name, id=found["Id"], size=found["Size"])


def _import_base(client: Any, name: str, root: Path, report: Report) -> None:
    report(Step(label=name, text="importing"))
    repository, _, tag = name.partition(":")
    with root.open("rb") as stream:
        client.import_image_from_data(
            stream, repository=repository, tag=tag, changes=["ENV LANG=C.UTF-8", 'CMD ["bash"]']
        )
    if find_image(client, name) is None:
        raise SetupError(f"{name}: Docker took the file system but has no such image")
    report(Step(label=name, is_finished=True))


def _python_context(sources: Sources, wheels: Path) -> dict[str, bytes | Path]:
    return {**sources.python, **{f"wheels/{wheel.name}": wheel for wheel in wheels.iterdir()}}


def _notebook_context(sources: Sources) -> dict[str, bytes | Path]:
    extensions = {f"extensions/{name}": data for name, data in sources.extensions.items()}
    notebooks = {f"notebooks/{name}": data for name, data in sources.notebooks.items()}
    return {**sources.notebook, **extensions, **notebooks}


def _build(
    client: Any, name: str, arguments: Mapping[str, str], context: Mapping[str, bytes | Path], report: Report
) -> None:
    report(Step(label=name, text="building"))
    try:
        events = client.build(
            fileobj=stream_context(context),
            custom_context=True,
            tag=name,
            buildargs=dict(arguments),
            network_mode="none",
            rm=True,
            forcerm=True,
            decode=True,
            timeout=_SILENCE_S,
        )
        _follow(name, events, report)
    except docker.errors.APIError as error:
        raise SetupError(f"{name}: the build failed: {error.explanation or error}") from error
    finally:
        _remove_stages(client)
    report(Step(label=name, is_finished=True))


def _follow(name: str, events: Iterable[Mapping[str, Any]], report: Report) -> None:
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    for event in events:
        text = str(event.get("stream", "")).strip()
        if text:
            last.append(text)
            report(Step(label=name, text=text.splitlines()[0]))
        if "error" in event:
            raise SetupError(f"{name}: the build failed: {event['error']}\n" + "\n".join(last))


def _remove_stages(client: Any) -> None:
    """Free the disk from first stages, which hold all wheels; a stage in use by another build stays."""
    for stage in client.images(quiet=True, filters={"label": _STAGE_LABEL, "dangling": True}):
        try:
            client.remove_image(stage)
        except docker.errors.APIError:
            continue
