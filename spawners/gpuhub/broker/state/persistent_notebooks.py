"""Notebooks that ask again for their GPUs when their container was lost.

The new request waits in the queue like any other. No spawner polls it, so that the server restarter has the hub start
the server, which then finds the request.
"""

from __future__ import annotations

from gpuhub.broker.state.transaction import Transaction
from gpuhub.domain import loss_policy
from gpuhub.domain.models import EventRow, LeaseRow, NotificationRow, new_id
from gpuhub.domain.notifications import build_loss


def request_again(transaction: Transaction, lost: LeaseRow) -> None:
    """Request the GPUs of a notebook again, which has lost its container with `lost`, unless that happens too often."""
    losses = loss_policy.record_loss(lost.losses, transaction.now)
    is_restarted = loss_policy.may_restart(losses)
    node = lost.nodes[0] if lost.nodes else None
    _report(transaction, lost, build_loss(lost, transaction.now, is_restarted=is_restarted), node)
    if not is_restarted:
        return
    lease_id = new_id("l")
    transaction.put_lease(
        LeaseRow(
            id=lease_id,
            seq=transaction.next_seq(),
            key=f"again-{lease_id}",
            owner=lost.owner,
            groups=lost.groups,
            purpose=lost.purpose,
            subject=lost.subject,
            profile=lost.profile,
            resources=lost.resources,
            created_at=transaction.now,
            since=transaction.now,
            time_limit_s=lost.time_limit_s,
            is_persistent=True,
            image=lost.image,
            losses=losses,
        )
    )


def _report(transaction: Transaction, lost: LeaseRow, notification: NotificationRow, node: str | None) -> None:
    transaction.events.append(
        EventRow(
            at=transaction.now,
            kind="notebook.lost",
            text=f"notebook of {lost.owner}: {notification.body}",
            owner=lost.owner,
            lease=lost.id,
            node=node,
            notifications=(notification,),
        )
    )
