"""cluster.toml: what is right is read, what is wrong is refused with its key and what would be right."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from gpuhub.common.errors import SettingsError
from gpuhub.config import settings
from gpuhub.config.containers import images, jobs, profiles
from gpuhub.config.containers import profiles as profiles_module
from gpuhub.config.machines import network, nodes, storage
from gpuhub.config.users import login_keys, users
from tests.support.clusters import build_cluster

EXAMPLE = Path(__file__).parents[4] / "cluster.example.toml"

GOOD = """
[users]
allowed = ["ada"]
[[nodes]]
name = "rig1"
address = "10.0.0.11"
docker = "unix:///run/docker.sock"
gpus = [{ model = "RTX 5090", memory = "32G" }]
[[profiles]]
name = "big"
title = "Big"
gpu_model = "RTX 5090"
"""

CIRCUIT = """[[circuits]]
name = "left"
volts = 120
amps = 15
nodes = ["rig1"]
"""


def add_circuits(*texts: str) -> tuple[str, str]:
    """Return the change of `GOOD` that adds these tables."""
    return "[[profiles]]", "".join((*texts, "[[profiles]]"))


def load(tmp_path: Path, text: str) -> settings.ClusterSettings:
    file = tmp_path / "cluster.toml"
    file.write_text(text, encoding="utf-8")
    return settings.load(file)


def test_minimal_file_gets_the_defaults(tmp_path):
    """A file with the required keys only gets the defaults for everything else."""
    cluster = load(tmp_path, GOOD)
    assert cluster.nodes[0].name == "rig1"
    assert cluster.profiles[0].memory is None
    assert cluster.jobs.renew_within == 25
    assert not cluster.has_overlay
    assert (cluster.circuits, cluster.nodes[0].base_watts) == ((), 150)


def test_circuit_is_enforced_if_the_file_says_so(tmp_path):
    """Otherwise its power limits nothing, even if its machines alone need more."""
    tight = CIRCUIT.replace("amps = 15", "amps = 1")
    assert load(tmp_path, GOOD.replace(*add_circuits(tight))).enforced_circuits == ()
    enforced = load(tmp_path, GOOD.replace(*add_circuits(CIRCUIT + "enforce = true\n")))
    assert enforced.enforced_circuits == enforced.circuits
    assert enforced.circuits[0].find_gpu_watts(enforced.base_watts.values()) == 1290
    assert enforced.model_copy(update={"engine": "slurm"}).enforced_circuits == ()


def test_circuit_supplies_a_share_of_its_rating_for_hours(tmp_path):
    """0.8 of it, unless the file names another share."""
    [circuit] = load(tmp_path, GOOD.replace(*add_circuits(CIRCUIT))).circuits
    assert (circuit.rated_w, circuit.continuous_w) == (1800, 1440)
    whole = CIRCUIT.replace("amps", "continuous = 1\namps")
    assert load(tmp_path, GOOD.replace(*add_circuits(whole))).circuits[0].continuous_w == 1800


def test_nodes_with_users_networks_have_ipv4_addresses() -> None:
    """One node needs no network to others, and neither do nodes without Docker."""
    nodes = [{"name": f"rig{n}", "address": f"fd00::2{n}", "docker": f"unix:///run/rig{n}.sock"} for n in (1, 2)]
    profiles = [{"name": "any", "title": "Any"}]
    with pytest.raises(ValueError, match=r"'rig2': 'fd00::22' is an IPv6 address, and users' networks"):
        build_cluster(nodes=nodes, profiles=profiles)
    assert not build_cluster(nodes=nodes[:1], profiles=profiles).has_overlay
    plain = {"runtime": "plain", "command": "/opt/bin/jupyterhub-singleuser"}
    assert build_cluster(nodes=nodes, profiles=profiles, engine="slurm", slurm=plain).nodes[0].address == "fd00::21"


@pytest.mark.parametrize(
    ("addresses", "mistake"),
    [
        (("10.1.0.1", "10.1.0.1"), r"data_address '10\.1\.0\.1' of rig2 is an address of rig1"),
        (("192.168.1.22", None), r"data_address '192\.168\.1\.22' of rig1 is an address of rig2"),
        (("fd00::1", None), "IPv4 and IPv6 addresses do not reach each other"),
        (("10.1.0.1", None), None),
        (("192.168.1.21", "10.1.0.2"), None),
    ],
)
def test_data_addresses_are_of_one_node_each(addresses: tuple[str | None, ...], mistake: str | None) -> None:
    """Each of its own node, and of one version of IP; a node without one uses its address."""
    nodes = [
        {"name": f"rig{number}", "address": f"192.168.1.2{number}", "docker": f"unix:///run/rig{number}.sock"}
        | ({} if address is None else {"data_address": address})
        for number, address in enumerate(addresses, 1)
    ]
    if mistake is None:
        cluster = build_cluster(nodes=nodes, profiles=[{"name": "any", "title": "Any"}])
        assert [node.rank_address for node in cluster.nodes] == [
            address or f"192.168.1.2{number}" for number, address in enumerate(addresses, 1)
        ]
        return
    with pytest.raises(ValueError, match=mistake):
        build_cluster(nodes=nodes, profiles=[{"name": "any", "title": "Any"}])


def test_values_are_frozen(tmp_path):
    """Settings cannot be changed after they are read."""
    cluster = load(tmp_path, GOOD)
    with pytest.raises(ValueError, match="frozen"):
        cluster.nodes[0].name = "other"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("allowed", "alowed"), r"users\.alowed: there is no such key; did you mean 'allowed'\? valid here: login, "),
        (
            ('name = "rig1"', 'name = "rig1"\ngpu = 1'),
            r"nodes\[1\]\.gpu: there is no such key; .*valid here: name, addr",
        ),
        (('title = "Big"', 'title = "Big"\ncpus = "4"'), r"profiles\[1\]\.cpus: '4' is not a number"),
        (('title = "Big"', 'title = "Big"\ngpu_count = true'), r"profiles\[1\]\.gpu_count: True is not a whole number"),
        (
            ('title = "Big"', 'title = "Big"\ngpu_count = -1'),
            r"profiles\[1\]\.gpu_count: -1: .*greater than or equal to 0",
        ),
        (('title = "Big"', 'title = "Big"\nmemory = 16'), r"profiles\[1\]\.memory: 16 is not a size: .*\"16G\""),
        (('title = "Big"', 'title = "Big"\ntime_limit = "8"'), r"time_limit: '8' is not a time span: .*\"8h\""),
        (('title = "Big"\n', ""), r"profiles\[1\]\.title: is missing"),
        (
            ("[[profiles]]", "[monitoring]\nport = 8010\n[[profiles]]"),
            r"monitoring\.port: 8010 is hub\.broker_port already: choose another one",
        ),
        (
            ("unix:///run/docker.sock", "tcp://10.0.0.11:2375"),
            r"nodes\[1\]: docker = .* has no tls \(node \w+\): .*ssh://user@host",
        ),
        (
            ("unix:///run/docker.sock", "http://10.0.0.11"),
            r"nodes\[1\]\.docker: 'http://10\.0\.0\.11' is not a Docker URL",
        ),
        (("10.0.0.11", "rig1.local"), r"nodes\[1\]\.address: 'rig1\.local' is not an IP address"),
        (("10.0.0.11", '10.0.0.11"\ndata_address = "rig1-data'), r"nodes\[1\]\.data_address: 'rig1-data' is not an IP"),
        (
            ('name = "rig1"', 'name = "rig1"\nfabric = ["/dev/infiniband/umad0"]'),
            r"nodes\[1\]\.fabric\[1\]: '/dev/infiniband/umad0'",
        ),
        (('allowed = ["ada"]', ""), r"users: no user could log in"),
        (('["ada"]', '["../ada"]'), r"users\.allowed\[1\]: '\.\./ada'"),
        (('gpu_model = "RTX 5090"', 'gpu_model = "RTX 5080"'), r"'big' wants 1 × RTX 5080 .*rig1 with 1 × RTX 5090"),
        (('gpu_model = "RTX 5090"', "gpu_count = 2"), r"'big' wants 2 × any GPU on one node, and no node has that"),
        (('gpu_model = "RTX 5090"', 'gpu_memory = "48G"'), r"'big' wants 1 × any GPU of at least 48 GiB"),
        (
            ("[[profiles]]", '[storage]\nhome = "/home"\n[[profiles]]'),
            r"storage: home = '/home' is one folder for all us",
        ),
        (
            ("[[profiles]]", '[storage]\nhome = "/h/../{username}"\n[[profiles]]'),
            r"storage\.home: .*neither an absolute",
        ),
        (
            ("[[profiles]]", '[hub]\nbind = "0.0.0.0"\nhttps = "off"\n[[profiles]]'),
            r'hub: https = "off" with bind = \'0\.0\.0\.0\': passwords would cross the network unencrypted',
        ),
        (("[[profiles]]", "[hub]\nport = 8081\n[[profiles]]"), r"hub: port 8081 is used twice"),
        (
            ('gpu_model = "RTX 5090"', 'gpu_model = "RTX 5090"\ngpu_models = ["RTX 5090"]'),
            r"profiles\[1\]: gpu_model and gpu_models exclude each other",
        ),
        (("gpu_model", "gpu_share = 2\ngpu_count = 2\ngpu_model"), r"profiles\[1\]: gpu_share .* needs gpu_count = 1"),
        (("gpu_model", 'gpu_capability = "9"\ngpu_model'), r"profiles\[1\]\.gpu_capability: '9'"),
        (
            ("[[profiles]]", '[scheduling]\nhalf_life = "0s"\n[[profiles]]'),
            r"scheduling\.half_life: '0s' is not a time span",
        ),
        (("[[profiles]]", "[scheduling]\ncard_values = { T4 = 0 }\n[[profiles]]"), r"scheduling\.card_values\.T4: 0"),
        (
            ("[[profiles]]", '[[groups]]\nname = "lab"\neach = { max_gpu = 1 }\n[[profiles]]'),
            r"groups\[1\]\.each\.max_gpu: there is no such key; did you mean 'max_gpus'",
        ),
        (
            ("[[profiles]]", '[[groups]]\nname = "lab"\n[[groups]]\nname = "lab"\n[[profiles]]'),
            r"groups: name = 'lab' occurs 2 times",
        ),
        (('name = "rig1"', 'name = "rig1"\ngroups = [""]'), r"nodes\[1\]\.groups\[1\]: '': .*at least 1 character"),
        (('name = "rig1"', 'name = "rig1"\ngroups = "lab"'), r"nodes\[1\]\.groups: 'lab' is not a list"),
        (
            ('name = "rig1"', 'name = "rig1"\ngroups = ["owner:ada"]'),
            r"nodes\[1\]\.groups\[1\]: 'owner:ada' is reserved",
        ),
        (('name = "rig1"', 'name = "rig1"\nowner_first = true'), r"nodes: 'rig1': owner_first: whose\? Add owner = "),
        (
            ('name = "rig1"', 'name = "rig1"\nowner = "ada"\nowner_first = true'),
            r"nodes: 'rig1': owner_first: others' scavenging jobs are preempted only with preemption = true in \[scheduling\]",
        ),
        (
            ('allowed = ["ada"]', 'allowed = ["ada"]\n[scheduling]\nsuspend_scavengers = true'),
            r"scheduling: suspend_scavengers = true is for jobs that are preempted: add preemption = true",
        ),
        (('name = "rig1"', 'name = "rig1"\ngroup = ["lab"]'), r"nodes\[1\]\.group: .*did you mean 'groups'"),
        (
            ('title = "Big"', 'title = "Big"\ngroups = ["a\\u0000b"]'),
            r"profiles\[1\]\.groups\[1\]: 'a\\x00b': .*pattern",
        ),
        (
            ("[[profiles]]", '[network]\nkind = "bridge"\nencrypt = true\n[[profiles]]'),
            r"network: encrypt = true is for overlays",
        ),
        (add_circuits(CIRCUIT.replace("rig1", "rig7")), r"circuits: 'left' names the node 'rig7'; there are rig1"),
        (
            add_circuits(CIRCUIT, CIRCUIT.replace("left", "right")),
            r"circuits: node 'rig1' is listed 2 times \('left', 'right'\): list each node once",
        ),
        (
            add_circuits(CIRCUIT.replace("amps = 15", "amps = 1\nenforce = true")),
            r"circuits: 'left': enforce: its machines alone may draw 150 W \(base_watts\) of the 96 W that",
        ),
        (add_circuits(CIRCUIT, CIRCUIT), r"circuits: name = 'left' occurs 2 times"),
        (add_circuits(CIRCUIT.replace("15", "0")), r"circuits\[1\]\.amps: 0: .*greater than 0"),
        (add_circuits(CIRCUIT.replace("15", "-15.5")), r"circuits\[1\]\.amps: -15\.5: .*greater than 0"),
        (add_circuits(CIRCUIT.replace("120", "0")), r"circuits\[1\]\.volts: 0: .*greater than 0"),
        (add_circuits(CIRCUIT.replace('"rig1"', "")), r"circuits\[1\]\.nodes: .*at least 1 item"),
        (
            add_circuits(CIRCUIT.replace("amps", "continuous = 1.1\namps")),
            r"circuits\[1\]\.continuous: 1\.1: .*less than or equal to 1",
        ),
        (('name = "rig1"', 'name = "rig1"\nbase_watts = -1'), r"nodes\[1\]\.base_watts: -1: .*greater than or equal"),
        (("[users]", "[users"), r"not valid TOML: .*line 2"),
    ],
)
def test_each_invalid_setting_is_refused_with_its_key(tmp_path, change, expected):
    """Each mistake is named by its key, with the value and what would be right."""
    old, new = change
    assert old in GOOD
    with pytest.raises(SettingsError, match=expected):
        load(tmp_path, GOOD.replace(old, new, 1))


def test_all_duplicate_names_are_reported_together(tmp_path):
    """Two nodes with the same name and two profiles with the same name are reported together."""
    node = GOOD[GOOD.index("[[nodes]]") : GOOD.index("[[profiles]]")]
    profile = GOOD[GOOD.index("[[profiles]]") :]
    text = GOOD + node.replace("10.0.0.11", "10.0.0.12").replace("/run/", "/srv/") + profile
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, text)
    assert "nodes: name = 'rig1' occurs 2 times" in str(caught.value)
    assert "profiles: name = 'big' occurs 2 times" in str(caught.value)


def test_error_for_a_missing_file_names_the_example(tmp_path):
    """A file that is not there is refused with where to start."""
    with pytest.raises(SettingsError, match=r"cluster\.example\.toml"):
        settings.load(tmp_path / "cluster.toml")


@pytest.mark.usefixtures("head_address")
def test_the_example_is_valid_and_shows_every_key():
    """cluster.example.toml loads, and has every key of every table, set or as a comment with its default."""
    settings.load(EXAMPLE)
    text = EXAMPLE.read_text(encoding="utf-8")
    raw = tomllib.loads(text)
    shown = set(re.findall(r"^(?:# )?([a-z_0-9]+) = ", text, re.MULTILINE)) | set(raw)
    shown |= set(re.findall(r"^# \[\[?([a-z]+)\]", text, re.MULTILINE))
    tables_read = [
        settings.ClusterSettings, nodes.NodeSettings, settings.CircuitSettings, profiles.ProfileSettings, users.UserSettings, users.GroupSettings, users.LimitSettings,
        users.SchedulingSettings, storage.StorageSettings, network.NetworkSettings, jobs.JobSettings, network.HubSettings, images.ImageSettings, login_keys.LoginSettings,
        settings.SlurmSettings, settings.IdleSettings, settings.CostSettings, settings.GuestSettings, settings.ServiceSettings,
    ]  # fmt: skip
    missing = [f"{table.__name__}.{key}" for table in tables_read for key in table.model_fields if key not in shown]
    assert missing == []


@pytest.mark.usefixtures("head_address")
def test_the_example_shows_the_true_defaults(tmp_path):
    """Every commented-out line `# key = value` of the example, taken in, gives the same settings as the default."""
    text = re.sub(r"(?ms)^# \[(slurm|\[circuits\]|\[services\])\]$.*?\n\n", "", EXAMPLE.read_text(encoding="utf-8"))
    fewer = re.sub(
        r"^# (?!endpoint|address|data_address|data_interface|fabric|torch_index|max_gpus|uid_first|accounts|time_limit|description|title|switch|rack|owner|owner_first|cpus|memory|shm|gpu_models|gpu_driver|gpu_capability|gpu_hours|longest_lease|card_values|disk|tmp|client_id|client_secret_file|password_file|issuer|username_claim|groups_claim|domains|idps|server|user_dn|group_base|ca|certificate|key|hostnames|url|reach|name|members|each|together|weight|partition|account|qos|reservation|slurm|idle|models|profiles|power|ipmi|recipes)([a-z_]+ = )",
        r"\1",
        text,
        flags=re.M,
    )
    # `notice`, and keys the example sets itself to something else, stand twice then: keep the first line of each table.
    lines, seen = [], set()
    for line in fewer.splitlines():
        key = re.match(r"([a-z_]+) = ", line)
        if line.startswith("["):
            seen = set()
        if key and key[1] in seen:
            continue
        if key:
            seen.add(key[1])
        lines.append(line)
    with_defaults, plain = load(tmp_path, "\n".join(lines)), settings.load(EXAMPLE)
    assert with_defaults.jobs == plain.jobs
    assert with_defaults.idle == plain.idle
    assert with_defaults.costs == plain.costs
    assert with_defaults.hub == plain.hub
    assert with_defaults.images == plain.images
    assert with_defaults.power == plain.power
    assert with_defaults.network == plain.network
    assert with_defaults.scheduling == plain.scheduling
    assert with_defaults.profiles[0].pids == plain.profiles[0].pids
    assert with_defaults.users.queue_limit == plain.users.queue_limit


def test_capability_and_driver_are_not_checked_before_nodes_are_probed(tmp_path):
    """What cluster.toml cannot tell of a card is not held against a profile before the node was asked."""
    asks = 'gpu_model = "RTX 5090"\ngpu_capability = "12.0"\ngpu_driver = "570"'
    cluster = load(tmp_path, GOOD.replace('gpu_model = "RTX 5090"', asks, 1))
    requirement = profiles_module.gpu_requirement(cluster.profiles[0])
    assert (requirement.least_capability, requirement.least_driver) == ((12, 0), "570")


@pytest.mark.parametrize(
    ("login", "group", "reason"),
    [
        ('login = "password"', "lab", 'has no members: login = "password" has no groups'),
        ('login = "first-use"', "lab", 'has no members: login = "first-use" has no groups'),
        ('login = "github"', "my lab", "is not a group of GitHub"),
        ('login = "google"', "lab", "is not a domain"),
        ('login = "ldap"', "lab", "has no members: groups of an LDAP server are searched below"),
    ],
)
@pytest.mark.parametrize("place", ["nodes: 'rig1'", "profiles: 'big'"])
def test_a_group_without_possible_members_is_refused(tmp_path, login, group, reason, place):
    """The login cannot report it, and no [[groups]] table lists members, with which it is accepted."""
    tables = {
        'login = "github"': '[login]\nclient_id = "a"\nclient_secret_file = "/s"\n',
        'login = "google"': '[login]\nclient_id = "a"\nclient_secret_file = "/s"\n',
        'login = "ldap"': '[login]\nserver = "ldaps://l"\nuser_dn = "uid={username},dc=x"\n',
    }
    name = place.split("'")[1]
    text = GOOD.replace(f'name = "{name}"', f'name = "{name}"\ngroups = ["{group}"]')
    text = text.replace("[users]", f"{tables.get(login, '')}[users]\n{login}")
    with pytest.raises(SettingsError) as raised:
        load(tmp_path, text)
    assert f"{place}: groups: '{group}' {reason}" in str(raised.value)
    assert "[[groups]] table of that name" in str(raised.value)
    members = f'[[groups]]\nname = "{group}"\nmembers = ["ada"]\n'
    assert load(tmp_path, f"{text}{members}").access_groups == {group}


def test_groups_of_nodes_and_profiles_are_read(tmp_path):
    """With a login that has groups, any name may be one."""
    text = GOOD.replace('name = "rig1"', 'name = "rig1"\ngroups = ["vision", "nlp"]')
    cluster = load(tmp_path, text.replace('name = "big"', 'name = "big"\ngroups = ["chiefs"]'))
    assert (cluster.node_groups, cluster.access_groups) == ({"vision", "nlp"}, {"vision", "nlp", "chiefs"})
    assert [cluster.profiles[0].admits(groups) for groups in ((), ("vision",), ("a", "chiefs"))] == [False, False, True]


GUEST = """[[nodes]]
name = "mia"
address = "10.213.77.2"
docker = "ssh://gpuhub-guest@10.213.77.2:8022"
guest = true
[[profiles]]"""


@pytest.mark.parametrize(
    ("guest", "rest", "reason"),
    [
        (GUEST, "", "guest = true needs endpoint in [guests]"),
        (
            GUEST.replace("10.213.77.2", "10.0.0.12"),
            '[guests]\nendpoint = "a.example:1"',
            "an address in guests.subnet",
        ),
        (GUEST.replace("ssh://gpuhub-guest@10.213.77.2:8022", "unix:///d.sock"), "", "needs an ssh:// URL"),
        (GUEST, '[guests]\nendpoint = "a.example"', "endpoint"),
        (GUEST, '[guests]\nendpoint = "a.example:1"\nsubnet = "8.8.8.0/24"', "a private network of /16 to /29"),
    ],
)
def test_guests_need_an_endpoint_and_their_own_network(tmp_path, guest: str, rest: str, reason: str):
    """A guest that could not be reached, or only over a way that is not its tunnel, is refused."""
    with pytest.raises(SettingsError, match=re.escape(reason)):
        load(tmp_path, GOOD.replace("[[profiles]]", guest) + rest)


def test_guests_are_no_members_of_what_the_closet_shares(tmp_path):
    """With a guest, the closet's own node is still the only one: no overlay, no export."""
    text = GOOD.replace("[[profiles]]", GUEST) + '[guests]\nendpoint = "a.example:51820"'
    cluster = load(tmp_path, text)
    assert [node.name for node in cluster.own_nodes] == ["rig1"]
    assert not cluster.has_overlay
    assert cluster.node("mia").access_groups == {"guests:"}


def test_prices_need_a_currency_and_known_profiles(tmp_path):
    """A price without a currency, and one of a profile that does not exist, are refused; a model's name may be NVML's."""
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, GOOD + "\n[costs]\nkwh = 0.3\nprofiles = { huge = 2 }\n")
    assert 'costs.currency: is missing, and there are prices: add one, such as "EUR"' in str(caught.value)
    assert "costs.profiles: there is no profile 'huge'" in str(caught.value)
    prices = (
        '\n[costs]\ncurrency = "€"\ngpu_hour = 1\nmodels = { "NVIDIA GeForce RTX 5090" = 2 }\nprofiles = { big = 3 }\n'
    )
    costs = load(tmp_path, GOOD + prices).costs
    assert costs.find_gpu_hour_price("big", "RTX 5090") == 3
    assert costs.find_gpu_hour_price(None, "RTX 5090") == 2
    assert costs.find_gpu_hour_price(None, "RTX 5060") == 1
