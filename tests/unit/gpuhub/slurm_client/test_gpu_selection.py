"""What is asked of Slurm for a request: which type, without which nodes, for how long."""

from __future__ import annotations

from typing import Any

from gpuhub.common.gpu import GpuRequirement, GpuSpec
from gpuhub.config.settings import ProfileSettings
from gpuhub.config.slurm import SlurmSettings
from gpuhub.scheduler.interface import GpuSlot, NodeCapacity, SchedulingRequest
from gpuhub.slurm_client.gpu_selection import GpuSelection, build_submission, select_gpus
from gpuhub.slurm_client.models import SlurmNode, SlurmPartition, SlurmSite, SlurmSubmission, Submitter
from gpuhub.slurm_client.submission import HOLDER_SCRIPT

MEMORY = {"RTX 5090": 32607, "RTX 5070": 12227, "RTX 5060": 8151}
ADA = Submitter(name="ada", uid=1001, gid=1001)


def supply(name: str, *models: str, driver: str = "580.1", **memory: int) -> NodeCapacity:
    cards = [GpuSpec(model=model, memory_mib=memory.get("memory_mib", MEMORY[model])) for model in models]
    slots = tuple(GpuSlot(uuid=f"{name}{at}", node=name, index=at, card=card) for at, card in enumerate(cards))
    return NodeCapacity(name=name, slots=slots, driver=driver)


def slurm_node(name: str, *models: str, is_typed: bool = True, **further: Any) -> SlurmNode:
    kinds = [model.lower().replace(" ", "") if is_typed else "" for model in models]
    told = {"state": "idle", "takes_work": True, "gpus": {kind: kinds.count(kind) for kind in kinds}, **further}
    return SlurmNode(name=name, **told)


#: Two nodes of one card each, and one with two.
CLUSTER = {"n1": ("RTX 5090",), "n2": ("RTX 5070",), "n3": ("RTX 5060", "RTX 5070")}


def select(
    request: SchedulingRequest,
    cluster: dict[str, tuple[str, ...]] = CLUSTER,
    *,
    strangers: tuple[str, ...] = (),
    is_typed: bool = True,
    table: SlurmSettings | None = None,
) -> GpuSelection | None:
    supplies = {name: supply(name, *models) for name, models in cluster.items()}
    nodes = [slurm_node(name, *models, is_typed=is_typed) for name, models in cluster.items()]
    nodes += [slurm_node(name, "RTX 5090") for name in strangers]
    return select_gpus(request, supplies, nodes, table or SlurmSettings())


def request(**fields: Any) -> SchedulingRequest:
    wants = {name: fields.pop(name) for name in ("models", "least_memory_mib", "least_driver") if name in fields}
    return SchedulingRequest(id="l1", owner="ada", requirement=GpuRequirement(**wants), **fields)


def test_any_gpu_is_requested_without_a_type() -> None:
    assert select(request()) == GpuSelection()


def test_one_model_is_requested_by_its_type() -> None:
    assert select(request(models=("rtx 5090",))) == GpuSelection(gpu_type="rtx5090")
    assert select(request(models=("RTX 5070",))) == GpuSelection(gpu_type="rtx5070")
    table = SlurmSettings(gpu_types={"RTX 5090": "big"})
    typed = [SlurmNode(name="n1", state="idle", takes_work=True, gpus={"big": 1})]
    assert select_gpus(request(models=("RTX 5090",)), {"n1": supply("n1", "RTX 5090")}, typed, table) == GpuSelection(
        gpu_type="big"
    )


def test_several_models_exclude_nodes_with_other_models() -> None:
    assert select(request(least_memory_mib=12000)) == GpuSelection(exclude=frozenset({"n3"}))
    assert select(request(models=("RTX 5090", "RTX 5070"))) == GpuSelection(exclude=frozenset({"n3"}))


def test_preferred_feasible_type_is_used_if_exclusion_is_not_feasible() -> None:
    cluster = {"n1": ("RTX 5090", "RTX 5060"), "n2": ("RTX 5070", "RTX 5070", "RTX 5060")}
    assert select(request(models=("RTX 5090", "RTX 5070")), cluster) == GpuSelection(gpu_type="rtx5090")
    assert select(request(models=("RTX 5090", "RTX 5070"), gpus_per_node=2), cluster) == GpuSelection(
        gpu_type="rtx5070"
    )
    assert select(request(least_memory_mib=12000, spread=2), cluster) == GpuSelection(gpu_type="rtx5070")


def test_first_feasible_type_with_enough_free_gpus_is_selected() -> None:
    cluster = {"n1": ("RTX 5090", "RTX 5060"), "n2": ("RTX 5070", "RTX 5070", "RTX 5060")}
    supplies = {name: supply(name, *models) for name, models in cluster.items()}
    either = request(models=("RTX 5090", "RTX 5070"))

    def select_type(wanted: SchedulingRequest, first: dict[str, int], **second: Any) -> str | None:
        nodes = [slurm_node("n1", *cluster["n1"], used=first), slurm_node("n2", *cluster["n2"], **second)]
        found = select_gpus(wanted, supplies, nodes, SlurmSettings())
        assert found is not None
        return found.gpu_type

    assert select_type(either, {}) == "rtx5090"
    assert select_type(either, {"rtx5060": 1}) == "rtx5090"
    assert select_type(either, {"rtx5090": 1}) == "rtx5070"
    assert select_type(either, {"rtx5090": 1}, used={"rtx5070": 1}) == "rtx5070"
    # Where none is free, the best liked one is waited for.
    assert select_type(either, {"rtx5090": 1}, used={"rtx5070": 2}) == "rtx5090"
    assert select_type(either, {"rtx5090": 1}, takes_work=False) == "rtx5090"
    # The best liked one of which there is enough; one card of it would never do.
    pair = request(models=("RTX 5090", "RTX 5070"), gpus_per_node=2)
    assert select_type(pair, {}, used={"rtx5070": 2}) == "rtx5070"
    assert select_type(request(models=("RTX 5090", "RTX 5070"), exclusive=True), {"rtx5060": 1}) == "rtx5070"


def test_free_gpu_on_a_mixed_node_is_requested_by_type() -> None:
    """Any of both would leave out the node that has one free, for the sake of a third model there."""
    supplies = {name: supply(name, *models) for name, models in CLUSTER.items()}
    wanted = request(models=("RTX 5090", "RTX 5070"))
    taken = {"n1": {"rtx5090": 1}, "n2": {"rtx5070": 1}, "n3": {"rtx5060": 1}}
    nodes = [slurm_node(name, *models, used=taken[name]) for name, models in CLUSTER.items()]
    assert select_gpus(wanted, supplies, nodes, SlurmSettings()) == GpuSelection(gpu_type="rtx5070")


def test_same_model_requests_use_one_type() -> None:
    assert select(request(same_model=True, nodes=2, least_nodes=2)) == GpuSelection(gpu_type="rtx5070")
    assert select(request(same_model=True, models=("RTX 5060", "RTX 5070"))) == GpuSelection(gpu_type="rtx5060")


def test_nodes_with_unsuitable_gpus_of_a_type_are_excluded() -> None:
    """Two cards of one name with different memory."""
    supplies = {"n1": supply("n1", "RTX 5060", memory_mib=16384), "n2": supply("n2", "RTX 5060")}
    nodes = [slurm_node(name, "RTX 5060") for name in supplies]
    wanted = request(models=("RTX 5060",), least_memory_mib=16000)
    assert select_gpus(wanted, supplies, nodes, SlurmSettings()) == GpuSelection(
        gpu_type="rtx5060", exclude=frozenset({"n2"})
    )


def test_nodes_with_other_models_are_excluded_without_gres_types() -> None:
    wanted = request(models=("RTX 5070",))
    assert select(wanted, is_typed=False) == GpuSelection(exclude=frozenset({"n1", "n3"}))


def test_foreign_and_excluded_nodes_are_not_selected() -> None:
    wanted = request(exclude=frozenset({"n1"}))
    assert select(wanted, strangers=("big1", "big2")) == GpuSelection(exclude=frozenset({"n1", "big1", "big2"}))
    assert select(request(gpus_per_node=0), strangers=("big1",)) == GpuSelection(exclude=frozenset({"big1"}))
    assert select(request(least_driver="590")) is None


def test_unread_gpus_delay_selection_unless_slurm_knows_their_type() -> None:
    unread: dict[str, tuple[str, ...]] = {"n1": ()}
    assert select(request(least_memory_mib=8192), unread) is None
    assert select(request(models=("RTX 5090",)), unread) == GpuSelection(gpu_type="rtx5090")
    assert select(request(), unread) == GpuSelection()


# -- the submission ---------------------------------------------------------------------------------------------------


def submission(request: SchedulingRequest, **parts: Any) -> SlurmSubmission:
    return build_submission(
        request,
        parts.pop("choice", GpuSelection()),
        name="lab-lease-l1",
        submitter=ADA,
        table=parts.pop("table", SlurmSettings()),
        **parts,
    )


def test_gang_is_submitted_as_one_job_with_resources_per_node() -> None:
    made = submission(
        request(
            nodes=4, least_nodes=2, gpus_per_node=2, cpu_milli=3500, memory_mib=2048, exclusive=True, priority=-3,
            time_limit_s=3601,
        ),
        choice=GpuSelection(gpu_type="rtx5090", exclude=frozenset({"n2", "n1"})),
    )  # fmt: skip
    assert made == SlurmSubmission(
        name="lab-lease-l1", submitter=ADA, script=HOLDER_SCRIPT, nodes=4, min_nodes=2, gpus_per_node=2,
        gpu_type="rtx5090", cpus=4, memory_mib=2048, time_limit_s=3780, exclude=("n1", "n2"), exclusive=True,
        nice=300, survives_nodes=True,
    )  # fmt: skip


def test_spread_gpus_are_requested_as_a_total() -> None:
    made = submission(request(spread=8))
    assert (made.spread, made.gpus_per_node, made.survives_nodes, made.time_limit_s) == (8, 0, False, None)


def test_profile_terms_override_the_slurm_settings() -> None:
    table = SlurmSettings(partition="main", account="lab", qos="normal")
    profile = ProfileSettings(name="p", title="P", partition="big", reservation="course")
    made = submission(request(), table=table, profile=profile)
    assert (made.partition, made.account, made.qos, made.reservation) == ("big", "lab", "normal", "course")


def test_job_time_limit_is_capped_by_the_partition() -> None:
    """Slurm would never start a job with a longer limit; the lease ends first in any case."""

    def limit(longest_s: int | None, partition: str | None = None) -> int | None:
        default = SlurmPartition(name="main", is_default=True, max_time_s=longest_s)
        site = SlurmSite(
            version=(22, 5, 8), cluster="c", partitions=(default, SlurmPartition(name="long")), nodes=(),
            has_accounting=False,
        )  # fmt: skip
        return submission(request(time_limit_s=3600), site=site, table=SlurmSettings(partition=partition)).time_limit_s

    assert limit(None) == limit(7200) == 3720
    assert limit(3600) == limit(3660) - 60 == 3600  # type: ignore[operator]
    assert limit(3600, "long") == 3720
