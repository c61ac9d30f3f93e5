"""What Docker gets for a lease."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gpu_launch.courier.notebook_page import MAX_MEMORY
from gpuhub.common import names
from gpuhub.common.errors import SettingsError
from gpuhub.config.containers.services import ServiceSettings
from gpuhub.config.settings import ClusterSettings, StorageSettings
from gpuhub.docker.containers.container_spec import (
    ContainerSpec,
    build_courier_spec,
    build_notebook_spec,
    build_worker_spec,
)
from gpuhub.docker.containers.security import WorkerSize, build_device_requests
from gpuhub.docker.containers.service_access import (
    build_service_environment,
    build_worker_environment,
    find_offered_services,
)
from tests.support.broker.factories import lease
from tests.support.clusters import ADA, place, worker
from tests.support.golden import check_golden

GOLDEN = Path(__file__).with_name("golden")
NFS = StorageSettings(
    home="nfs://nas.lan/export/home/{username}",
    home_create="/export/home/{username}",
    datasets="nfs://nas.lan/export/datasets",
    nfs_options="nfsvers=4.2,hard,fsc",
)


def notebook(cluster: ClusterSettings, *uuids: str, environment: dict[str, str] | None = None) -> ContainerSpec:
    profile = cluster.profile("big" if uuids else "cpu")
    assert profile is not None
    return build_notebook_spec(
        context=place(cluster, *uuids),
        lease=lease(*uuids),
        profile=profile,
        identity=ADA,
        environment={"JUPYTERHUB_API_TOKEN": "secret"} if environment is None else environment,
        command=["jupyterhub-singleuser"],
    )


def courier(cluster: ClusterSettings, *_uuids: str) -> ContainerSpec:
    return build_courier_spec(
        instance="gpuhub", cluster=cluster, node=cluster.node("rig1"), identity=ADA, image="gpuhub/notebook:latest"
    )


def as_text(spec: ContainerSpec) -> str:
    fields = {name: getattr(spec, name) for name in ContainerSpec.__dataclass_fields__}
    return json.dumps(fields, indent=1, sort_keys=True, default=list) + "\n"


@pytest.mark.parametrize("case", ["notebook", "notebook-cpu", "notebook-nfs", "worker", "courier"])
def test_container_arguments_match_the_golden_file(cluster: ClusterSettings, case: str) -> None:
    """Every argument that Docker gets is written down; run with GPUHUB_UPDATE_GOLDEN=1 to accept a change."""
    nfs = cluster.model_copy(update={"storage": NFS})
    spec = {
        "notebook": lambda: notebook(cluster, "GPU-aaa"),
        "notebook-cpu": lambda: notebook(cluster),
        "notebook-nfs": lambda: notebook(nfs, "GPU-aaa", "GPU-bbb"),
        "worker": lambda: worker(cluster, "GPU-ccc"),
        "courier": lambda: courier(nfs),
    }[case]()
    check_golden(as_text(spec), GOLDEN / f"{case}.json")


def test_a_notebook_knows_the_image_that_its_user_chose(cluster: ClusterSettings) -> None:
    """Its launches run in the same one; where there is no choice, that is the profile's."""
    big = cluster.profiles[0].model_copy(update={"images": ("lab/mine:1",)}).with_image("lab/mine:1")
    spec = notebook(cluster.model_copy(update={"profiles": (big, *cluster.profiles[1:])}), "GPU-aaa")
    assert (spec.image, spec.environment["GPUHUB_IMAGE"]) == ("lab/mine:1", "lab/mine:1")
    assert "GPUHUB_IMAGE" not in notebook(cluster, "GPU-aaa").environment


@pytest.mark.parametrize("make", [notebook, worker, courier])
def test_containers_have_minimal_privileges(cluster: ClusterSettings, make: object) -> None:
    """No capability, no new privileges, no root, memory without swap, and no host namespace."""
    spec = make(cluster, "GPU-aaa")  # type: ignore[operator]
    host = spec.host_config
    assert host["cap_drop"] == ["ALL"]
    assert host["security_opt"] == ["no-new-privileges:true"]
    assert host["mem_limit"] == host["memswap_limit"] > 0
    assert host["pids_limit"] > 0
    assert spec.user == "1001:1001"
    assert not {"privileged", "cap_add", "devices", "pid_mode", "ipc_mode", "binds"} & set(host)
    assert not any("docker.sock" in str(mount) for mount in host["mounts"])


def test_container_without_gpus_requests_no_device(cluster: ClusterSettings) -> None:
    """A CPU-only container asks for no device, and an image that wants all GPUs gets none."""
    spec = notebook(cluster)
    assert build_device_requests(()) == []
    assert spec.host_config["device_requests"] == []
    assert spec.environment["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert spec.environment["GPUHUB_GPU_UUIDS"] == ""


@pytest.mark.parametrize("make", [notebook, worker, courier])
def test_nvidia_runtime_variables_of_images_are_overridden(cluster: ClusterSettings, make: object) -> None:
    """Docker lets the container's environment win over the image's, name by name."""
    environment = make(cluster, "GPU-aaa", "GPU-bbb").environment  # type: ignore[operator]
    told = {name: value for name, value in environment.items() if name.startswith("NVIDIA_")}
    gpus = "void" if make is courier else "GPU-aaa,GPU-bbb"
    parts = {} if make is courier else {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    assert told == {
        "NVIDIA_VISIBLE_DEVICES": gpus,
        "NVIDIA_GDRCOPY": "disabled",
        "NVIDIA_GDS": "disabled",
        "NVIDIA_IMEX_CHANNELS": "void",
        "NVIDIA_MOFED": "disabled",
        "NVIDIA_NVSWITCH": "disabled",
        **parts,
    }


@pytest.mark.parametrize("make", [notebook, worker, courier])
def test_containers_keep_the_seccomp_profile_and_write_no_cores(cluster: ClusterSettings, make: object) -> None:
    """Docker's default profile holds where none is named."""
    host = make(cluster, "GPU-aaa").host_config  # type: ignore[operator]
    assert not [option for option in host["security_opt"] if "seccomp" in option or "apparmor" in option]
    assert {"Name": "core", "Soft": 0, "Hard": 0} in host["ulimits"]
    assert host["log_config"]["Config"] == {"max-size": "10m", "max-file": "3"}


def test_disk_limit_becomes_a_docker_storage_option(cluster: ClusterSettings) -> None:
    """Notebooks have their profile's limit and workers that of [jobs]; without a setting there is no option."""
    jobs = cluster.jobs.model_copy(update={"disk": 5 * 1024**3})
    profiles = tuple(profile.model_copy(update={"disk": 1024**3}) for profile in cluster.profiles)
    limited = cluster.model_copy(update={"jobs": jobs, "profiles": profiles})
    assert notebook(limited, "GPU-aaa").host_config["storage_opt"] == {"size": "1073741824"}
    assert worker(limited).host_config["storage_opt"] == {"size": "5368709120"}
    assert not [make for make in (notebook, worker, courier) if "storage_opt" in make(cluster).host_config]


@pytest.mark.parametrize("name", ["NVIDIA_VISIBLE_DEVICES", "NVIDIA_REQUIRE_CUDA", "CUDA_VISIBLE_DEVICES"])
def test_environment_with_gpu_variables_is_refused(cluster: ClusterSettings, name: str) -> None:
    """GPUs come from leases alone."""
    with pytest.raises(SettingsError, match=name):
        notebook(cluster, "GPU-aaa", environment={name: "all"})


def test_a_worker_has_no_token(cluster: ClusterSettings) -> None:
    """A worker gets no token, because it calls no API."""
    assert not [name for name in worker(cluster).environment if "TOKEN" in name]


def test_courier_has_access_to_the_home_only(cluster: ClusterSettings) -> None:
    """No GPU, no network, no datasets, no lease, no token, and nothing to write elsewhere."""
    spec = courier(cluster)
    host = spec.host_config
    assert (host["network_mode"], host["device_requests"], host["read_only"]) == ("none", [], True)
    assert [mount["Target"] for mount in host["mounts"]] == ["/home/ada"]
    assert (spec.environment["NVIDIA_VISIBLE_DEVICES"], spec.ports) == ("void", ())
    assert not {names.LABEL_LEASE, names.LABEL_JOB} & set(spec.labels)
    assert not [name for name in spec.environment if "TOKEN" in name]


def test_workers_of_a_detached_job_get_their_peers(cluster: ClusterSettings) -> None:
    """Others are not: their notebook asks."""
    asked: dict[str, Any] = {
        "size": WorkerSize(cpus=2.5, memory=3 * 1024**3, shm=1024**3),
        "lease_id": "l",
        "epoch": 1,
        "job_id": "j",
        "run_id": "run-123456",
        "index": 0,
        "run_index": 0,
        "image": "i",
    }
    spec = build_worker_spec(context=place(cluster), identity=ADA, worker_list="[]", preemptions=2, **asked)
    host = spec.host_config
    assert (host["cpu_quota"], host["mem_limit"], host["shm_size"]) == (250_000, 3 * 1024**3, 1024**3)
    assert spec.environment["OMP_NUM_THREADS"] == "2"
    told = {name: value for name, value in spec.environment.items() if name.startswith("GPU_LAUNCH_")}
    assert told == {
        "GPU_LAUNCH_RUN": "run-123456",
        "GPU_LAUNCH_WORKER": "0",
        "GPU_LAUNCH_ROSTER": "[]",
        "GPU_LAUNCH_PREEMPTIONS": "2",
    }
    assert "GPU_LAUNCH_ROSTER" not in worker(cluster).environment


def test_a_container_knows_the_services_of_its_user(cluster: ClusterSettings) -> None:
    """Those that set variables and admit the user; a worker has the key of its job and a certificate for them."""
    tables = ({"variables": ("NOTES={url}",)}, {"variables": ("OTHERS={url}",), "users": ("ben",)}, {})
    services = tuple(
        ServiceSettings.model_validate({"name": f"s{number}", "image": "i", "port": 80, **table})
        for number, table in enumerate(tables)
    )
    cluster = cluster.model_copy(update={"services": services})
    offered = find_offered_services(cluster, "ada", frozenset())
    assert build_service_environment(offered) == {
        "GPUHUB_SERVICES": "s0",
        "GPUHUB_SERVICES_ADDRESS": "127.0.0.1:18034",
        "NOTES": "http://127.0.0.1:18034/services/s0",
    }
    assert build_service_environment(()) == {}
    assert build_worker_environment("j1.x", has_certificate=False) == {"GPUHUB_JOB_KEY": "j1.x"}
    told = build_worker_environment("j1.x", has_certificate=True)
    assert set(told) == {"GPUHUB_JOB_KEY", "GPUHUB_BROKER_CA", "JUPYTERHUB_SSL_KEYFILE", "JUPYTERHUB_SSL_CERTFILE"}
    assert "GPUHUB_SERVICES" not in worker(cluster).environment


def test_notebook_gets_the_idle_limit_of_workers(cluster: ClusterSettings) -> None:
    """The setting is passed on; 0 turns idle workers off."""
    none = cluster.model_copy(update={"jobs": cluster.jobs.model_copy(update={"keep_workers": 0})})
    assert notebook(cluster).environment["GPUHUB_KEEP_WORKERS_S"] == "600"
    assert notebook(none).environment["GPUHUB_KEEP_WORKERS_S"] == "0"


def test_port_is_published_only_on_the_node_address(cluster: ClusterSettings) -> None:
    """A notebook is not reachable at every address of its node."""
    assert notebook(cluster, "GPU-aaa").host_config["port_bindings"] == {8888: ("192.168.1.21",)}
    assert "port_bindings" not in worker(cluster).host_config


def test_changed_nfs_options_create_a_new_volume(cluster: ClusterSettings) -> None:
    """Docker keeps a volume's options, so a changed setting must not meet the old volume."""
    other = NFS.model_copy(update={"nfs_options": "nfsvers=3"})
    sources = {
        notebook(cluster.model_copy(update={"storage": storage}), "GPU-aaa").host_config["mounts"][0]["Source"]
        for storage in (NFS, other)
    }
    assert len(sources) == 2
    assert all(source.startswith("gpuhub-home-ada-") for source in sources)


def test_copies_of_datasets_cover_the_file_servers_folders(cluster: ClusterSettings) -> None:
    """Read-only, at the dataset's own path; the container knows which it has."""
    with_data = cluster.model_copy(update={"storage": cluster.storage.model_copy(update={"datasets": "/data"})})
    context = dataclasses.replace(place(with_data), staged={"datasets/a": "copy-a"})
    profile = cluster.profiles[0]
    spec = build_notebook_spec(
        context=context, lease=lease("GPU-aaa"), profile=profile, identity=ADA, environment={}, command=["x"]
    )
    mounts = {mount["Target"]: mount for mount in spec.host_config["mounts"]}
    copied = mounts["/datasets/a"]
    assert (copied["Source"], copied["Type"], copied["ReadOnly"]) == ("copy-a", "volume", True)
    assert mounts["/datasets"]["Source"] == "/data"
    assert spec.environment["GPUHUB_STAGED"] == "datasets/a"
    assert "GPUHUB_STAGED" not in notebook(cluster).environment


@pytest.mark.parametrize(("egress", "offline"), [("none", "1"), ("internet", None)])
def test_models_are_read_only_in_every_container(cluster: ClusterSettings, egress: str, offline: str | None) -> None:
    """Notebooks and workers know the folder; without a way to the internet no library waits for it."""
    update = {
        "storage": NFS.model_copy(update={"models": "nfs://nas.lan/export/models"}),
        "network": cluster.network.model_copy(update={"egress": egress}),
    }
    spec = notebook(cluster.model_copy(update=update), "GPU-aaa")
    mount = next(mount for mount in spec.host_config["mounts"] if mount["Target"] == "/models")
    assert (mount["Type"], mount["ReadOnly"]) == ("volume", True)
    assert mount["VolumeOptions"]["DriverConfig"]["Options"]["device"] == ":/export/models"
    assert mount["VolumeOptions"]["Labels"][names.LABEL_KIND] == names.VOLUME_MODELS
    assert (spec.environment["GPUHUB_MODELS"], spec.environment.get("HF_HUB_OFFLINE")) == ("/models", offline)
    assert not {"GPUHUB_MODELS", "HF_HUB_OFFLINE"} & set(notebook(cluster).environment)


def test_gpu_share_sets_its_memory_cap_and_label(cluster: ClusterSettings) -> None:
    """The whole card is passed, since nothing else can be; what keeps to the cap reads it from the environment."""
    profile = cluster.profiles[0]
    part = dataclasses.replace(place(cluster, "GPU-aaa"), gpu_share=4, memory_cap_mib=8151)
    spec = build_notebook_spec(
        context=part, lease=lease("GPU-aaa"), profile=profile, identity=ADA, environment={}, command=["x"]
    )
    assert spec.environment["GPUHUB_GPU_MEMORY_CAP_MIB"] == "8151"
    assert spec.labels[names.LABEL_SHARE] == "4"
    assert spec.host_config["device_requests"] == build_device_requests(["GPU-aaa"])
    whole = notebook(cluster, "GPU-aaa")
    assert names.LABEL_SHARE not in whole.labels
    assert "GPUHUB_GPU_MEMORY_CAP_MIB" not in whole.environment


def test_labels_contain_lease_and_epoch(cluster: ClusterSettings) -> None:
    """The reconciler finds every container's lease in its labels."""
    labels = worker(cluster).labels
    assert (labels[names.LABEL_LEASE], labels[names.LABEL_EPOCH], labels[names.LABEL_OWNER]) == ("lease-9", "3", "ada")


def test_fabric_devices_come_with_gpus_and_locked_memory(cluster: ClusterSettings) -> None:
    """For containers with GPUs on nodes that say so; no other container may lock memory without limit."""
    devices = ("/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm")
    with_fabric = cluster.model_copy(
        update={"nodes": (cluster.nodes[0].model_copy(update={"fabric": devices}), *cluster.nodes[1:])}
    )
    host = worker(with_fabric, "GPU-aaa").host_config
    assert host["devices"] == [f"{device}:{device}:rw" for device in devices]
    assert {"Name": "memlock", "Soft": -1, "Hard": -1} in host["ulimits"]
    assert host["cap_drop"] == ["ALL"]
    for other in (worker(with_fabric), worker(cluster, "GPU-aaa")):
        assert "devices" not in other.host_config
        assert "memlock" not in {limit["Name"] for limit in other.host_config["ulimits"]}


def test_ranks_learn_of_the_data_network(cluster: ClusterSettings) -> None:
    """Workers, and notebooks that have a GPU for ranks, on nodes that have it; the containers' own network stays."""
    nodes = tuple(node.model_copy(update={"data_interface": "eth1"}) for node in cluster.nodes)
    with_data = cluster.model_copy(update={"nodes": nodes})
    assert worker(with_data).environment["GPUHUB_DATA_SUBNET"] == "10.202.0.0/16"
    assert worker(with_data).host_config == worker(cluster).host_config
    assert "GPUHUB_DATA_SUBNET" not in worker(cluster).environment
    assert "GPUHUB_DATA_SUBNET" in notebook(with_data, "GPU-aaa").environment
    assert "GPUHUB_DATA_SUBNET" not in notebook(with_data).environment


def test_a_courier_has_the_memory_to_render_a_notebook(cluster: ClusterSettings) -> None:
    """And some for the commands beside it, so that these are not ended for a large notebook."""
    assert courier(cluster).host_config["mem_limit"] - MAX_MEMORY >= 100 * 1024**2
