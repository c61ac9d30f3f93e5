"""The errors that gpuhub raises on purpose, with texts for users.

GpuhubError
├── SettingsError        cluster.toml is wrong: the administrator edits it
├── InvalidRequest       the request cannot be fulfilled: the user changes it
├── NotAllowed           the caller may not do this
├── NotFound             no such lease, job or node (or not the caller's)
├── Conflict             the object is in another state than the call expects
├── Unavailable          try again later: a node or service does not answer
│   ├── NodeUnreachable
│   │   └── NodeSilent   it received a request, and does not answer in time
│   ├── BrokerUnreachable
│   ├── SchedulerUnreachable  the system behind a scheduling backend
│   └── StorageUnavailable  a file server or a mount
├── ImageMissing         the node lacks an image: gpuhub sends it there
└── SetupError           the head node lacks something, or a command failed
"""

from __future__ import annotations


class GpuhubError(Exception):
    """Base of every expected failure."""

    #: Stable code for programs, in problem documents.
    code = "error"


class SettingsError(GpuhubError):
    """The settings are wrong; the text has one line for each mistake."""

    code = "settings"


class InvalidRequest(GpuhubError):
    """The request cannot be fulfilled in this cluster."""

    code = "invalid-request"


class NotAllowed(GpuhubError):
    """The caller may not do this."""

    code = "not-allowed"


class NotFound(GpuhubError):
    """There is no such object, or it belongs to another user."""

    code = "not-found"


class Conflict(GpuhubError):
    """The object is in a state that does not permit this."""

    code = "conflict"


class Unavailable(GpuhubError):
    """A node or service does not answer now."""

    code = "unavailable"


class NodeUnreachable(Unavailable):
    """A node's Docker daemon does not answer; its containers may still run."""

    code = "node-unreachable"


class NodeSilent(NodeUnreachable):
    """The daemon received a request and does not answer in time: it hangs, or the requested action does."""


class BrokerUnreachable(Unavailable):
    """The broker does not answer."""

    code = "broker-unreachable"


class SchedulerUnreachable(Unavailable):
    """The system behind the scheduling backend does not answer: what its jobs do is unknown, and none is lost."""

    code = "scheduler-unreachable"


class StorageUnavailable(Unavailable):
    """A file server does not answer or cannot be mounted, while the node itself works."""

    code = "storage-unavailable"


class ImageMissing(GpuhubError):
    """A node does not have the image."""

    code = "image-missing"


class SetupError(GpuhubError):
    """The head node could not be set up; the text names what to install or repair."""

    code = "setup"
