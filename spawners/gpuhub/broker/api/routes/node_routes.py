"""HTTP routes of nodes: who may use them, and their power."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Path, Request

from gpuhub.broker.api.dependencies import Admin, Caller, Cluster, create_router
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.operations.power import PowerOperations
from gpuhub.broker_api.schemas import CordonRequest, NodeView, PowerRequest


async def get_power_operations(request: Request) -> PowerOperations:
    """Return the operations on the power of the app's nodes."""
    return cast("PowerOperations", request.app.state.power)


Power = Annotated[PowerOperations, Depends(get_power_operations)]
Node = Annotated[str, Path(max_length=64)]
GpuIndex = Annotated[int, Path(ge=0, le=255)]

api = create_router("nodes")


@api.get("/nodes", responses=document_problems(422))
async def get_nodes(caller: Caller, cluster: Cluster) -> list[NodeView]:
    """Return every node with its GPUs."""
    return list(cluster.nodes(caller))


@api.post("/nodes/{name}/cordon", responses=document_problems(404, 413, 422))
async def post_cordon(name: Node, body: CordonRequest, caller: Caller, admin: Admin) -> NodeView:
    """Cordon a node: it takes no new work, and what runs there continues. Administrators only."""
    return await admin.cordon(caller, name, body)


@api.post("/nodes/{name}/drain", responses=document_problems(404, 413, 422))
async def post_drain(name: Node, body: CordonRequest, caller: Caller, admin: Admin) -> NodeView:
    """Drain a node: it takes no new work, and what runs there ends after the grace period. Administrators only."""
    return await admin.drain(caller, name, body)


@api.post("/nodes/{name}/undrain", responses=document_problems(404, 422))
async def post_undrain(name: Node, caller: Caller, admin: Admin) -> NodeView:
    """End the cordon or drain of a node, so that it takes work again. Administrators only."""
    return await admin.undrain(caller, name)


@api.post("/nodes/{name}/gpus/{index}/accept", responses=document_problems(404, 409, 422))
async def post_accept(name: Node, index: GpuIndex, caller: Caller, admin: Admin) -> NodeView:
    """Grant a GPU again that was blocked by an Xid error or a slow PCIe link. Administrators only."""
    return await admin.accept_gpu(caller, name, index)


@api.post("/nodes/{name}/power", responses=document_problems(404, 409, 413, 422))
async def post_power(name: Node, body: PowerRequest, caller: Caller, power: Power) -> NodeView:
    """Wake a node, or put one to sleep that nothing uses. Administrators only."""
    return await power.switch(caller, name, body)
