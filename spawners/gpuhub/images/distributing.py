"""Sends images from the daemon that has them to daemons that lack them: a save streamed into a load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpuhub.errors import ImageMissing, SetupError
from gpuhub.images.building import find_image, tag_latest
from gpuhub.images.progress import Report, Step

_PIECE = 1 << 20


def send_image(name: str, source: Any, target: Any, node: str, report: Report) -> bool:
    """Have the image on the target's daemon too, under the same name; whether it had to be sent.

    `source` and `target` are docker.APIClients with a time limit that suits a large image.

    Raises:
        ImageMissing: the source has no such image.
        SetupError: the target did not take it.
    """
    original = find_image(source, name)
    if original is None:
        raise ImageMissing(f"{name}: there is no such image on the node it should be sent from")
    if is_same(original, find_image(target, name)):
        return False
    label = f"{node}: {name}"
    stream = _counted(source.get_image(name, chunk_size=_PIECE), label, original["Size"], report)
    for event in target.load_image(stream):
        if "error" in event:
            raise SetupError(f"{label}: Docker refused it: {event['error']}")
    if not is_same(original, find_image(target, name)):
        raise SetupError(f"{label}: Docker loaded something else than was sent")
    report(Step(label=label, done=original["Size"], text="sent", is_finished=True))
    return True


def is_same(image: Mapping[str, Any], other: Mapping[str, Any] | None) -> bool:
    """Whether two daemons' descriptions are of the same image.

    Ids are equal among daemons with the same kind of image store only, so that layers and settings count as well.
    """
    return other is not None and (image["Id"] == other["Id"] or _content(image) == _content(other))


def _content(image: Mapping[str, Any]) -> list[Any]:
    config = image["Config"]
    settings = [config.get(key) for key in ("User", "Env", "Entrypoint", "Cmd", "WorkingDir")]
    return [image["RootFS"].get("Layers"), settings]


def _counted(pieces: Iterator[bytes], label: str, total: int, report: Report) -> Iterator[bytes]:
    done = 0
    for piece in pieces:
        yield piece
        done += len(piece)
        report(Step(label=label, done=done, total=total))


def ensure_sent(names: Sequence[str], source: Any, target: Any, node: str, report: Report) -> None:
    """Have every image on the target, `latest` meaning it there too. Raises as `send_image` does."""
    for name in names:
        send_image(name, source, target, node, report)
        tag_latest(target, name)
