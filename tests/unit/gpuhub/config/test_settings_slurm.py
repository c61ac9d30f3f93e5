"""cluster.toml with Slurm as the engine: which keys go with it, which do not, and what Slurm calls things."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpuhub.common.errors import SettingsError
from gpuhub.config import settings, slurm
from gpuhub.config.slurm import SlurmSettings
from gpuhub.config.users import users

GOOD = """
engine = "slurm"
[slurm]
partition = "gpu"
[users]
allowed = ["ada"]
[[nodes]]
name = "rig1"
address = "10.0.0.11"
docker = "unix:///run/docker.sock"
slurm = "sx1.lab"
[[profiles]]
name = "big"
title = "Big"
gpu_model = "RTX 5090"
account = "physics"
qos = "high"
reservation = "course_1"
"""
BUILTIN = (
    GOOD.replace('engine = "slurm"', "").replace('[slurm]\npartition = "gpu"', "").replace('slurm = "sx1.lab"', "")
)
BUILTIN = re.sub(r"(account|qos|reservation) = .*\n", "", BUILTIN)


def load(tmp_path: Path, text: str) -> settings.ClusterSettings:
    file = tmp_path / "cluster.toml"
    file.write_text(text, encoding="utf-8")
    return settings.load(file)


def test_slurm_settings_are_read(tmp_path):
    """Slurm's names of things are kept as they are; what is not said is Slurm's own default."""
    cluster = load(tmp_path, GOOD)
    assert (cluster.engine, cluster.slurm.partition, cluster.slurm.runtime) == ("slurm", "gpu", "docker")
    assert [node.slurm_name for node in cluster.nodes] == ["sx1.lab"]
    big = cluster.profiles[0]
    assert (big.partition, big.account, big.qos, big.reservation) == (None, "physics", "high", "course_1")
    assert load(tmp_path, BUILTIN).engine == "builtin"


def test_slurm_gpu_types_are_derived_from_models():
    """Small letters without blanks and without the vendor, unless said."""
    table = SlurmSettings(gpu_types={"NVIDIA A100-SXM4-80GB": "a100"})
    assert table.gpu_type("RTX 5090") == "rtx5090"
    assert table.gpu_type("NVIDIA GeForce RTX 5070 Ti") == "rtx5070ti"
    assert table.gpu_type("a100-sxm4-80gb") == "a100"


@pytest.mark.parametrize(
    "url",
    ["unix:///run/rest.sock", "http://127.0.0.1:6820", "http://[::1]:6820", "http://localhost:6820", "https://s:6820"],
)
def test_slurmrestd_is_reached_without_plain_http_on_the_network(url: str) -> None:
    assert SlurmSettings(rest_url=url).rest_url == url


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (('partition = "gpu"', 'partition = "gpu;id"'), r"slurm\.partition: 'gpu;id'"),
        (('partition = "gpu"', 'partition = "-p"'), r"slurm\.partition: '-p'"),
        (('"sx1.lab"', '"sx1 sx2"'), r"nodes\[1\]\.slurm: 'sx1 sx2'"),
        (('account = "physics"', 'account = "$(id)"'), r"profiles\[1\]\.account: '\$\(id\)'"),
        (('partition = "gpu"', "partitions = 1"), r"slurm\.partitions: .*a list"),
        (('partition = "gpu"', 'api = "rest"'), r'slurm: api = "rest" needs rest_url and rest_key'),
        (('partition = "gpu"', 'rest_url = "http://h/x"'), r"slurm\.rest_url: 'http://h/x': write \"unix:"),
        (
            ('partition = "gpu"', 'rest_url = "http://10.0.0.5:6820"'),
            r"slurm\.rest_url: 'http://10\.0\.0\.5:6820': http is for loopback only",
        ),
        (('partition = "gpu"', 'rest_url = "http://localhost.lab"'), r"slurm\.rest_url: .*http is for loopback only"),
        (('partition = "gpu"', 'conf = "etc/slurm.conf"'), r"slurm\.conf: 'etc/slurm\.conf': an absolute path"),
        (('partition = "gpu"', 'conf = "/etc/a b"'), r"slurm\.conf: '/etc/a b': an absolute path of letters"),
        (('partition = "gpu"', 'runtime = "apptainer"'), r'runtime = "apptainer" needs image'),
        (('partition = "gpu"', 'runtime = "plain"'), r'runtime = "plain" needs command'),
        (('partition = "gpu"', 'runtime = "podman"'), r"slurm\.runtime: 'podman'"),
        (('partition = "gpu"', 'gpu_types = { "RTX 5090" = "a b" }'), r"slurm\.gpu_types\.RTX 5090: 'a b'"),
        (('partition = "gpu"', 'poll = "2m"'), r"slurm\.poll: '2m': .*less than or equal to 60"),
        (
            ('engine = "slurm"', 'engine = "pbs"'),
            r'engine: there is no scheduling backend "pbs"; installed are: "builtin", "slurm"',
        ),
        (('title = "Big"', 'title = "Big"\ngpu_share = 2'), r"'big': gpu_share = 2: Slurm allocates whole GPUs: .*MIG"),
        (('["ada"]', '["ada"]\nmax_gpus = 2'), r"users\.max_gpus: .*remove it, and set MaxTRESPerUser=gres/gpu=N"),
        (('["ada"]', '["ada"]\ngpu_hours_per_week = 9'), r"users\.gpu_hours_per_week: .*GrpTRESMins"),
        (
            ("[[profiles]]", '[[groups]]\nname = "lab"\ntogether = { max_gpus = 3 }\n[[profiles]]'),
            r"groups: 'lab': together\.max_gpus: .*GrpTRES",
        ),
        (("[[profiles]]", '[[groups]]\nname = "lab"\nweight = 2\n[[profiles]]'), r"'lab': weight: .*fairshare=N"),
        (
            ('name = "rig1"', 'name = "rig1"\ngroups = ["lab", "nlp"]'),
            r"nodes: rig1: groups: Slurm decides .*AllowGroups=lab,nlp of its partition in slurm\.conf",
        ),
        (
            ('partition = "gpu"', 'partitions = [{ name = "vision", nodes = ["rig9"] }]'),
            r"slurm\.partitions: there is no node 'rig9'; there are rig1",
        ),
        (
            ('partition = "gpu"', 'partitions = [{ name = "a", nodes = ["rig1"] }, { name = "b", nodes = ["rig1"] }]'),
            r"slurm\.partitions: node 'rig1' is listed 2 times",
        ),
        (
            ('partition = "gpu"', 'partition = "gpu"\npartitions = [{ name = "gpu", nodes = ["rig1"] }]'),
            r"slurm\.partitions: 'gpu' is another partition's name",
        ),
        (
            ('partition = "gpu"', 'partitions = [{ name = "vision", nodes = ["rig1"], groups = ["lab"] }]'),
            r"slurm\.partitions: no node is left for slurm\.partition",
        ),
        (("[[profiles]]", '[scheduling]\nfair_share = "0s"\n[[profiles]]'), r"scheduling\.fair_share: .*Fairshare"),
        (("[[profiles]]", "[scheduling]\npreemption = true\n[[profiles]]"), r"scheduling\.preemption: .*PreemptMode"),
        (
            (
                '[slurm]\npartition = "gpu"',
                '[slurm]\nruntime = "plain"\ncommand = "/opt/lab"\n[storage]\nhome = "nfs://s/home/{username}"',
            ),
            r'storage\.home: with slurm\.runtime = "plain" gpuhub does not mount nfs://',
        ),
        (
            (
                'partition = "gpu"\n[users]',
                'runtime = "apptainer"\nimage = "/opt/lab.sif"\n[storage]\nhome = "/home/{username}"\n'
                'datasets = "nfs://s/data"\n[users]',
            ),
            r"storage\.datasets: .*write the path",
        ),
    ],
)
def test_settings_incompatible_with_slurm_are_refused(tmp_path, change, expected):
    """Each by its key, with what to set in Slurm instead."""
    old, new = change
    assert old in GOOD
    with pytest.raises(SettingsError, match=expected):
        load(tmp_path, GOOD.replace(old, new, 1))


@pytest.mark.parametrize(("key", "reason"), [("disk", "that limit cannot be enforced"), ("tmp", "/tmp is the node's")])
def test_limits_that_only_docker_sets_are_refused_without_it(tmp_path, key, reason):
    """A limit that is written and does not hold would be worse than none."""
    plain = GOOD.replace(
        'partition = "gpu"', 'runtime = "plain"\ncommand = "/opt/lab"\n[storage]\nhome = "/home/{username}"'
    )
    with pytest.raises(SettingsError, match=f"'big': {key}: .*{reason}: remove it"):
        load(tmp_path, plain.replace('title = "Big"', f'title = "Big"\n{key} = "1G"'))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("[users]", '[slurm]\npartition = "gpu"\n[users]'), r'\[slurm\] has no meaning with engine = "builtin"'),
        (("[users]", "[slurm]\n[users]"), r'write engine = "slurm" at the top of the file'),
        (('docker = "', 'slurm = "sx1"\ndocker = "'), r"nodes: rig1: slurm = 'sx1' has no meaning"),
        (('title = "Big"', 'title = "Big"\nqos = "high"'), r"profiles: 'big': qos = 'high' is a key of Slurm"),
    ],
)
def test_slurm_keys_require_the_slurm_backend(tmp_path, change, expected):
    """Without it they would be promises that nobody keeps."""
    old, new = change
    assert old in BUILTIN
    with pytest.raises(SettingsError, match=expected):
        load(tmp_path, BUILTIN.replace(old, new, 1))


def test_limits_enforced_by_gpuhub_remain_valid_with_slurm(tmp_path):
    """How many requests and jobs, how long, and what tells of a node's or GPU's trouble."""
    kept = (
        '[scheduling]\noutside_memory = "2G"\nquarantine_after = "1m"\ndown_after = "5m"\n'
        '[[groups]]\nname = "lab"\neach = { max_jobs = 1, longest_lease = "8h", max_waiting = 2 }\n[[profiles]]'
    )
    cluster = load(tmp_path, GOOD.replace("[[profiles]]", kept, 1))
    assert cluster.groups[0].each.max_jobs == 1


def test_docker_address_is_required_where_containers_run(tmp_path):
    """Left out, it is missed under gpuhub's own engine and with Docker as the runtime; not where Slurm runs notebooks."""
    for text in (GOOD, BUILTIN):
        with pytest.raises(SettingsError, match=r'nodes: rig1: docker is missing: write "unix:///run/docker.sock"'):
            load(tmp_path, text.replace('docker = "unix:///run/docker.sock"\n', ""))
    table = 'partition = "gpu"\nruntime = "plain"\ncommand = "/opt/lab"'
    bare = GOOD.replace('docker = "unix:///run/docker.sock"\n', "").replace('partition = "gpu"', table)
    assert load(tmp_path, bare).nodes[0].docker == ""
    with pytest.raises(SettingsError, match=r"nodes\[1\]\.docker: '' is not a Docker URL"):
        load(tmp_path, GOOD.replace("unix:///run/docker.sock", ""))


def test_two_nodes_cannot_share_a_slurm_node_name(tmp_path):
    """One of Slurm's nodes under two names would be given twice."""
    second = '[[nodes]]\nname = "rig2"\naddress = "10.0.0.12"\ndocker = "unix:///b"\nslurm = "sx1.lab"\n[[profiles]]'
    with pytest.raises(SettingsError, match=r"nodes: slurm = 'sx1\.lab' occurs 2 times"):
        load(tmp_path, GOOD.replace("[[profiles]]", second, 1))


def test_the_example_shows_every_key_with_its_default(tmp_path):
    """The commented-out table of cluster.example.toml, taken in: all keys, and those that have a default have it."""
    example = Path(__file__).parents[4] / "cluster.example.toml"
    shown = re.search(r"(?ms)^# \[slurm\]$.*?\n\n", example.read_text(encoding="utf-8"))
    assert shown is not None
    lines = [line[2:] for line in shown[0].splitlines() if re.match(r"# (\[slurm\]|[a-z_]+ = )", line)]
    rig2 = '\n[[nodes]]\nname = "rig2"\naddress = "10.0.0.12"\ndocker = "ssh://rig2"\n'
    table = load(tmp_path, GOOD.replace('[slurm]\npartition = "gpu"', "\n".join(lines)) + rig2).slurm
    assert table.model_fields_set == set(SlurmSettings.model_fields)
    assert {key for key in SlurmSettings.model_fields if getattr(table, key) == getattr(SlurmSettings(), key)} == {
        "api", "drain_failed", "rest_user", "runtime", "poll",
    }  # fmt: skip


def test_keys_delegated_to_slurm_exist_in_the_settings():
    """A key that is renamed is found."""
    assert set(slurm.SCHEDULING_KEYS) <= set(users.SchedulingSettings.model_fields)
    assert set(slurm.LIMIT_KEYS) <= set(users.LimitSettings.model_fields) & set(users.UserSettings.model_fields)


def test_profiles_may_have_groups_with_slurm(tmp_path: Path) -> None:
    """gpuhub itself refuses them to others."""
    assert load(tmp_path, GOOD.replace('name = "big"', 'name = "big"\ngroups = ["lab"]')).access_groups == {"lab"}
