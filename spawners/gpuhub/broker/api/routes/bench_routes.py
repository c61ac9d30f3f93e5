"""HTTP routes of what `gpuhub bench` measured."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request

from gpuhub.broker.api.dependencies import Caller, create_router
from gpuhub.broker.api.problems import document_problems
from gpuhub.broker.operations.bench import BenchOperations
from gpuhub.broker_api.schemas.bench import BenchView


async def get_bench_operations(request: Request) -> BenchOperations:
    """Return the operations on the app's bench."""
    return cast("BenchOperations", request.app.state.bench)


Operations = Annotated[BenchOperations, Depends(get_bench_operations)]

api = create_router("nodes")


@api.get("/bench", responses=document_problems(404, 422))
async def get_bench(_caller: Caller, bench: Operations) -> BenchView:
    """Return how fast one GPU of each node and the network between the nodes are, as last measured."""
    return bench.get()


@api.put("/bench", responses=document_problems(413, 422))
async def put_bench(body: BenchView, caller: Caller, bench: Operations) -> BenchView:
    """Keep what was measured, in place of the last figures. Administrators only."""
    return await bench.save(caller, body)
