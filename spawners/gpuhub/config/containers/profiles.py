"""`[[profiles]]` in cluster.toml: what a user picks in the spawn form, and whether the nodes can provide it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from gpuhub.common import gpu
from gpuhub.common.errors import InvalidRequest, NotAllowed
from gpuhub.common.units import Size, Span
from gpuhub.config.base import (
    ComputeCapability,
    DatasetName,
    DriverVersion,
    GroupName,
    ListOf,
    Number,
    ProfileName,
    SettingsTable,
    SlurmName,
    Text,
)
from gpuhub.config.containers.idle import ProfileIdleSettings

#: Name of an image, with its tag or digest.
ImageName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-zA-Z0-9._/:@-]{0,200}$")]


class ProfileSettings(SettingsTable):
    """A choice of the spawn form: GPUs, an image and limits."""

    #: Name in URLs and commands; each profile needs its own.
    name: ProfileName
    #: Heading of the profile in the spawn form.
    title: Text
    #: Text below the heading in the spawn form.
    description: Annotated[str, StringConstraints(max_length=500)] = ""
    #: Image of the notebook container.
    image: ImageName = "gpuhub/notebook:latest"
    #: Other images that a user may choose instead of `image`. Empty: no choice.
    images: ListOf[ImageName] = ()
    #: Number of GPUs, all on one node; 0 for a CPU-only profile.
    gpu_count: Annotated[int, Field(ge=0, le=64)] = 1
    #: GPU model as NVML names it, without "NVIDIA GeForce"; None for any model.
    gpu_model: Text | None = None
    #: GPU models, in order of preference; excludes `gpu_model`. Empty for any model.
    gpu_models: ListOf[Text] = ()
    #: Minimum memory of each GPU, bytes.
    gpu_memory: Size = 0
    #: Minimum version of NVIDIA's driver, such as "570" or "570.86.15"; None for any.
    gpu_driver: DriverVersion | None = None
    #: Minimum CUDA compute capability, such as "8.9"; None for any.
    gpu_capability: ComputeCapability | None = None
    #: Number of equal shares that a GPU is divided into; the notebook gets one of them, with that fraction of the GPU's
    #: memory as its cap. 1 for a whole GPU.
    gpu_share: Annotated[int, Field(ge=1, le=64)] = 1
    #: Reserve the whole node: no other lease runs there at the same time.
    exclusive: bool = False
    #: CPU cores of the container; None for its GPUs' share of the node.
    cpus: Annotated[Number, Field(gt=0, le=1024)] | None = None
    #: Memory of the container, bytes; None for its GPUs' share of the node.
    memory: Size | None = None
    #: Size of /dev/shm, bytes, which counts in `memory`; None for half of the memory.
    shm: Size | None = None
    #: Maximum number of processes and threads in the container.
    pids: Annotated[int, Field(ge=64, le=1_000_000)] = 4096
    #: Maximum data that the container may write outside home, scratch and datasets, bytes; None for no limit. Docker
    #: supports it where its data is on XFS with project quotas, and refuses the container elsewhere.
    disk: Size | None = None
    #: Size of /tmp and of /var/tmp, bytes. They are in memory and count in `memory`. None for half of `memory` or, with
    #: `disk`, for folders on the node's disk.
    tmp: Size | None = None
    #: Time limit of the lease, seconds from its grant; None for no limit.
    time_limit: Span | None = None
    #: What notebooks of this profile have instead of the values of `[idle]`.
    idle: ProfileIdleSettings = ProfileIdleSettings()
    #: Datasets, such as "datasets/imagenet", of which the node gets a copy on its own disk before the notebook starts,
    #: besides those of `stage` in `[storage]`.
    stage: ListOf[DatasetName] = ()
    #: Groups whose members alone may use the profile; empty for all users.
    groups: ListOf[GroupName] = ()
    #: Slurm partition, with `engine = "slurm"`; None: the one of `[slurm]`.
    partition: SlurmName | None = None
    #: Slurm account, with `engine = "slurm"`; None: the one of `[slurm]`.
    account: SlurmName | None = None
    #: Slurm QOS, with `engine = "slurm"`; None: the one of `[slurm]`.
    qos: SlurmName | None = None
    #: Slurm reservation, with `engine = "slurm"`; None: the one of `[slurm]`.
    reservation: SlurmName | None = None

    @model_validator(mode="after")
    def _cpu_only(self) -> Self:
        asks = (self.gpu_model, self.gpu_models, self.gpu_memory, self.gpu_driver, self.gpu_capability)
        if self.gpu_count == 0 and any(asks):
            raise ValueError(
                "gpu_model, gpu_models, gpu_memory, gpu_driver and gpu_capability need gpu_count of at least 1"
            )
        if self.gpu_model is not None and self.gpu_models:
            raise ValueError("gpu_model and gpu_models exclude each other")
        if self.gpu_share > 1 and (self.gpu_count != 1 or self.exclusive):
            raise ValueError("gpu_share above 1 is a part of one GPU: it needs gpu_count = 1, and no exclusive")
        return self

    @property
    def offered_images(self) -> tuple[str, ...]:
        """The images that a user may choose, with the default first."""
        return tuple(dict.fromkeys((self.image, *self.images)))

    def with_image(self, image: str | None) -> Self:
        """Return the profile with the image that a user chose; None for its default.

        Raises:
            InvalidRequest: The profile does not offer the image; the text names those that it offers.
        """
        if image is None:
            return self
        if image not in self.offered_images:
            raise InvalidRequest(
                f"profile {self.name!r} does not offer the image {image[:200]!r}; it offers: "
                f"{', '.join(self.offered_images)}"
            )
        return self.model_copy(update={"image": image})

    @property
    def models(self) -> tuple[str, ...]:
        """The accepted models in order of preference; empty for any."""
        return self.gpu_models or ((self.gpu_model,) if self.gpu_model is not None else ())

    def admits(self, groups: Collection[str]) -> bool:
        """Return whether a user with these groups may use the profile."""
        return not self.groups or any(group in groups for group in self.groups)

    def explain_refusal(self, owner: str, groups: Collection[str]) -> str | None:
        """Return why a user with these groups may not use the profile; None if the user may."""
        if self.admits(groups):
            return None
        return f"profile {self.name!r} is only for members of {' or '.join(self.groups)}, and {owner} is not one"

    def check_groups(self, owner: str, groups: Collection[str]) -> None:
        """Check that a user with these groups may use the profile.

        Raises:
            NotAllowed: The user is in none of the profile's groups; the text names them.
        """
        refusal = self.explain_refusal(owner, groups)
        if refusal is not None:
            raise NotAllowed(refusal)


def gpu_requirement(profile: ProfileSettings) -> gpu.GpuRequirement:
    """Return the requirement that each GPU of a profile must meet."""
    return gpu.GpuRequirement(
        models=profile.models,
        least_memory_mib=profile.gpu_memory // 1024**2,
        least_driver=profile.gpu_driver,
        least_capability=None if profile.gpu_capability is None else gpu.parse_capability(profile.gpu_capability),
    )


def unsatisfiable_profiles(profiles: tuple[ProfileSettings, ...], cards: dict[str, list[gpu.GpuSpec]]) -> list[str]:
    """Return one line for each profile that none of the nodes can ever satisfy.

    Args:
        profiles: the profiles to check.
        cards: the GPUs of each node, by its name.
    """
    return [
        f"profiles: {profile.name!r} wants {gpu.describe_gpus(profile.gpu_count, gpu_requirement(profile))} "
        f"on one node, and no node has that; there are: {gpu.describe_nodes(cards)}"
        for profile in profiles
        if profile.gpu_count
        and not any(
            sum(_checkable_part(gpu_requirement(profile)).accepts(card) for card in on_node) >= profile.gpu_count
            for on_node in cards.values()
        )
    ]


def _checkable_part(requirement: gpu.GpuRequirement) -> gpu.GpuRequirement:
    """Return the requirement without capability and driver, which cluster.toml does not state for a node."""
    return replace(requirement, least_capability=None, least_driver=None)
