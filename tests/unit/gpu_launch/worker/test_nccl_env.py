"""Settings that are found, and the reasons for them."""

from __future__ import annotations

import os
import sys

import pynvml
import pytest

from gpu_launch import environment
from gpu_launch.worker import agent, nccl_env
from gpu_launch.worker.nccl_env import ContainerFacts
from tests.support.nvml.replay import IDLE, Replay, load

ALWAYS = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1", "RES_OPTIONS": "timeout:1 attempts:1"}


@pytest.mark.parametrize(
    ("facts", "more"),
    [
        (ContainerFacts(interface="eth1", has_infiniband=True), {}),
        (ContainerFacts(interface="eth1"), {"NCCL_IB_DISABLE": "1"}),
        (ContainerFacts(interface="eth1", has_infiniband=True, gpus=2, has_p2p=False), {"NCCL_P2P_DISABLE": "1"}),
        (ContainerFacts(interface="eth1", has_infiniband=True, gpus=2, has_p2p=True), {}),
        (ContainerFacts(interface="eth1", has_infiniband=True, gpus=2, has_p2p=None), {}),
        (ContainerFacts(interface="eth1", has_infiniband=True, gpus=1, has_p2p=False), {}),
        (
            ContainerFacts(interface="eth1", has_infiniband=True, gpus=1, has_numa_calls=False),
            {"NCCL_CUMEM_HOST_ENABLE": "0"},
        ),
        (ContainerFacts(interface="eth1", has_infiniband=True, gpus=0, has_numa_calls=False), {}),
        (ContainerFacts(interface="eth1", has_infiniband=True, gpus=1, has_numa_calls=None), {}),
    ],
)
def test_only_required_nccl_settings_are_set(facts, more):
    """In doubt a setting is left alone, as NCCL looks for itself."""
    assert nccl_env.choose_variables(facts) == ALWAYS | more


def test_every_setting_has_a_reason():
    """For --dry-run."""
    facts = ContainerFacts(interface="eth1", gpus=2, has_p2p=False, has_numa_calls=False)
    found = nccl_env.decide_settings(facts)
    assert len(found) == 6
    assert all(item.reason for item in found)
    assert {item.name: item.value for item in found} == nccl_env.choose_variables(facts)


def test_existing_nccl_settings_are_kept():
    """By the image or the administrator."""
    assert "NCCL_IB_DISABLE" not in nccl_env.choose_variables(
        ContainerFacts(interface="eth1"), {"NCCL_IB_DISABLE": "0"}
    )


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (ContainerFacts(interface="eth1", shm_mib=64), ["/dev/shm has 64 MiB"]),
        (ContainerFacts(interface="eth1", shm_mib=1024, mtu=1500, path_mtu=1500), []),
        (ContainerFacts(interface="eth1", mtu=1500, path_mtu=1420), ["`mtu = 1420` in [network]"]),
        (ContainerFacts(interface="eth1", mtu=1280, path_mtu=1500), []),
        (ContainerFacts(interface="eth1"), []),
    ],
)
def test_problems_without_a_setting_are_reported(facts, said):
    """A small /dev/shm, and packets that are too large for a tunnel."""
    warned = nccl_env.build_warnings(facts)
    assert len(warned) == len(said)
    assert all(part in text for part, text in zip(said, warned, strict=True))


def test_inspect_this_container(monkeypatch):
    """On loopback, without a GPU: nothing fails, and the variables are those decided for the container."""
    for name in (*ALWAYS, "NCCL_IB_DISABLE", "GPUHUB_GPU_UUIDS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GPUHUB_HEAD_ADDRESS", "127.0.0.1")
    found = nccl_env.find_variables("lo")
    assert found["NCCL_SOCKET_IFNAME"] == "=lo"
    decided = nccl_env.decide_settings(nccl_env.inspect_container("lo"))
    assert {item.name for item in decided if item.name not in os.environ} == found.keys()
    facts = nccl_env.inspect_container("lo", with_path_mtu=True)
    assert facts.mtu == facts.path_mtu
    assert facts.shm_mib is not None
    assert nccl_env.inspect_container("no-such-interface", with_path_mtu=True).mtu is None


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, True),
        (pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED, False),
        (pynvml.NVMLError_Unknown, None),
    ],
    ids=["as recorded", "not through this chipset", "cannot tell"],
)
def test_nvml_is_queried_for_every_pair_of_gpus(monkeypatch, answer, expected):
    """And closed again."""
    nvml = Replay(IDLE)
    if answer is not None:
        nvml.change("nvmlDeviceGetP2PStatus", answer)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    uuids = ",".join(gpu["uuid"] for gpu in load(IDLE)["read_node"]["gpus"])
    monkeypatch.setenv("GPUHUB_GPU_UUIDS", uuids)
    assert nccl_env.inspect_container("lo").has_p2p is expected
    assert nvml.called.count("nvmlDeviceGetP2PStatus") == (2 if expected else 1)
    assert nvml.called[-1] == "nvmlShutdown"


@pytest.mark.parametrize("uuids", ["", "GPU-a", "MIG-a,MIG-b"])
def test_nvml_is_not_queried_for_one_gpu_or_gpu_shares(monkeypatch, uuids):
    """Parts of GPUs have no such thing."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("GPUHUB_GPU_UUIDS", uuids)
    assert nccl_env.inspect_container("lo").has_p2p is None


def test_head_node_address_comes_from_the_container():
    """Where large packets are tried."""
    assert environment.read({"GPUHUB_HEAD_ADDRESS": "10.77.0.1"}).head_address == "10.77.0.1"


def test_ranks_use_the_data_network_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Address of the rendezvous and interface of NCCL and gloo; everything else stays on the user's network."""
    monkeypatch.setenv("GPUHUB_NETWORK_SUBNET", "127.0.0.2/32")
    assert agent.describe_node().address == "127.0.0.2"
    monkeypatch.setenv("GPUHUB_DATA_SUBNET", "127.0.0.3/32")
    described = agent.describe_node()
    assert (described.address, described.rank_environ["NCCL_SOCKET_IFNAME"]) == ("127.0.0.3", "=lo")
    assert environment.read().subnet == "127.0.0.2/32"
    assert nccl_env.inspect_container("lo", with_path_mtu=True).mtu is None
