"""Task files in SkyPilot's YAML: what is taken unchanged, what is noted, what is refused by name."""

from __future__ import annotations

import pytest

from gpu_launch.broker.gpu_request import Amount
from gpu_launch.cli.taskfile import parser
from gpu_launch.cli.taskfile.accelerators import Accelerators
from gpu_launch.errors import UsageError

HELLO = """\
resources:
  accelerators: A100:8

# Typical use: pip install -r requirements.txt
workdir: .

setup: |
  echo "Running setup."

run: |
  echo "Hello, world!"
  nvidia-smi
"""

DISTRIBUTED = """\
name: two-node-training

resources:
    accelerators: [H100:4, A100:4]
    cpus: 8+
    memory: 64+
    disk_size: 256
    use_spot: false

num_nodes: 2

envs:
  EPOCHS: 20
  LEARNING_RATE: 1e-4
  USE_AMP: true
  WANDB_API_KEY:

setup: |
  pip install -r requirements.txt

run: |
  MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
  torchrun \\
    --nnodes=$SKYPILOT_NUM_NODES \\
    --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE \\
    --master_addr=$MASTER_ADDR \\
    --node_rank=${SKYPILOT_NODE_RANK} \\
    --master_port=8008 \\
    train.py --epochs ${EPOCHS}
"""

FINE_TUNING = """\
name: finetune
workdir: ~/code/finetune
resources:
  accelerators: {A100-80GB: 8}
  disk_tier: best
num_nodes: 1
envs:
  MODEL: some/model-8b
secrets:
  HF_TOKEN: null
setup: pip install -e .
run: python finetune.py --model ${MODEL}
"""

MINIMAL = "run: echo hello\n"

ANCHORS = """\
envs: &common
  A: 1
secrets:
  <<: *common
  B: 2
run: env
"""


def _parse(text: str) -> parser.TaskFile:
    (task,) = parser.parse_task_files(text)
    return task


def test_parse_hello_task() -> None:
    """The first file of a tutorial."""
    read = _parse(HELLO)
    assert (read.workdir, read.nnodes, read.accelerators) == (".", 1, Accelerators(models=("A100",), count=8))
    assert (read.setup, read.run) == ('echo "Running setup."\n', 'echo "Hello, world!"\nnvidia-smi\n')
    assert (read.name, read.notes) == ("", ())


def test_parse_distributed_task() -> None:
    """Several nodes, several models, variables of all kinds, one of them to be given."""
    read = _parse(DISTRIBUTED)
    assert (read.name, read.nnodes) == ("two-node-training", 2)
    assert read.accelerators == Accelerators(models=("H100", "A100"), count=4)
    assert read.envs == {"EPOCHS": "20", "LEARNING_RATE": "1e-4", "USE_AMP": "True", "WANDB_API_KEY": None}
    assert (read.cpus, read.ram) == (Amount(8, or_more=True), Amount(64 * 1024, or_more=True))
    assert [note.split(" is ignored")[0] for note in read.notes] == [
        "line 7: resources.disk_size",
    ]
    with pytest.raises(UsageError, match=r"envs\.WANDB_API_KEY has no value in the file: give it with --env"):
        parser.build_environ(read, envs={}, secrets={})
    given = parser.build_environ(read, envs={"WANDB_API_KEY": "k", "EPOCHS": "1", "MORE": "2"}, secrets={})
    assert given == {"EPOCHS": "1", "LEARNING_RATE": "1e-4", "USE_AMP": "True", "WANDB_API_KEY": "k", "MORE": "2"}


def test_parse_fine_tuning_task() -> None:
    """A secret that must be given, a mapping of GPUs, a workdir elsewhere."""
    read = _parse(FINE_TUNING)
    assert read.accelerators == Accelerators(models=("A100-80GB",), count=8)
    assert read.workdir == "~/code/finetune"
    with pytest.raises(UsageError, match=r"secrets\.HF_TOKEN has no value in the file: give it with --secret"):
        parser.build_environ(read, envs={}, secrets={})
    assert parser.build_environ(read, envs={}, secrets={"HF_TOKEN": "t"}) == {
        "MODEL": "some/model-8b",
        "HF_TOKEN": "t",
    }


def test_parse_minimal_task_and_yaml_anchors() -> None:
    """Nothing but `run`; YAML's own ways of not repeating oneself."""
    assert _parse(MINIMAL).accelerators is None
    assert _parse(ANCHORS).secrets == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("config:\n  docker: {}\n", "line 3: config.docker is not supported: options of containers"),
        (
            "config:\n  kubernetes:\n    enable_docker: true\n",
            "line 4: config.kubernetes.enable_docker is not supported",
        ),
        ("config:\n  kubernetse: {}\n", "line 3: config.kubernetse is not known, or not supported here"),
        (
            "storage_mounts:\n  /data: x\n",
            "line 2: storage_mounts is not supported: copy data once with `gpu-launch cp`",
        ),
        ("event_callback: mail\n", "line 2: event_callback is not supported: put the command at the end of `run`"),
        ("managed_secrets: [A]\n", "line 2: managed_secrets is not supported: name them in `secrets`"),
        ("secrets: [A, 1]\n", "line 2: secrets is a mapping of names to values"),
        (
            "resources:\n  _cluster_config_overrides: {a: 1}\n",
            "line 3: resources._cluster_config_overrides is not known",
        ),
        ("volumes:\n  /mnt: v\n", "line 2: volumes is not supported"),
        ("resources:\n  cpus: many\n", "line 3: resources.cpus is 'many': a size such as 8+ is needed"),
        ("resources:\n  memory: true\n", "line 3: resources.memory is True: a size"),
        ("resources:\n  acelerators: A100\n", "line 3: resources.acelerators is not known, or not supported here"),
        ("resources:\n  accelerators: RTX5090:0.5\n", "line 3: resources.accelerators asks for RTX5090:0.5: parts of"),
        ("resources:\n  accelerators: A100:many\n", "asks for A100:many, and many is not a number"),
        ("resources:\n  accelerators: 8\n", "is neither NAME:NUMBER nor a list"),
        ("resources:\n  accelerators: []\n", "names no GPU"),
        ("resources: A100\n", "line 2: resources is a mapping"),
        ("num_nodes: 0\n", "line 2: num_nodes is 0: a number from 1 to 1024 is needed"),
        ("num_nodes: true\n", "line 2: num_nodes is True"),
        ("workdir: {url: https://x}\n", "line 2: workdir names a Git repository, which is not supported"),
        ("envs: [A]\n", "line 2: envs is a mapping of names to values"),
        ("envs:\n  A-B: 1\n", "line 3: envs.A-B is not a variable's name"),
        ("envs:\n  A: [1]\n", "line 3: envs.A is a text or a number"),
        ("setup: [a]\n", "line 2: setup is a text of commands"),
        ("nmae: x\n", "line 2: nmae is not known, or not supported here"),
    ],
)
def test_unsupported_keys_are_refused_by_name(text: str, said: str) -> None:
    """With its line and, where there is one, another way."""
    with pytest.raises(UsageError) as caught:
        _parse("run: echo hello\n" + text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("# nothing\n", "it is empty"),
        ("- run: x\n", "it is not a task: a mapping"),
        ("just text\n", "it is not a task: a mapping"),
        ("run: x\n---\n- run: y\n", "it is not a task: a mapping"),
        ("run: [\n", "it is not YAML"),
        ("run: !!python/object/apply:os.system [ls]\n", "it is not YAML: could not determine a constructor"),
        ("a: &a\n  b: *a\nrun: x\n", "a is not known|nested too deeply"),
        ("setup: echo\n", "it has no `run`"),
        ("run: ' '\n", "it has no `run`"),
    ],
)
def test_files_that_are_not_a_task_are_refused(text: str, said: str) -> None:
    """Also what would run code while it is read."""
    with pytest.raises(UsageError, match=said):
        _parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "resources:\n  cloud: null\n  use_spot: false\n  job_recovery: none\n  network_tier: best\n",
        "file_mounts:\n",
        "resources:\n",
        "envs:\nsecrets:\nsetup:\nworkdir:\nnum_nodes:\nname:\n",
    ],
)
def test_keys_without_effect_are_accepted(text: str) -> None:
    """Without a value, or with one that holds here anyway."""
    assert _parse("run: x\n" + text).notes == ()


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("resources:\n  infra: aws\n", "line 3: `resources.infra: aws` is for clouds and has no effect here"),
        ("resources:\n  cloud: aws\n", "line 3: `resources.cloud: aws` is for clouds and has no effect here"),
        ("resources:\n  region: r\n", "line 3: `resources.region: r` is for clouds and has no effect here"),
        ("resources:\n  zone: z\n", "line 3: `resources.zone: z` is for clouds and has no effect here"),
        (
            "resources:\n  instance_type: p3\n",
            "line 3: `resources.instance_type: p3` is for clouds and has no effect here",
        ),
        (
            "resources:\n  use_spot: true\n",
            "line 3: `resources.use_spot: true` is for clouds and has no effect here; --scav",
        ),
        (
            "resources:\n  spot_recovery: X\n",
            "line 3: `resources.spot_recovery: X` is for clouds and has no effect here: a p",
        ),
        (
            "resources:\n  job_recovery: FAILOVER\n",
            "line 3: `resources.job_recovery: FAILOVER` is for clouds and has no effect here: a p",
        ),
        (
            "resources:\n  image_id: ami-1\n",
            "line 3: `resources.image_id: ami-1` is for clouds and has no effect here; --pro",
        ),
        ("resources:\n  image_id: {a: b}\n", "line 3: resources.image_id is for clouds and has no effect here"),
        (
            "resources:\n  ports: [80, 81]\n",
            "line 3: resources.ports is ignored: a job has one port, which --port names",
        ),
        (
            "resources:\n  ports: 8080-8090\n",
            "line 3: resources.ports is ignored: a job has one port, which --port names",
        ),
        (
            "resources:\n  autostop: 10m\n",
            "line 3: `resources.autostop: 10m` is for clouds and has no effect here: a job's",
        ),
        ("resources:\n  max_hourly_cost: 3\n", "line 3: `resources.max_hourly_cost: 3` is for clouds"),
        (
            "resources:\n  accelerator_args: {a: 1}\n",
            "line 3: resources.accelerator_args is for clouds and has no effect",
        ),
        ("resources:\n  priority: 5\n", "line 3: `resources.priority: 5` has no effect here: the cluster's own rules"),
        ("resources:\n  disk_size: 1\n", "line 3: resources.disk_size is ignored: what jobs write is in your home"),
        ("resources:\n  disk_tier: low\n", "line 3: resources.disk_tier is ignored: what jobs write is in your home"),
        ("resources:\n  network_tier: x\n", "line 3: resources.network_tier is ignored: the network between the nodes"),
        ("resources:\n  labels: {a: b}\n", "line 3: resources.labels is ignored: jobs have no labels"),
        ("resources:\n  memory: 4x\n", "line 3: resources.memory is ignored: a multiple of another resource"),
        (
            "service:\n  replicas: 2\n",
            "line 2: service is for SkyServe and has no effect here: the commands run as one job",
        ),
        ("pool: {workers: 1}\n", "line 2: pool has no effect here: the broker chooses the nodes itself"),
        ("inputs: {a: 1}\n", "line 2: inputs is for clouds and has no effect here"),
        ("config:\n  kubernetes: {a: 1}\n", "line 3: config.kubernetes is a setting of a cloud and has no effect here"),
    ],
)
def test_keys_for_clouds_are_passed_over_with_a_note(text: str, note: str) -> None:
    """One line for each, with the value where it is short, and how to get the same where there is a way."""
    (read,) = _parse("run: x\n" + text).notes
    assert read.startswith(note)


def test_secrets_may_be_names_whose_values_are_elsewhere() -> None:
    """The command line gives them."""
    read = _parse("secrets: [HF_TOKEN]\nrun: x\n")
    assert read.secrets == {"HF_TOKEN": None}
    with pytest.raises(UsageError, match=r"secrets\.HF_TOKEN has no value"):
        parser.build_environ(read, envs={}, secrets={})


PIPELINE = "name: nightly\n---\nname: prepare\nrun: echo one\n---\nresources: {accelerators: L4}\nrun: echo two\n"


def test_several_documents_are_a_pipeline() -> None:
    """The first may name it; tasks without a name get its name and their number."""
    tasks = parser.parse_task_files(PIPELINE)
    assert [(task.name, task.run) for task in tasks] == [("prepare", "echo one"), ("nightly-2", "echo two")]
    assert [task.name for task in parser.parse_task_files("run: a\n---\nrun: b\n")] == ["", ""]
    assert len(parser.parse_task_files("name: x\nexecution: serial\n---\nrun: a\n---\n---\nrun: b\n---\n")) == 2
    assert not any(task.is_parallel for task in tasks)
    assert all(task.is_parallel for task in parser.parse_task_files(f"execution: parallel\n{PIPELINE}"))
    assert _parse("name: x\n---\nrun: a\n").name == "x"


_HEADER = "execution: parallel\n"


@pytest.mark.parametrize(
    ("header", "delays"),
    [
        ("", [None, None, None]),
        ("primary_tasks: [a]\n", [None, 0, 0]),
        ("primary_tasks: a\ntermination_delay: 30\n", [None, 30, 30]),
        ("primary_tasks: [a, b]\ntermination_delay: 5m\n", [None, None, 300]),
        ("primary_tasks: [a]\ntermination_delay: {default: 30s, c: 2m}\n", [None, 30, 120]),
    ],
)
def test_tasks_that_serve_primary_ones_end_with_them(header: str, delays: list[int | None]) -> None:
    """At once, or after the delay of all or of one."""
    tasks = parser.parse_task_files(
        f"{_HEADER}{header}---\nname: a\nrun: a\n---\nname: b\nrun: b\n---\nname: c\nrun: c\n"
    )
    assert [task.auxiliary_s for task in tasks] == delays


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("name: x\nexecution: both\n---\nrun: a\n", "line 2: execution is 'both': parallel or serial is needed"),
        ("name: x\nprimary_tasks: [a]\n---\nrun: a\n", "line 2: primary_tasks is for tasks that run side by side"),
        (_HEADER + "primary_tasks: {a: b}\n---\nrun: a\n", "line 2: primary_tasks is a list of tasks"),
        (_HEADER + "primary_tasks: [c]\n---\nname: a\nrun: a\n---\nname: b\nrun: b\n", "there is no task 'c'"),
        (_HEADER + "termination_delay: 5s\n---\nrun: a\n", "line 2: termination_delay goes with primary_tasks"),
        (
            _HEADER + "primary_tasks: a\ntermination_delay: soon\n---\nrun: a\n",
            "line 3: termination_delay cannot be read: soon: a span of time",
        ),
        (
            _HEADER + "primary_tasks: a\ntermination_delay: {c: 5s}\n---\nname: a\nrun: a\n---\nname: b\nrun: b\n",
            "termination_delay: there is no task 'c'; the tasks are a, b",
        ),
        ("name: x\n---\nsetup: a\n", "it has no `run`"),
        ("name: x\n---\nrun: a\nnmae: b\n", "line 4: nmae is not known"),
    ],
)
def test_pipelines_of_another_kind_are_refused(text: str, error: str) -> None:
    """With the line in the file, not in the document."""
    with pytest.raises(UsageError, match=error):
        parser.parse_task_files(text)
