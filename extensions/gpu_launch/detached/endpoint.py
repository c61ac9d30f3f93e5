"""A served model from a notebook: `gpu_launch.serve` submits its job, and its endpoint waits, chats and ends it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_launch import environment
from gpu_launch.broker import models
from gpu_launch.broker.cards import list_accepted_cards
from gpu_launch.broker.client import BrokerClient
from gpu_launch.broker.port_client import PortClient
from gpu_launch.detached.submit import JobServer, submit_from_notebook
from gpu_launch.errors import BrokerError, GpuLaunchError, UsageError
from gpu_launch.launch.plan import missing_broker, name_models
from gpu_launch.options import command
from gpu_launch.serving import request, settings
from gpu_launch.serving.settings import ServerSettings

#: Seconds between polls of a job whose server does not listen yet.
_POLL_S = 1.0
#: Users who reach a job's port besides its owner, as the broker limits them.
_MAX_USERS = 32


def serve(
    asked: ServerSettings, demand: Mapping[str, Any], *, users: Sequence[str], sleeps: bool, before: Mapping[str, str]
) -> Endpoint:
    """Submit the job of a model's server.

    Args:
        asked: What is served.
        demand: The keywords of `gpu_launch.run` that ask for GPUs.
        users: Who may use it besides the owner.
        sleeps: Whether the job starts again at the next request after it was idle for too long.
        before: The environment when the notebook began.

    Raises:
        UsageError: before anything is asked for.
        BrokerError: the broker refuses.
    """
    request.check_settings(asked)
    if isinstance(users, str) or len(users) > _MAX_USERS:
        raise UsageError(f'allow_users: a list of at most {_MAX_USERS} users is needed, such as ["ben"].')
    env = environment.read()
    if missing := missing_broker(env):
        raise UsageError(f"serve needs the broker: {missing}.")
    asked, description = request.read_local_model(asked, cwd=Path.cwd(), environ=os.environ, home=env.home)
    # A server that nobody asks writes nothing for hours.
    keywords = {**demand, "module": True, "stacks_after": "0s"}
    options = command.build_from_keywords(keywords, script=settings.MODULE, arguments=settings.write_arguments(asked))
    if options.least_nnodes is not None:
        raise UsageError("nnodes: one number of nodes is needed, between which the model is divided.")
    cluster = BrokerClient.for_notebook(env).get_cluster()
    cards = list_accepted_cards(cluster, name_models(options.demand, cluster))
    checked = request.check_model(asked, description, cards, options.nnodes * options.nproc_per_node)
    if checked.least_memory_mib is not None and not options.demand.least_memory_mib:
        options = replace(options, demand=replace(options.demand, least_memory_mib=checked.least_memory_mib))
    for note in checked.notes:
        sys.stdout.write(f"gpu_launch: {note}\n")
    server = JobServer(
        name=f"serve {asked.name}"[:80],
        port=asked.port,
        users=tuple(dict.fromkeys(users)),
        sleeps=sleeps and asked.idle_s > 0,
    )
    job = submit_from_notebook(options, before=before, server=server)
    return Endpoint(env, run_id=job.run_id, job_id=job.job_id, model=asked.name)


class Endpoint:
    """A served model: its address, and a conversation with it."""

    def __init__(self, env: environment.Environment, *, run_id: str, job_id: str, model: str) -> None:
        self._broker = BrokerClient.for_notebook(env)
        self._port = PortClient(env, job_id)
        #: The run's id, for %gpu_logs.
        self.run_id = run_id
        self._job_id = job_id
        #: Name of the model in requests.
        self.model = model
        #: The conversation so far, which `chat` continues.
        self.messages: list[dict[str, str]] = []

    @property
    def base_url(self) -> str:
        """The address for OpenAI's clients within the cluster; the key is a token of the hub."""
        return f"{self._port.url}/v1"

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the model is loaded; say what it waits for.

        Raises:
            GpuLaunchError: The job has ended, or the time is over.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        shown = ""
        while not self._port.is_answering("/health"):
            job = self._broker.get_job(self._job_id)
            if job.state in (models.STOPPING, models.ENDED):
                raise GpuLaunchError(
                    f"{self.model} is not served: the job has ended{f' ({job.reason})' if job.reason else ''}. "
                    f"Its output: %gpu_logs {self.run_id}"
                )
            text = job.waiting_for or f"it is {job.state}"
            if text != shown:
                sys.stdout.write(f"gpu_launch: {self.model}: {text}\n")
                shown = text
            if deadline is not None and time.monotonic() > deadline:
                raise GpuLaunchError(f"{self.model} is not served after {timeout_s:g} s: {text}.")
            time.sleep(_POLL_S)

    def chat(self, text: str, *, show: bool = True, **options: Any) -> str:
        """Continue the conversation: show the answer as it comes, and return it.

        Args:
            text: What the user says.
            show: Whether the answer is shown.
            options: More fields of OpenAI's request, such as `temperature=0` or `max_tokens=200`.

        Raises:
            GpuLaunchError: The job has ended.
            BrokerError: The request is refused.
        """
        self.wait()
        messages = [*self.messages, {"role": "user", "content": text}]
        body = {"model": self.model, "messages": messages} | options | {"stream": True}
        answer = ""
        for part in self._read_parts(body):
            answer += part
            if show:
                sys.stdout.write(part)
                sys.stdout.flush()
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        if show:
            sys.stdout.write("\n")
        return answer

    def reset(self) -> None:
        """Forget the conversation."""
        self.messages = []

    def stop(self) -> None:
        """End the job; its GPUs are free then."""
        self._broker.delete_job(self._job_id)

    def __repr__(self) -> str:
        return f"<{self.model} at {self.base_url}, {self.run_id}>"

    def _read_parts(self, body: Mapping[str, Any]) -> Iterator[str]:
        for line in self._port.stream("/v1/chat/completions", body):
            data = line.removeprefix("data: ")
            if data in (line, "[DONE]"):
                continue
            event = json.loads(data)
            if "error" in event:
                raise BrokerError(str(event["error"].get("message")))
            for choice in event.get("choices", ()):
                yield str(choice.get("delta", {}).get("content") or "")
