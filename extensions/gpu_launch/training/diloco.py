"""DiLoCo by torchft: nodes train alone for many steps, and an outer optimizer applies what they have learned.

torchft averages the change of the parameters since the last synchronization over all nodes, and takes the mean for the
gradient of an outer optimizer (https://arxiv.org/abs/2311.08105).
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gpu_launch.training.comm_modes import DILOCO_OUTER_LR, DILOCO_OUTER_MOMENTUM, DILOCO_PERIOD

#: A node waits for the slowest one at a synchronization for this time at most, and as long for a collective.
_SLOWEST = timedelta(hours=1)
_COLLECTIVE = timedelta(minutes=30)
#: Synchronizations in a row that may fail; after each, the nodes go back to the parameters of the last good one.
_FAILURES = 3
#: The reason of a refusal.
NOT_INSTALLED = "torchft is not installed in this environment (%pip install torchft, or uv pip install torchft)"


def is_installed() -> bool:
    """Return whether this Python has torchft."""
    return importlib.util.find_spec("torchft") is not None


class DilocoReplicas:
    """This rank's part in the synchronizations of its optimizers; rank 0 serves torchft's lighthouse, which all need.

    Ranks of a node are one replica of the model. Nothing is encrypted or authenticated, as in torch's own collectives.
    """

    def __init__(self) -> None:
        self._closing: list[Callable[[], None]] = []
        #: Kept here, because the stores serve as long as they are referenced.
        self._stores: list[Any] = []

    def attach(self, optimizer: Any, parameters: Sequence[Any]) -> None:
        """Synchronize these parameters of an optimizer from its next step on; all ranks must call it."""
        # torchft's servers write a line for each of their messages.
        os.environ.setdefault("RUST_LOG", "error")
        # torchft has NCCL raise errors after its own limit; without this one, it warns of a default.
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(int(_COLLECTIVE.total_seconds())))
        import torch
        import torch.distributed as dist
        from torchft.local_sgd import DiLoCo
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

        servers = self._start_servers()
        group = (ProcessGroupNCCL if dist.get_backend() == "nccl" else ProcessGroupGloo)(timeout=_COLLECTIVE)
        manager = Manager(
            pg=group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=servers.replicas,
            # DiLoCo needs the quorum before it sends. DDP has made all models equal.
            use_async_quorum=False,
            init_sync=False,
            timeout=_COLLECTIVE,
            quorum_timeout=_SLOWEST,
            rank=servers.local_rank,
            world_size=servers.local_size,
            store_addr=servers.store_host,
            store_port=servers.store_port,
            lighthouse_addr=servers.lighthouse,
            replica_id=f"node_{servers.replica}",
            hostname=servers.host,
            max_retries=_FAILURES,
        )
        self._closing.append(lambda: manager.shutdown(wait=False))
        outer = torch.optim.SGD(parameters, lr=DILOCO_OUTER_LR, momentum=DILOCO_OUTER_MOMENTUM, nesterov=True)
        # A module of just these parameters: frozen ones need not be sent.
        fragment = torch.nn.ParameterList(parameters)
        DiLoCo(manager, [fragment], optimizer, outer, sync_every=DILOCO_PERIOD).__enter__()
        # A rank that fails at once takes the lighthouse along, and the others would fail at their connection to it.
        dist.barrier(group=servers.group)

    def close(self) -> None:
        """Stop the servers of this rank."""
        while self._closing:
            self._closing.pop()()
        self._stores.clear()

    def _start_servers(self) -> _Servers:
        """Start a node's store in its first rank, and the lighthouse in rank 0, and tell all ranks where they are."""
        import torch.distributed as dist
        from torchft.coordination import LighthouseServer

        rank, size = dist.get_rank(), dist.get_world_size()
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        replica, local_rank = divmod(rank, local_size)
        host = _find_own_address()
        own: dict[str, Any] = {"host": host}
        if local_rank == 0:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self._stores.append(store)
            own["store"] = store.port
        if rank == 0:
            lighthouse = LighthouseServer(bind=f"{_bracket(host)}:0", min_replicas=size // local_size)
            self._closing.append(lighthouse.shutdown)
            own["lighthouse"] = lighthouse.address().rpartition(":")[2]
        found: list[Any] = [None] * size
        # A group of CPUs, since ranks need not have chosen their GPU.
        group = dist.new_group(backend="gloo")
        dist.all_gather_object(found, own, group=group)
        node = found[replica * local_size]
        return _Servers(
            group=group,
            host=host,
            replicas=size // local_size,
            replica=replica,
            local_rank=local_rank,
            local_size=local_size,
            store_host=node["host"],
            store_port=node["store"],
            lighthouse=f"http://{_bracket(found[0]['host'])}:{found[0]['lighthouse']}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Servers:
    """Where this rank stands, and the servers that it uses."""

    #: torch's process group of all ranks, over their CPUs.
    group: Any
    #: This rank's own address, as others reach it.
    host: str
    #: Nodes, and this one's number.
    replicas: int
    replica: int
    local_rank: int
    local_size: int
    store_host: str
    store_port: int
    lighthouse: str


def _find_own_address() -> str:
    """Return the address of this machine towards rank 0's; nothing is sent."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    family = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        host: str = probe.getsockname()[0]
    return host


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
