"""The errors of this package, as a user reads them.

GpuLaunchError            every expected failure; rendered in a notebook without our stack
├── UsageError            the command line or its arguments: change the cell
├── BrokerError           the broker refused or cannot be reached
├── NetworkError          this container is not on its user network
└── LaunchFailed          ranks or workers failed: read the rank's own traceback
LaunchInterrupted         the user's interrupt, after everything has been stopped
"""

from __future__ import annotations


class GpuLaunchError(Exception):
    """The launch failed."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows instead of a stack: the text alone."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(GpuLaunchError):
    """The command line is wrong; nothing was requested or started."""


class BrokerError(GpuLaunchError):
    """The broker refused, or cannot be reached. `status` is the HTTP status, None without a response.

    `retry_after_s` is the time after which a request that came too soon is accepted, None for any other.
    `help_url` is the hub's page about the error, empty where the text says all.
    """

    def __init__(
        self, text: str, *, status: int | None = None, retry_after_s: float | None = None, help_url: str = ""
    ) -> None:
        super().__init__(text)
        self.status = status
        self.retry_after_s = retry_after_s
        self.help_url = help_url

    def _render_traceback_(self) -> list[str]:
        return super()._render_traceback_() + ([f"More: {self.help_url}"] if self.help_url else [])


class NetworkError(GpuLaunchError):
    """This container has no address on its user network."""


class LaunchFailed(GpuLaunchError):
    """A rank or a worker failed. The text begins with the first failing rank's own traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class LaunchInterrupted(KeyboardInterrupt):
    """The launch was interrupted, and all its ranks are stopped."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]
