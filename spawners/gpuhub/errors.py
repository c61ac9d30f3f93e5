"""The errors gpuhub raises on purpose. Their text is safe to show to a user.

GpuhubError
├── SettingsError        cluster.toml is wrong: the administrator edits it
├── InvalidRequest       the user asks for something that cannot be: they choose again
├── NotAllowed           the caller may not do this
├── NotFound             no such lease, job or node (or not the caller's)
├── Conflict             the thing is in another state than the call expects
├── Unavailable          try again later: a node or service does not answer
│   ├── NodeUnreachable
│   │   └── NodeSilent   it was asked, and does not answer in time
│   ├── BrokerUnreachable
│   └── StorageUnavailable  a file server or a mount
├── ImageMissing         the node lacks an image: it is sent there
└── SetupError           the head node lacks something, or a command failed
"""

from __future__ import annotations


class GpuhubError(Exception):
    """Base of every expected failure."""

    #: Stable word for machines, used in problem documents.
    code = "error"


class SettingsError(GpuhubError):
    """The settings are wrong; the text has one line a mistake."""

    code = "settings"


class InvalidRequest(GpuhubError):
    """What was asked for is not possible here."""

    code = "invalid-request"


class NotAllowed(GpuhubError):
    """The caller may not do this."""

    code = "not-allowed"


class NotFound(GpuhubError):
    """There is no such thing, or it is not the caller's."""

    code = "not-found"


class Conflict(GpuhubError):
    """The thing is not in a state that allows this."""

    code = "conflict"


class Unavailable(GpuhubError):
    """Something needed does not answer at present."""

    code = "unavailable"


class NodeUnreachable(Unavailable):
    """A node's Docker daemon does not answer: what runs there is unknown, not gone."""

    code = "node-unreachable"


class NodeSilent(NodeUnreachable):
    """The daemon was asked and gives no answer: it hangs, or what it was asked to do does."""


class BrokerUnreachable(Unavailable):
    """The broker does not answer."""

    code = "broker-unreachable"


class StorageUnavailable(Unavailable):
    """Where files are does not answer, or cannot be mounted: nothing is wrong with the node itself."""

    code = "storage-unavailable"


class ImageMissing(GpuhubError):
    """A node does not have the image."""

    code = "image-missing"


class SetupError(GpuhubError):
    """The head node could not be set up; the text says what to install or mend."""

    code = "setup"
