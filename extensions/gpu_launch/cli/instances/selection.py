"""Which profile a new instance gets, and which names instances have. Everything is checked before a request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpu_launch.broker.models import Cluster, Profile
from gpu_launch.errors import UsageError
from gpu_launch.launch.plan import find_model

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")
_START = "gpu-launch instance start"


def check_name(name: str) -> None:
    """Refuse a name that the hub would refuse; the empty name is the default instance.

    Raises:
        UsageError: The name has other characters, or too many.
    """
    if name and not _NAME.fullmatch(name):
        valid = re.sub(r"[^a-z0-9]+", "-", name.lower())[:32].strip("-") or "big"
        raise UsageError(
            f"--name {name}: 1 to 32 of a-z, 0-9 and - are needed, with a letter or digit at both ends.\n"
            f"{_START} --name {valid}"
        )


def choose_profile(
    cluster: Cluster, *, profile: str | None = None, model: str | None = None, image: str | None = None
) -> Profile:
    """Return the profile that the options mean: the smallest one that has the model and the image.

    Raises:
        UsageError: There is none, or the options do not say which one; the text has those that there are.
    """
    profiles = cluster.profiles
    if profile is not None:
        profiles = tuple(candidate for candidate in profiles if candidate.name == profile)
        if not profiles:
            raise UsageError(f"There is no profile {profile} for you.\n{_suggest(cluster.profiles)}")
    if model is not None:
        wanted = find_model(cluster, model)
        profiles = tuple(candidate for candidate in profiles if candidate.gpu_count and wanted in candidate.models)
    if image is not None:
        profiles = tuple(candidate for candidate in profiles if find_image(candidate, image))
    if not profiles:
        options = {"--profile": profile, "--model": model, "--image": image}
        given = " and ".join(f"{name} {value}" for name, value in options.items() if value is not None)
        offered = sorted({offered for candidate in cluster.profiles for offered in _list_images(candidate)})
        images = "" if image is None else f"; images: {', '.join(offered)}"
        raise UsageError(f"No profile has {given}.\n{_suggest(cluster.profiles)}{images}")
    if len(profiles) > 1 and model is None and image is None:
        raise UsageError(f"Which profile? Name it, or a GPU model with --model.\n{_suggest(profiles)}")
    # A whole GPU before a share of one, and one GPU before several.
    return min(profiles, key=lambda candidate: (candidate.share > 1, candidate.gpu_count))


def find_image(profile: Profile, image: str) -> str | None:
    """Return the profile's image of this name, of any tag if none is given; None if it offers none."""
    has_tag = ":" in image.rpartition("/")[2]
    return next(
        (offered for offered in _list_images(profile) if image == (offered if has_tag else _drop_tag(offered))), None
    )


def _list_images(profile: Profile) -> tuple[str, ...]:
    return tuple(dict.fromkeys((profile.image, *profile.images)))


def _drop_tag(image: str) -> str:
    return image.removesuffix(f":{image.rpartition('/')[2].partition(':')[2]}")


def _suggest(profiles: Sequence[Profile]) -> str:
    names = ", ".join(_describe(profile) for profile in profiles)
    if not profiles:
        return "There is no profile that you may use: ask the administrator."
    return f"{_START} --profile NAME; there are: {names}"


def _describe(profile: Profile) -> str:
    if not profile.gpu_count:
        return f"{profile.name} (no GPU)"
    number = (
        f"1/{profile.share} of " if profile.share > 1 else f"{profile.gpu_count} × " if profile.gpu_count > 1 else ""
    )
    return f"{profile.name} ({number}{' or '.join(profile.models) or 'any GPU'})"
