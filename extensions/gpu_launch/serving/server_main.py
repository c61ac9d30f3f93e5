"""What every rank of `gpu-launch serve` runs: its stage of the model, and in rank 0 the HTTP server.

The ranks agree on the cards' memory, from which each of them computes the same stages.
"""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpu_launch import environment
from gpu_launch.errors import UsageError
from gpu_launch.serving import http_server, model_files, model_names, partition, settings, vllm_command
from gpu_launch.serving.api_requests import ServedModel
from gpu_launch.serving.engine import Engine
from gpu_launch.serving.http_server import Endpoint
from gpu_launch.serving.model_files import ModelDescription
from gpu_launch.serving.partition import ServingNeed
from gpu_launch.serving.pipeline import GROUP_TIMEOUT, HEARTBEAT_S, Pipeline
from gpu_launch.serving.settings import ServerSettings, ServingEngine
from gpu_launch.serving.stage import Stage
from gpu_launch.units import format_span

_MIB = 1 << 20
#: Time for answers to what was open when a rank failed, seconds.
_FAREWELL_S = 2.0
_USAGE = 2


def main(words: Sequence[str] | None = None) -> None:
    """Serve until nobody asks any more, or a rank fails."""
    asked = settings.read_arguments(sys.argv[1:] if words is None else words)
    try:
        folder = model_names.find_folder(asked.model, cwd=Path.cwd(), environ=os.environ, home=Path.home())
        if uses_vllm(asked.engine):
            _run_vllm(asked, folder)
        else:
            _Rank(asked, folder).serve()
    except UsageError as error:
        sys.stderr.write(f"gpu-launch serve: {error}\n")
        if dist.is_initialized():
            # All ranks are here. With a group left, torch's threads at times abort the process when it ends.
            dist.destroy_process_group()
        sys.exit(_USAGE)


def uses_vllm(engine: ServingEngine) -> bool:
    """Return whether vLLM computes.

    Raises:
        UsageError: it is asked for, and this image does not have it.
    """
    has_vllm = importlib.util.find_spec("vllm") is not None
    if engine is ServingEngine.VLLM and not has_vllm:
        raise UsageError(
            "--engine vllm: this image has no vLLM. Choose another one with --image, or leave --engine out."
        )
    return has_vllm and engine is not ServingEngine.TRANSFORMERS


class _Rank:
    """One rank that computes with transformers."""

    def __init__(self, asked: ServerSettings, folder: Path) -> None:
        self._asked, self._folder = asked, folder
        self._model = model_files.read_folder(folder)
        context = partition.check_context(self._model, asked.context, settings.DEFAULT_CONTEXT)
        self._need = ServingNeed(slots=asked.slots, context=context)
        self._device = _choose_device()
        backend = "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=GROUP_TIMEOUT)
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()

    def serve(self) -> None:
        """Load this rank's stage and work."""
        memory = _gather_memory(self._device)
        stages = partition.choose_layers(self._model, memory, self._need)
        if self._rank == 0:
            _print(partition.format_stages(self._model, stages, memory, self._need))
        began = time.monotonic()
        stage = Stage(self._folder, self._model, stages[self._rank], self._need, self._device)
        # All ranks have their weights.
        dist.all_reduce(torch.zeros(1))
        pipeline = Pipeline(stage, rank=self._rank, ranks=self._ranks, slots=self._need.slots, device=self._device)
        if self._rank:
            pipeline.follow()
        else:
            _print(f"{self._model.name} is loaded in {format_span(time.monotonic() - began)}")
            asyncio.run(self._run_server(pipeline))
        dist.destroy_process_group()

    async def _run_server(self, pipeline: Pipeline) -> None:
        asked, need = self._asked, self._need
        engine = Engine(
            pipeline,
            slots=need.slots,
            context=need.context,
            chunk=partition.CHUNK,
            most_waiting=settings.MAX_WAITING,
            idle_s=asked.idle_s or None,
            beat_s=HEARTBEAT_S,
        )
        endpoint = build_endpoint(engine, self._model, self._folder, name=asked.name, context=need.context)
        server = http_server.start_server(endpoint, asked.port)
        idle = f", until there is no request for {format_span(asked.idle_s)}" if asked.idle_s else ""
        _print(
            f"{asked.name} is served on port {asked.port}: {need.slots} sequences of {need.context} tokens at the same "
            f"time{idle}"
        )
        failure = await _run_in_thread(engine)
        server.stop()
        if failure is not None:
            # What was open gets its error before the connections close.
            await asyncio.sleep(_FAREWELL_S)
            raise failure
        _print(f"no request for {format_span(asked.idle_s)}: the cards are free")


async def _run_in_thread(engine: Engine) -> BaseException | None:
    """Run the engine; return what failed. The thread does not keep the process alive."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            engine.run()
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            failures.append(error)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=run, name="engine", daemon=True).start()
    await ended.wait()
    return failures[0] if failures else None


def build_endpoint(engine: Engine, model: ModelDescription, folder: Path, *, name: str, context: int) -> Endpoint:
    """Return what the HTTP server needs, with the model's tokenizer."""
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(folder))
    # Encoding, in threads, changes settings of a tokenizer; decoding has one of its own.
    encoder, lock = copy.deepcopy(tokenizer), threading.Lock()

    def encode(text: str) -> list[int]:
        with lock:
            return list(encoder(text)["input_ids"])

    def encode_chat(messages: list[dict[str, str]]) -> list[int]:
        with lock:
            text = encoder.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return list(encoder(text, add_special_tokens=False)["input_ids"])

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    served = ServedModel(
        name=name,
        context=context,
        vocabulary=model.vocabulary,
        encode=encode,
        encode_chat=encode_chat if tokenizer.chat_template else None,
    )
    ends = frozenset(find_ends(folder) | {tokenizer.eos_token_id} - {None})
    return Endpoint(engine=engine, model=served, decode=decode, ends=ends, created=int(time.time()))


def find_ends(folder: Path) -> set[int]:
    """Return the tokens that end an answer, by the model's files."""
    ends: set[int] = set()
    for name in ("generation_config.json", model_files.CONFIG):
        try:
            value = json.loads((folder / name).read_text()).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        ends.update(item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int))
    return ends


def _choose_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _gather_memory(device: torch.device) -> list[int]:
    """Return the memory of each rank's card in MiB; without cards, what this machine's ranks may use."""
    own = measure_memory(device)
    everyone: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def measure_memory(device: torch.device) -> int:
    """Return the MiB of a card that a rank may use; for a CPU the machine's memory divided by its ranks."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        # CUDA's own context is there already, and counts as part of the need.
        mib = int(free // _MIB) + partition.CONTEXT_MIB
        return min(mib, environment.read().memory_cap_mib or mib)
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return int(pages * size // _MIB) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _run_vllm(asked: ServerSettings, folder: Path) -> None:
    """Become vLLM on this node; its other local ranks end, because one process has all cards of the node."""
    dist.init_process_group("gloo")
    node, nodes = int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])
    cards = int(os.environ["LOCAL_WORLD_SIZE"])
    memory = _gather_memory(_choose_device())
    local_rank, master = int(os.environ["LOCAL_RANK"]), os.environ["MASTER_ADDR"]
    dist.destroy_process_group()
    if local_rank:
        return
    by_node = [sum(memory[first : first + cards]) for first in range(0, len(memory), cards)]
    command = vllm_command.build_command(asked, folder, node=node, nodes=nodes, cards=cards, master=master)
    os.execvpe(command[0], command, vllm_command.build_environ(os.environ, divide_for_vllm(folder, by_node)))  # noqa: S606 - no shell


def divide_for_vllm(folder: Path, memory_mib: Sequence[int]) -> tuple[range, ...]:
    """Return the layers of each node in proportion to its memory; nothing for what vLLM alone can serve."""
    try:
        model = model_files.read_folder(folder)
        context = partition.check_context(model, None, settings.DEFAULT_CONTEXT)
        return partition.choose_layers(model, memory_mib, ServingNeed(slots=1, context=context))
    except UsageError as error:
        _print(f"vLLM divides the layers itself: {error}")
        return ()


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the output of the job


if __name__ == "__main__":
    main()
