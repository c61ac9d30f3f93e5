"""Operations on shares of saved notebooks: what owners do with theirs, and what viewers see."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import PurePosixPath

from gpuhub.broker import audit
from gpuhub.broker.admission.users import UserDirectory
from gpuhub.broker.files.user_files import FileStream, UserFiles, check_relative_path
from gpuhub.broker.operations.output_shares import require_viewer
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.views import serializers
from gpuhub.broker_api.schemas import OutputShareView
from gpuhub.broker_api.schemas.output_shares import NotebookShareRequest, SharedNotebookView
from gpuhub.common.errors import NotAllowed, NotFound
from gpuhub.domain.models import Identity, OutputShareRow

_MAX_NAME = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedNotebook:
    """A notebook that a caller may view; `row` is any of its shares for the owner."""

    row: OutputShareRow
    is_own: bool


class NotebookShareOperations:
    """Shares saved notebooks with other users, read-only."""

    def __init__(self, core: BrokerState, files: UserFiles, users: UserDirectory) -> None:
        """`users` are the hub's."""
        self._core = core
        self._shares = core.shares
        self._files = files
        self._users = users

    async def share(self, caller: Identity, viewer: str, request: NotebookShareRequest) -> OutputShareView:
        """Share a notebook of the caller's home with a user; a repeated call sets the expiry again.

        Raises:
            NotFound: there is no such notebook, or the hub has no such user.
            NotAllowed, Conflict, InvalidRequest: the notebook cannot be shared, or not with this user.
            SizeLimitExceeded, TooManyStreams, Unavailable: the notebook cannot be read.
        """
        owner = self._files.require_user(caller)
        check_relative_path(request.path)
        path = str(PurePosixPath(request.path))
        await require_viewer(self._users, owner, viewer, "the notebook's")
        await self._files.read_notebook_file(owner, path, owner)
        now = self._core.clock.now()
        row = OutputShareRow(
            subject=build_notebook_id(owner, path),
            viewer=viewer,
            owner=owner,
            run_id="",
            name=PurePosixPath(path).name[:_MAX_NAME],
            created_at=now,
            expires_at=now + request.for_s,
            path=path,
        )
        await self._shares.put(row)
        audit.note_reason(f"{path} with {viewer} for {request.for_s} s")
        return serializers.build_output_share(row, owner)

    async def end(self, caller: Identity, notebook_id: str, viewer: str | None = None) -> list[OutputShareView]:
        """End the shares of the caller's notebook, or the one with a user, and return them.

        Raises:
            NotFound: the caller shares no such notebook.
            NotAllowed: the caller is an administrator or a service.
        """
        rows = self._find_rows(notebook_id)
        own = [row for row in rows if caller.is_user and row.owner == caller.name]
        if not own and not (rows and caller.sees_all):
            raise NotFound("you share no such notebook, or no longer")
        if not own:
            raise NotAllowed(f"only {rows[0].owner} ends the shares of this notebook; end all those of a user instead")
        ended = [row for row in own if viewer in (None, row.viewer)]
        await self._shares.end(ended)
        return [serializers.build_output_share(row, caller.name) for row in ended]

    def find_shared(self, caller: Identity, notebook_id: str) -> SharedNotebook:
        """Return a notebook that the caller shares, or that its owner shares with the caller.

        Raises:
            NotFound: there is no such share.
            NotAllowed: the caller is an administrator or a service, with whom it is not shared.
        """
        rows = self._find_rows(notebook_id)
        for row in rows if caller.is_user else ():
            if caller.name in (row.owner, row.viewer):
                return SharedNotebook(row=row, is_own=caller.name == row.owner)
        if rows and caller.sees_all:
            raise NotAllowed(f"only {rows[0].owner} and the users with whom it is shared may view this notebook")
        raise NotFound(f"this notebook is not shared with {caller.name}, or no longer: ask its owner")

    async def read(self, caller: Identity, shared: SharedNotebook) -> SharedNotebookView:
        """Return what the page of a shared notebook shows beside it.

        Raises:
            NotFound, InvalidRequest, SizeLimitExceeded, TooManyStreams, Unavailable: the file cannot be read.
        """
        row = shared.row
        found = await self._files.read_notebook_file(caller.name, row.path, row.owner)
        return SharedNotebookView(
            id=row.subject,
            name=row.name,
            owner=row.owner,
            saved_at=serializers.to_datetime(found.saved_ms / 1000),
            size=found.size,
            expires_at=None if shared.is_own else serializers.to_datetime(row.expires_at),
        )

    async def render(self, caller: Identity, shared: SharedNotebook) -> FileStream:
        """Return the notebook as HTML, of which nothing may be trusted.

        Raises:
            NotFound, InvalidRequest, SizeLimitExceeded, TooManyStreams, Unavailable: the notebook cannot be shown.
        """
        return await self._files.render_notebook(caller.name, shared.row.path, shared.row.owner)

    async def wait_until_ended(self, shared: SharedNotebook) -> None:
        """Return when the share has ended; for the owner, when that has of which the notebook was found."""
        await self._shares.wait_until_ended(shared.row.subject, shared.row.viewer)

    def _find_rows(self, notebook_id: str) -> list[OutputShareRow]:
        rows = [row for row in self._shares.list_of(notebook_id) if row.path]
        if rows:
            audit.note_owner(rows[0].owner)
        return rows


def build_notebook_id(owner: str, path: str) -> str:
    """Return the id of a notebook in a user's home: the same for all its shares, so that a link stays valid."""
    digest = hashlib.sha256("\0".join((owner, path)).encode()).hexdigest()
    return f"nb-{digest[:24]}"
