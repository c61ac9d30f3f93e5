"""A followed job's end: what Ctrl-C does, what is said, and the exit status."""

from __future__ import annotations

from gpu_launch import wire
from gpu_launch.cli import finding, views
from gpu_launch.cli.context import Context
from gpu_launch.cli.follow import Follower, place_text
from gpu_launch.cli.said import Ended, leave
from gpu_launch.errors import BrokerError

INTERRUPTED = 130


def follow_to_end(context: Context, job: wire.Job, *, offset: int = 0, cancels: bool) -> None:
    """Follow it, and end the command with the job's exit status. With `cancels` Ctrl-C ends the job, and a second one
    leaves it to its end; else the first leaves it running.
    """
    if not job.is_ended and (text := place_text(job)):
        context.said.note(f"gpu-launch: {text}")
    follower = Follower(context=context, job=job, offset=offset)
    is_cancelled = False
    try:
        try:
            job = follower.run()
        except KeyboardInterrupt:
            if not cancels:
                raise
            is_cancelled = True
            context.said.note(f"\ngpu-launch: cancelling {job.run_id}; Ctrl-C again does not wait for its end")
            context.broker.delete_job(job.id)
            job = follower.run()
    except KeyboardInterrupt:
        _leave_it(context, job, is_cancelled=is_cancelled)
    except BrokerError as error:
        raise BrokerError(
            f"{error} {job.run_id} goes on: gpu-launch attach {job.run_id}", status=error.status
        ) from None
    finish(context, job, is_cancelled=is_cancelled)


def _leave_it(context: Context, job: wire.Job, *, is_cancelled: bool) -> None:
    context.said.end_line()
    short = finding.short(job.run_id)
    context.said.note(
        f"gpu-launch: {job.run_id} is being ended"
        if is_cancelled
        else f"\ngpu-launch: detached; the job goes on: gpu-launch attach {short}, or cancel {short}"
    )
    if context.said.is_json:
        context.said.result(views.job_json(context.broker.job(job.id)), "")
    leave(INTERRUPTED)


def finish(context: Context, job: wire.Job, *, is_cancelled: bool) -> None:
    """Say how it ended. Raises Ended for anything but exit status 0."""
    if context.said.is_json:
        # The first failing rank's traceback, which a script cannot pick out of the output.
        state = context.transfer.state(job.id) if job.exit_code and not is_cancelled else None
        context.said.result(views.job_json(job) | {"error": state.error if state is not None else ""}, "")
    if is_cancelled:
        raise Ended(f"{job.run_id} was cancelled.", status=INTERRUPTED)
    if job.exit_code is None:
        raise Ended(f"{job.run_id} ended without an exit status: {job.reason or 'no reason is told'}.", status=1)
    if job.exit_code:
        raise Ended(f"{job.run_id} ended with exit status {job.exit_code}.", status=exit_status(job.exit_code))
    context.said.note(f"gpu-launch: {job.run_id} is done; its files: gpu-launch cp {finding.short(job.run_id)}:. DIR")


def exit_status(code: int) -> int:
    """A job's exit status as a process's: 1 to 255 for anything but success."""
    return code if 0 <= code <= 255 else 1
