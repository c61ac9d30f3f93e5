"""`[idle]` in cluster.toml, and `idle` of a profile: when notebooks that do not use their GPUs are stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from gpuhub.common.units import Span, Span0, format_span
from gpuhub.config.base import SettingsTable

Percent = Annotated[int, Field(ge=1, le=100)]


class IdleSettings(SettingsTable):
    """When a notebook that holds GPUs and does not use them is stopped; its files are kept, and its variables are lost.

    It is never stopped while a cell runs, or while a launch, ranks or a job of it run.
    """

    #: Time without activity after which it is stopped, also while it is suspended, seconds: no cell runs, no terminal
    #: and no SSH session is used, no file is saved, and its GPUs compute nothing. "0s": never.
    stop_after: Span0 = 0
    #: Time for which its GPUs are used less than `low_use` after which it is stopped, also if its user is active,
    #: seconds. "0s": never.
    low_use_after: Span0 = 0
    #: Use of a GPU below which it counts as unused, percent of the time, as `nvidia-smi` shows it.
    low_use: Percent = 5
    #: Time without activity after which a notebook with one whole GPU lends it to a request that waits for it, seconds:
    #: its GPU memory is moved into host memory, its variables stay, and it gets the GPU back when a cell runs. "0s":
    #: never, and its user cannot do it either.
    suspend_after: Span0 = 0
    #: Time for which the user is warned before, with a countdown, seconds.
    warn_before: Span = 600
    #: Time for which the warning's button keeps the notebook, seconds.
    keep: Span = 3600
    #: Time for which the button can keep an idle notebook in all, seconds, until it is used again. "0s": there is no
    #: button.
    longest_keep: Span0 = 4 * 3600

    @property
    def is_on(self) -> bool:
        """Whether any notebook is stopped by these settings."""
        return bool(self.stop_after or self.low_use_after)


class ProfileIdleSettings(SettingsTable):
    """What a profile changes of `[idle]`; None for the value there."""

    #: As in `[idle]`.
    stop_after: Span0 | None = None
    #: As in `[idle]`.
    low_use_after: Span0 | None = None
    #: As in `[idle]`.
    low_use: Percent | None = None
    #: As in `[idle]`.
    suspend_after: Span0 | None = None
    #: As in `[idle]`.
    warn_before: Span | None = None
    #: As in `[idle]`.
    keep: Span | None = None
    #: As in `[idle]`.
    longest_keep: Span0 | None = None

    def merge(self, base: IdleSettings) -> IdleSettings:
        """Return the settings with this profile's changes."""
        return base.model_copy(update=self.model_dump(exclude_none=True))


def find_idle_mistakes(base: IdleSettings, profiles: Sequence[tuple[str, ProfileIdleSettings]]) -> list[str]:
    """Return one line for each warning that would be longer than the time that it announces the end of.

    Args:
        base: `[idle]`.
        profiles: The table `idle` of each profile, with the profile's name.
    """
    tables = [
        ("idle", base),
        *((f"profile {name!r}: idle", idle.merge(base)) for name, idle in profiles if idle.model_fields_set),
    ]
    return [
        f"{where}.warn_before: {format_span(table.warn_before)} must be shorter than {key}, {format_span(limit)}"
        for where, table in tables
        for key, limit in (("stop_after", table.stop_after), ("low_use_after", table.low_use_after))
        if limit and table.warn_before >= limit
    ]
