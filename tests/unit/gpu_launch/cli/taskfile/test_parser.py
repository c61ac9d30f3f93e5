"""Task files in SkyPilot's YAML: what is taken unchanged, what is noted, what is refused by name."""

from __future__ import annotations

import pytest

from gpu_launch.broker.models import Cluster, Gpu, Node
from gpu_launch.cli import taskfile
from gpu_launch.cli.taskfile import Accelerators
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


def test_parse_hello_task() -> None:
    """The first file of a tutorial."""
    read = taskfile.parse_task_file(HELLO)
    assert (read.workdir, read.nnodes, read.accelerators) == (".", 1, Accelerators(models=("A100",), count=8))
    assert (read.setup, read.run) == ('echo "Running setup."\n', 'echo "Hello, world!"\nnvidia-smi\n')
    assert (read.name, read.notes) == ("", ())


def test_parse_distributed_task() -> None:
    """Several nodes, several models, variables of all kinds, one of them to be given."""
    read = taskfile.parse_task_file(DISTRIBUTED)
    assert (read.name, read.nnodes) == ("two-node-training", 2)
    assert read.accelerators == Accelerators(models=("H100", "A100"), count=4)
    assert read.envs == {"EPOCHS": "20", "LEARNING_RATE": "1e-4", "USE_AMP": "True", "WANDB_API_KEY": None}
    assert [note.split(" is ignored")[0] for note in read.notes] == [
        "line 5: resources.cpus",
        "line 6: resources.memory",
        "line 7: resources.disk_size",
    ]
    with pytest.raises(UsageError, match=r"envs\.WANDB_API_KEY has no value in the file: give it with --env"):
        taskfile.build_environ(read, envs={}, secrets={})
    given = taskfile.build_environ(read, envs={"WANDB_API_KEY": "k", "EPOCHS": "1", "MORE": "2"}, secrets={})
    assert given == {"EPOCHS": "1", "LEARNING_RATE": "1e-4", "USE_AMP": "True", "WANDB_API_KEY": "k", "MORE": "2"}


def test_parse_fine_tuning_task() -> None:
    """A secret that must be given, a mapping of GPUs, a workdir elsewhere."""
    read = taskfile.parse_task_file(FINE_TUNING)
    assert read.accelerators == Accelerators(models=("A100-80GB",), count=8)
    assert read.workdir == "~/code/finetune"
    with pytest.raises(UsageError, match=r"secrets\.HF_TOKEN has no value in the file: give it with --secret"):
        taskfile.build_environ(read, envs={}, secrets={})
    assert taskfile.build_environ(read, envs={}, secrets={"HF_TOKEN": "t"}) == {
        "MODEL": "some/model-8b",
        "HF_TOKEN": "t",
    }


def test_parse_minimal_task_and_yaml_anchors() -> None:
    """Nothing but `run`; YAML's own ways of not repeating oneself."""
    assert taskfile.parse_task_file(MINIMAL).accelerators is None
    assert taskfile.parse_task_file(ANCHORS).secrets == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "file_mounts:\n  /data: ./data\n",
            "line 2: file_mounts is not supported: copy files once with `gpu-launch cp`",
        ),
        ("service:\n  replicas: 2\n", "line 2: service is not supported: jobs here end"),
        ("config:\n  docker: {}\n", "line 2: config is not supported"),
        ("volumes:\n  /mnt: v\n", "line 2: volumes is not supported"),
        ("resources:\n  cloud: aws\n", "line 3: resources.cloud is not supported: there is this cluster alone"),
        ("resources:\n  infra: k8s\n", "line 3: resources.infra is not supported"),
        ("resources:\n  instance_type: p3\n", "line 3: resources.instance_type is not supported"),
        ("resources:\n  use_spot: true\n", "line 3: resources.use_spot is not supported: use --scavenge"),
        ("resources:\n  image_id: docker:x\n", "line 3: resources.image_id is not supported: --profile NAME"),
        ("resources:\n  ports: 8080\n", "line 3: resources.ports is not supported"),
        ("resources:\n  autostop: 10m\n", "line 3: resources.autostop is not supported"),
        ("resources:\n  any_of:\n    - cloud: aws\n", "line 3: resources.any_of is not supported"),
        ("resources:\n  cpus: 16\n", "line 3: resources.cpus is exactly 16, which no node promises; 16+ asks"),
        ("resources:\n  memory: 64GB\n", "line 3: resources.memory is exactly 64GB"),
        ("resources:\n  acelerators: A100\n", "line 3: resources.acelerators is not known, or not supported here"),
        ("resources:\n  accelerators: RTX5090:0.5\n", "line 3: resources.accelerators asks for RTX5090:0.5: parts of"),
        ("resources:\n  accelerators: [A100:8, H100:4]\n", "asks for 4 of one model or 8 of another a node"),
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
        taskfile.parse_task_file("run: echo hello\n" + text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("# nothing\n", "it is empty"),
        ("- run: x\n", "it is not a task: a mapping"),
        ("just text\n", "it is not a task: a mapping"),
        ("run: x\n---\nrun: y\n", "it contains several tasks"),
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
        taskfile.parse_task_file(text)


@pytest.mark.parametrize(
    "text",
    [
        "resources:\n  cloud: null\n  job_recovery: none\n  network_tier: best\n",
        "file_mounts:\n",
        "resources:\n",
        "envs:\nsecrets:\nsetup:\nworkdir:\nnum_nodes:\nname:\n",
    ],
)
def test_keys_without_effect_are_accepted(text: str) -> None:
    """Without a value, or with one that holds here anyway."""
    assert taskfile.parse_task_file("run: x\n" + text).notes == ()


def _cluster(**models: int) -> Cluster:
    cards = (
        Gpu(uuid=name, node="n", model=name.replace("_", " ").replace("  ", "-"), memory_mib=gib * 1024 - 600)
        for name, gib in models.items()
    )
    return Cluster(nodes=(Node(name="n", gpus=tuple(cards)),))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("RTX5090", ("RTX 5090",)),
        ("RTX-5090", ("RTX 5090",)),
        ("rtx5070", ("RTX 5070",)),
        ("RTX5070Ti", ("RTX 5070 Ti",)),
        ("A100", ("A100-SXM4-40GB", "A100-SXM4-80GB")),
        ("A100-80GB", ("A100-SXM4-80GB",)),
        ("H100", ("H100 80GB HBM3",)),
        ("L4", ("L4",)),
        ("H200", ("H200",)),
        ("H200-80GB", ("H200",)),
    ],
)
def test_gpu_names_are_mapped_to_the_clusters_models(name: str, found: tuple[str, ...]) -> None:
    """However a task file writes them; never another card that begins alike."""
    cluster = _cluster(
        RTX_5090=32, RTX_5070=12, RTX_5070_Ti=16, A100__SXM4__40GB=40, A100__SXM4__80GB=80, H100_80GB_HBM3=80, L4=24,
        L40S=48, H200=141,
    )  # fmt: skip
    assert taskfile.find_models(Accelerators(models=(name,)), cluster) == found


def test_unknown_gpu_model_is_refused() -> None:
    """Said with what there is; one of several is enough."""
    cluster = _cluster(RTX_5090=32)
    assert taskfile.find_models(Accelerators(models=("V100", "RTX5090")), cluster) == ("RTX 5090",)
    with pytest.raises(UsageError, match="asks for V100 or RTX5080, and the cluster has RTX 5090"):
        taskfile.find_models(Accelerators(models=("V100", "RTX5080")), cluster)
