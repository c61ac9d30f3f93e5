"""Texts of notifications, several notifications as one message, and when a failed delivery is tried again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpuhub.broker_api.schemas import JobState, LeaseState, NotificationKind, Purpose
from gpuhub.common.units import format_span
from gpuhub.domain import loss_policy
from gpuhub.domain.models import JobRow, LeasedGpu, LeaseRow, NotificationRow
from gpuhub.domain.suspension import is_without_gpu

#: A request that waited less is granted while its owner watches, seconds.
LEAST_WAIT_S = 30.0
#: Time left at which a notification says so, seconds; leases that last less than twice that have none.
TIME_LEFT_S = 600.0
#: Length of a title and a text, and number of notifications whose texts are in one message.
MAX_TITLE, MAX_BODY, MAX_LISTED = 120, 600, 20
#: Seconds until each further attempt; the last one is repeated.
BACKOFF_S = (30.0, 120.0, 600.0, 1800.0, 3600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What is sent to a destination."""

    title: str
    body: str


def list_lease_notifications(
    before: LeaseRow | None, after: LeaseRow, now: float, job: JobRow | None = None
) -> Iterator[NotificationRow]:
    """Yield what is reported of a lease between two versions of its row; `job` is the one that it belongs to."""
    is_new_grant = after.granted_at is not None and (before is None or before.granted_at is None)
    waited_s = now - after.created_at
    what = _name_notebook(after) if job is None else f"Job {job.name or job.run_id}"
    if is_new_grant and after.gpus and waited_s >= LEAST_WAIT_S:
        yield NotificationRow(
            kind=NotificationKind.GRANTED,
            key=f"granted:{after.id}",
            owner=after.owner,
            title=f"Your GPU is there: {_describe_gpus(after.gpus)}",
            body=f"{what} waited {format_span(waited_s)} and starts now.",
        )
    is_back = before is not None and before.held_from != after.held_from and before.waits
    suspended = before.suspension if before is not None and is_back else None
    if suspended is not None and now - suspended.since >= LEAST_WAIT_S:
        yield NotificationRow(
            kind=NotificationKind.GRANTED,
            key=f"resumed:{after.id}:{after.held_from:.0f}",
            owner=after.owner,
            title=f"Your GPU is back: {_describe_gpus(after.gpus)}",
            body=f"{what} waited {format_span(now - suspended.since)} and continues now.",
        )
    was_suspended = before is not None and is_without_gpu(after) and not is_without_gpu(before)
    if job is not None and after.suspension is not None and was_suspended:
        yield NotificationRow(
            kind=NotificationKind.JOB_PREEMPTED,
            key=f"suspended:{after.id}:{after.suspension.begun_at:.0f}",
            owner=after.owner,
            title=f"{what} is suspended",
            body="Others need its GPU. What it has there is kept in host memory. It continues when the GPU is free.",
        )
    if after.state is LeaseState.QUARANTINED and (before is None or before.state is not LeaseState.QUARANTINED):
        yield NotificationRow(
            kind=NotificationKind.GPU_FAILED,
            key=f"quarantined:{after.id}",
            title=f"Blocked: {_describe_gpus(after.gpus)}",
            body=f"A lease of {after.owner} ended without proof that nothing of it runs there any more: {after.note}. "
            "Its GPUs stay blocked until the node gives the proof, or until `gpuhub lease force`.",
        )


def list_job_notifications(before: JobRow | None, after: JobRow, now: float) -> Iterator[NotificationRow]:
    """Yield what is reported of a job between two versions of its row."""
    if before is not None and before.state is after.state:
        return
    name = f"Job {after.name or after.run_id}"
    if after.state is JobState.PREEMPTING:
        yield NotificationRow(
            kind=NotificationKind.JOB_PREEMPTED,
            key=f"preempted:{after.id}:{after.preemptions}",
            owner=after.owner,
            title=f"{name} is preempted",
            body=f"{_sentence(after.reason or 'others need its GPUs')} It may write a checkpoint, waits again, and "
            "starts again when GPUs are free.",
        )
    # A launch of a notebook ends before its user's eyes.
    elif after.state is JobState.ENDED and after.detached:
        is_failure = after.has_failed or after.exit_code not in {0, None}
        ran = "" if after.started_at is None else f" It ran for {format_span(now - after.started_at)}."
        yield NotificationRow(
            kind=NotificationKind.JOB_FAILED if is_failure else NotificationKind.JOB_ENDED,
            key=f"ended:{after.id}",
            owner=after.owner,
            title=f"{name} failed" if is_failure else f"{name} has ended",
            body=f"{_sentence(after.reason or 'done')}{ran}",
        )


def build_time_left(lease: LeaseRow, left_s: float) -> NotificationRow:
    """Return the notification that a lease ends soon."""
    what = _name_notebook(lease) if lease.purpose is Purpose.NOTEBOOK else "Your job"
    return NotificationRow(
        kind=NotificationKind.TIME_LEFT,
        key=f"time-left:{lease.id}:{lease.expires_at or 0:.0f}",
        owner=lease.owner,
        title=f"{format_span(left_s)} left: {_describe_gpus(lease.gpus) or ', '.join(lease.nodes)}",
        body=f"{what} reaches its time limit then. Extend it on the hub's page of GPUs unless others wait for them.",
        valid_s=left_s,
    )


def has_little_time(lease: LeaseRow, now: float) -> bool:
    """Return whether a lease has less than `TIME_LEFT_S` left, and lasts for more than twice that in all."""
    if lease.expires_at is None or lease.granted_at is None:
        return False
    return 0 < lease.expires_at - now <= TIME_LEFT_S and lease.expires_at - lease.granted_at > 2 * TIME_LEFT_S


def build_loss(lease: LeaseRow, now: float, *, is_restarted: bool) -> NotificationRow:
    """Return the notification that a persistent notebook has lost its container."""
    what, where = _name_notebook(lease), ", ".join(lease.nodes)
    then = (
        "It asks again for its GPUs, and starts when they are free."
        if is_restarted
        else f"It is not started again: that happened {loss_policy.MOST_RESTARTS} times within an hour. "
        "Start it by hand."
    )
    return NotificationRow(
        kind=NotificationKind.NOTEBOOK_LOST,
        key=f"lost:{lease.id}",
        owner=lease.owner,
        title=f"{what} was lost on {where}",
        body=f"{what} ended on {where} without being stopped, such as by a reboot. {then} Variables are lost, files "
        "are kept.",
    )


def build_idle(lease: LeaseRow, state: str, left_s: float, now: float) -> NotificationRow:
    """Return the notification that an idle notebook will be stopped; `state` says why it counts as idle."""
    return NotificationRow(
        kind=NotificationKind.IDLE,
        key=f"idle:{lease.id}:{now + left_s:.0f}",
        owner=lease.owner,
        title=f"Your idle notebook will be stopped in {format_span(left_s)}",
        body=f"{_name_notebook(lease)} with {_describe_gpus(lease.gpus)}: {state}. Run a cell, or keep it on any page "
        "of the hub. Files are kept, variables are lost.",
        valid_s=left_s,
    )


def build_test(destination: str, owner: str, now: float) -> NotificationRow:
    """Return the notification with which a user checks a destination; it is sent there alone."""
    return NotificationRow(
        kind=NotificationKind.TEST,
        key=f"test:{destination}:{now:.3f}",
        owner=owner,
        title="Notifications of gpuhub arrive here",
        body="This is the test that you asked for.",
        valid_s=120.0,
    )


def build_condition(
    kind: NotificationKind, subject: str, title: str, body: str, now: float, *, is_open: bool
) -> NotificationRow:
    """Return the notification for the owner of the machines that a problem of `subject` begins or is over."""
    return NotificationRow(
        kind=kind, key=f"{subject}:{now:.3f}", title=title, body=body, subject=subject, is_open=is_open
    )


def combine(rows: Sequence[NotificationRow], *, is_repeated: bool) -> Message:
    """Return all notifications that wait for one destination as one message, oldest first.

    Args:
        rows: At least one.
        is_repeated: The broker ended while it was sent, so that the receiver may have it already.
    """
    remark = "gpuhub restarted while it sent this, so you may have it already.\n" if is_repeated else ""
    if len(rows) == 1:
        return Message(title=_cut(rows[0].title, MAX_TITLE), body=_cut(remark + rows[0].body, MAX_BODY))
    lines = [f"• {_cut(row.title, MAX_TITLE)}: {_cut(row.body, MAX_BODY)}" for row in rows[:MAX_LISTED]]
    if len(rows) > MAX_LISTED:
        lines.append(f"… and {len(rows) - MAX_LISTED} more")
    return Message(title=f"{len(rows)} notifications of gpuhub", body=remark + "\n".join(lines))


def choose_pause(attempts: int) -> float:
    """Return the seconds until the next attempt, after this number of them."""
    return BACKOFF_S[min(max(attempts, 1), len(BACKOFF_S)) - 1]


def _name_notebook(lease: LeaseRow) -> str:
    return f"Your notebook {lease.subject!r}" if lease.subject else "Your notebook"


def _describe_gpus(gpus: Sequence[LeasedGpu]) -> str:
    """Return the GPUs for people, such as `2 × RTX 5090 on rig1, rig2`."""
    models = ", ".join(
        f"{sum(gpu.model == model for gpu in gpus)} × {model}" if sum(gpu.model == model for gpu in gpus) > 1 else model
        for model in dict.fromkeys(gpu.model for gpu in gpus)
    )
    return f"{models} on {', '.join(dict.fromkeys(gpu.node for gpu in gpus))}" if gpus else ""


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"
