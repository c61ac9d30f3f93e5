"""Notebooks that ask again for their GPUs when their container was lost.

The new request waits in the queue like any other. No spawner polls it, so that the server restarter makes the hub start
the server, which then finds the request.
"""

from __future__ import annotations

from gpuhub.broker.state import effects
from gpuhub.broker.state.transaction import Transaction
from gpuhub.domain import loss_policy
from gpuhub.domain.models import EventRow, LeaseRow, NotificationRow
from gpuhub.domain.notifications import build_loss


def request_again(transaction: Transaction, lost: LeaseRow) -> None:
    """Request the GPUs of a notebook again, which has lost its container with `lost`, unless that happens too often."""
    losses = loss_policy.record_loss(lost.losses, transaction.now)
    is_restarted = loss_policy.may_restart(losses)
    node = lost.nodes[0] if lost.nodes else None
    _report(transaction, lost, build_loss(lost, transaction.now, is_restarted=is_restarted), node)
    if not is_restarted:
        return
    effects.request_again(
        transaction, lost, created_at=transaction.now, is_persistent=True, image=lost.image, losses=losses
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
