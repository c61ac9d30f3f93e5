"""The command line of %gpu_launch."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpu_launch
from gpu_launch.broker.gpu_request import Amount, GpuRequest
from gpu_launch.errors import UsageError
from gpu_launch.options import command, conflicts, definition
from gpu_launch.options.launch_options import LaunchOptions
from gpu_launch.options.option import Surface

HOSTILE = [
    "a b.py",
    "it's.py",
    'quo"te.py',
    "semi;colon.py",
    "$(reboot).py",
    "new\nline.py",
    "ünï.py",
    "..%2f.py",
    "*.py",
]


def test_torchruns_flags_in_both_spellings():
    """Dashes and underscores, spaces and equals signs, as torchrun takes them."""
    wanted = command.parse("--nnodes 3 --nproc_per_node=2 --max-restarts 1 -t 3 train.py --epochs 2 --nnodes 9")
    assert (wanted.nnodes, wanted.nproc_per_node, wanted.max_restarts, wanted.tee) == (3, 2, 1, "3")
    assert (wanted.script, wanted.arguments) == ("train.py", ("--epochs", "2", "--nnodes", "9"))


def test_gpu_constraint_flags():
    """In both spellings; models in the order of liking."""
    wanted = command.parse(
        "--model 'RTX  5090, rtx5070' --memory=1.5G --same_model --exclusive --scavenge --priority -5 "
        "--time-limit 90m train.py"
    )
    assert wanted.demand == GpuRequest(
        models=("RTX 5090", "rtx5070"),
        least_memory_mib=1536,
        same_model=True,
        exclusive=True,
        scavenge=True,
        priority=-5,
        time_limit_s=5400,
    )
    assert command.parse("train.py").demand == GpuRequest()


def test_sizes_of_containers():
    """Cores, memory and /dev/shm, where `+` is at least that; the command of a job and `%%gpu` have them too."""
    demand = command.parse("--cpus 8+ --ram=64G --shm 512M x.py").demand
    assert (demand.cpus, demand.ram_mib, demand.shm_mib) == (Amount(8, or_more=True), Amount(64 * 1024), 512)
    assert demand.build_body() == {"cpus": 8, "cpus_or_more": True, "ram_mib": 65536, "shm_mib": 512}
    assert demand.describe(1) == ("1 GPU with 8 CPU cores or more, 64 GiB of memory, 512 MiB of shared memory")
    for line in ("--cpus 0", "--cpus 8-9", "--cpus many", "--ram 64", "--ram 1M", "--ram 64G++", "--shm 1"):
        with pytest.raises(UsageError, match=rf"{line.split()[0]} "):
            command.parse(f"{line} x.py")


def test_datasets_to_stage():
    """Folders below /datasets, with or without slashes around them; each once."""
    wanted = command.parse("--stage /datasets/imagenet/,datasets/c4/en,datasets/c4/en train.py")
    assert wanted.demand.stage == ("datasets/imagenet", "datasets/c4/en")
    assert wanted.demand.build_body() == {"stage": ["datasets/imagenet", "datasets/c4/en"]}
    for value in ("imagenet", "datasets", "datasets/../home", "datasets/a,,datasets/b", "/home/ada"):
        with pytest.raises(UsageError, match=r"--stage .*: a folder below /datasets is needed, such as"):
            command.parse(f"--stage {value} train.py")
    many = ",".join(f"datasets/{number}" for number in range(17))
    with pytest.raises(UsageError, match="--stage: at most 16 datasets"):
        command.parse(f"--stage {many} train.py")


def test_elastic_ranges_are_read_as_torchrun_does():
    """MIN:MAX; a later single number takes it back."""
    wanted = command.parse("--nnodes 1:3 train.py")
    assert (wanted.least_nnodes, wanted.nnodes) == (1, 3)
    wanted = command.parse("--nnodes 1:3 --nnodes 2 train.py")
    assert (wanted.least_nnodes, wanted.nnodes) == (None, 2)


def test_help_lists_every_gpu_launch_flag():
    """So that a new one is not forgotten."""
    assert [label for label in definition.BY_LABEL if f"--{label}" not in command.USAGE and label != "help"] == []


@pytest.mark.parametrize("name", conflicts.REFUSED)
def test_refused_flag_has_a_reason(name):
    """In both spellings, with a value or without."""
    for flag in (f"--{name}", f"--{name.replace('-', '_')}=1"):
        with pytest.raises(UsageError) as raised:
            command.parse(f"{flag} train.py")
        assert conflicts.REFUSED[name] in str(raised.value)
        assert flag.partition("=")[0] in str(raised.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--send a,b,a x.py", {"send": ("a", "b")}),
        ("--return loss x.py", {"returns": ("loss",)}),
        ("--preload transformers,torch.nn x.py", {"preload": ("transformers", "torch.nn")}),
        ("--keep 0s x.py", {"keep_s": 0}),
        ("--keep=30m --cold x.py", {"keep_s": 1800, "cold": True}),
        ("--detach --dry-run x.py", {"detach": True, "dry_run": True}),
        (
            "--monitor-interval 0.5 --role trainer x.py",
            {"torchrun_flags": ("--monitor-interval=0.5", "--role=trainer")},
        ),
        (
            "--virtual-local-rank --numa-binding=node x.py",
            {"torchrun_flags": ("--virtual-local-rank", "--numa-binding=node")},
        ),
        ("--signals-to-handle SIGTERM,SIGUSR1 x.py", {"torchrun_flags": ("--signals-to-handle=SIGTERM,SIGUSR1",)}),
        ("--shutdown-timeout 5 x.py", {"torchrun_flags": ("--shutdown-timeout=5",)}),
    ],
)
def test_flags_set_options(line, expected):
    """One by one."""
    wanted = command.parse(line)
    assert {name: getattr(wanted, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--detach --send a x.py", "load what it needs from a file"),
        ("--detach --return a x.py", "save its results to a file"),
        ("--detach --keep 1h x.py", "its workers end with it"),
        ("--detach --timeout-s 5 x.py", "%gpu_cancel"),
        ("--cold --preload numpy x.py", "nothing imported"),
        ("--no-python --send a ls", "no Python variables"),
        ("--no-python --return a ls", "no Python variables"),
        ("--no-python --preload numpy ls", "starts from nothing"),
        ("--module --no-python ls", "either a module or a program"),
    ],
)
def test_flags_that_exclude_each_other(line, said):
    """Both are named, with the reason."""
    with pytest.raises(UsageError) as raised:
        command.parse(line)
    assert said in str(raised.value)
    assert "exclude each other" in str(raised.value)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--send a-b x.py", "'a-b' is not a Python name"),
        ("--send class x.py", "'class' is not a Python name"),
        ("--send __name__ x.py", "Python's own"),
        ("--return '' x.py", "'' is not a Python name"),
        ("--preload a..b x.py", "'a..b' is not a Python name"),
        ("--keep 30 x.py", "with its unit"),
        ("--keep 2d x.py", "from 0 s to 24 h"),
        ("--monitor-interval soon x.py", "number of seconds"),
        ("--shutdown-timeout -1 x.py", "from 0"),
        ("--numa-binding nodes x.py", "node, socket"),
        ("--signals-to-handle TERM x.py", "SIGTERM,SIGUSR1"),
        ("--role 'a b' x.py", "such as trainer"),
        ("--nproc-per-node gpu x.py", "whole number"),
        ("--comm fp16 x.py", "one of auto, exact, bf16, powersgd, local, diloco is needed"),
    ],
)
def test_values_are_checked_before_anything_starts(line, said):
    """Also those that only torchrun itself would look at, on the nodes."""
    with pytest.raises(UsageError) as raised:
        command.parse(line)
    assert said in str(raised.value)


def test_everything_after_the_script_is_the_scripts():
    """Even `--` and our own flags."""
    wanted = command.parse("train.py -- --help -m")
    assert wanted.arguments == ("--", "--help", "-m")
    assert not wanted.help


@pytest.mark.parametrize("name", HOSTILE)
def test_script_names_are_not_interpreted_by_a_shell(name):
    """Names go through whole, without a shell."""
    wanted = command.parse_words(["--nnodes=1", name, name])
    assert (wanted.script, wanted.arguments) == (name, (name,))


@given(st.lists(st.text(max_size=12), max_size=5))
def test_any_arguments_give_options_or_a_one_line_error(words):
    """Never another exception, whatever is typed."""
    try:
        wanted = command.parse_words(words)
    except UsageError as error:
        assert str(error)
    else:
        assert wanted.help or wanted.script in words


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("", "No script is named"),
        ("--nnodes 3", "No script is named"),
        ("--nnodes", "needs a value"),
        ("--nnodes 0 x.py", "from 1 to 1024"),
        ("--nnodes -1 x.py", "from 1 to 1024"),
        ("--nnodes three x.py", "whole number"),
        ("--nnodes 1_0 x.py", "whole number"),
        ("--nnodes ٣ x.py", "whole number"),
        ("--nnodes 3:1 x.py", "1 ≤ MIN ≤ MAX ≤ 1024"),
        ("--nnodes 0:3 x.py", "1 ≤ MIN ≤ MAX ≤ 1024"),
        ("--nnodes 1:9999 x.py", "1 ≤ MIN ≤ MAX ≤ 1024"),
        ("--nnodes 1: x.py", "MIN:MAX such as 1:3"),
        ("--nnodes 1:2:3 x.py", "MIN:MAX such as 1:3"),
        ("--nnodes a:b x.py", "MIN:MAX such as 1:3"),
        ("--nproc-per-node gpu x.py", "from 1 to 64"),
        ("--nnode 3 x.py", "Did you mean --nnodes"),
        ("--nodes=3 x.py", "Did you mean --nnodes"),
        ("--frobnicate x.py", "--help lists"),
        ("-x x.py", "--help lists"),
        ("--node-rank 1 x.py", "is torchrun's, and not for a launch"),
        ("--rdzv_endpoint=evil:1 x.py", "is torchrun's, and not for a launch"),
        ("--no-python=1 x.py", "takes no value"),
        ("-m --no-python x", "exclude each other"),
        ("--no-python --comm bf16 x", "exclude each other: a program's DistributedDataParallel is out of reach"),
        ("--predict --nnodes 2 x.py", "exclude each other: a prediction runs some steps on one card"),
        ("--predict --comm bf16 x.py", "exclude each other: a prediction has all modes"),
        ("-t 4 x.py", "--tee 4"),
        ("--local-ranks-filter a x.py", "local ranks such as 0,2"),
        ("--timeout-s 0 x.py", "above 0"),
        ("--timeout-s nan x.py", "above 0"),
        ("--model '' x.py", "--model needs a value"),
        ("--model 'RTX 5090,' x.py", "--model needs a value"),
        (f"--model {','.join('abcdefghijklmnopq')} x.py", "at most 16 models"),
        ("--memory 24 x.py", "a size with its unit is needed, such as 24G"),
        ("--memory 0G x.py", "a size with its unit"),
        ("--memory lots x.py", "a size with its unit"),
        ("--memory -1G x.py", "a size with its unit"),
        ("--time-limit 2 x.py", "a span of time with its unit is needed, such as 30m"),
        ("--time-limit 30s x.py", "from 1 min to 366 d"),
        ("--time-limit 99w x.py", "from 1 min to 366 d"),
        ("--priority high x.py", "from -100 to 100"),
        ("--priority 101 x.py", "from -100 to 100"),
        ("--scavenge=yes x.py", "--scavenge takes no value"),
        ("--same-models x.py", "Did you mean --same-model"),
        ("--time_limits 2h x.py", "Did you mean --time-limit"),
        ("'unclosed", "No closing quotation"),
    ],
)
def test_errors_name_the_flag_and_the_valid_value(line, right):
    """One or two lines naming the flag and the right value."""
    with pytest.raises(UsageError) as refused:
        command.parse(line)
    assert right in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 2


def test_a_cells_arguments_follow_two_dashes():
    """The cell is the script; without dashes a word is refused with the right form."""
    assert command.parse("--nnodes 3 -- --epochs 2", cell=True).arguments == ("--epochs", "2")
    assert command.parse("", cell=True).arguments == ()
    with pytest.raises(UsageError, match=r"such as: -- train\.py"):
        command.parse("--nnodes 3 train.py", cell=True)
    with pytest.raises(UsageError, match="are for %gpu_launch"):
        command.parse("-m", cell=True)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("x", {(0, "stdout"), (0, "stderr"), (1, "stdout"), (1, "stderr")}),
        ("-r 3 x", set()),
        ("-r 3 -t 1 x", {(0, "stdout"), (1, "stdout")}),
        ("-r 2 x", {(0, "stdout"), (1, "stdout")}),
        ("-r 3 -t 0:3 x", {(0, "stdout"), (0, "stderr")}),
        ("--local-ranks-filter 1 x", {(1, "stdout"), (1, "stderr")}),
    ],
)
def test_shown_streams_match_torchruns_console(line, shown):
    """A stream is shown unless it is redirected and not teed."""
    wanted = command.parse(line)
    assert {(rank, stream) for rank in (0, 1) for stream in ("stdout", "stderr") if wanted.shows(rank, stream)} == shown


def test_other_torchrun_flags_are_passed_on():
    """With their values."""
    assert command.parse("--shutdown_timeout 5 --virtual-local-rank x").torchrun_flags == (
        "--shutdown-timeout=5",
        "--virtual-local-rank",
    )


@pytest.mark.parametrize(
    ("values", "right"),
    [
        ({"nnodes": "3:1"}, "--nnodes 3:1"),
        ({"memory": "24"}, "--memory 24"),
        ({"priority": 101}, "--priority 101"),
        ({"time_limit": "1s"}, "--time-limit 1s"),
        ({"model": ["RTX 5090", ""]}, "--model needs a value"),
        ({"model": ["RTX 5090", "RTX 5070"]}, "--model needs the broker"),
        ({"same_model": True}, "--same-model needs the broker"),
        ({"exclusive": True}, "--exclusive needs the broker"),
        ({"stage": ["datasets/a", "datasets/b"]}, "--stage needs the broker"),
        ({"scavenge": True, "nnodes": "1:2"}, "cannot be requested"),
    ],
)
def test_function_accepts_the_same_options_as_the_magic(monkeypatch, values, right):
    """And refuses alike; where there is no broker, what needs one."""
    for name in ("GPUHUB_BROKER_URL", "GPUHUB_GPU_UUIDS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=right):
        gpu_launch.run("train.py", **values)


def test_keywords_of_the_function_match_the_options():
    """With the defaults of the value, so that none is forgotten and none differs."""
    parameters = inspect.signature(gpu_launch.run).parameters
    own = {"script", "arguments", "kwargs"}
    defined = {option.keyword for option in definition.OPTIONS if Surface.FUNCTION in option.surfaces}
    assert set(parameters) - own == defined
    defaults = {name: parameters[name].default for name in parameters if name not in {*own, "send"}}
    assert command.build_from_keywords(defaults) == LaunchOptions()


def test_formatted_flags_can_be_parsed_again():
    """What differs from the defaults, in units that the flags take."""
    line = "--nnodes 1:3 --memory 1.5G --cpus 8+ --ram 1T+ --time-limit 90m --keep 0s --send a,b -t 3 --role=x --virtual-local-rank x.py"
    options = command.parse(line)
    flags = command.format_flags(options)
    assert flags == (
        "--nnodes", "1:3", "--memory", "1536M", "--cpus", "8+", "--ram", "1024G+", "--time-limit", "90m", "--keep", "0s", "--send", "a,b", "--tee", "3",
        "--role", "x", "--virtual-local-rank",
    )  # fmt: skip
    assert command.parse_words([*flags, "x.py"]) == options


@pytest.mark.parametrize("line", ["-t=3 x.py", "-t 3 x.py", "--tee=3 x.py"])
def test_short_flags_accept_attached_and_separate_values(line):
    """As torchrun's own."""
    assert command.parse(line).tee == "3"


def test_bench_is_a_launch_of_a_module():
    """With the options about GPUs and waiting, and nothing else."""
    options = command.parse_bench("--nnodes 3 --model 'RTX 5090' --timeout-s 9")
    assert (options.nnodes, options.demand.models, options.timeout_s) == (3, ("RTX 5090",), 9)
    assert (options.script, options.module) == (definition.BENCH_MODULE, True)
    assert command.parse_bench("--help").help


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train.py", "%gpu_bench takes no arguments, and train.py is one"),
        ("--nnodes 1:3", "one number of nodes is needed"),
        ("--detach", "There is no flag --detach"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(line, said):
    """Before anything is requested."""
    with pytest.raises(UsageError) as raised:
        command.parse_bench(line)
    assert said in str(raised.value)
