"""The command line of %gpu_launch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_launch import options
from gpu_launch.errors import UsageError

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
    wanted = options.parse("--nnodes 3 --nproc_per_node=2 --max-restarts 1 -t 3 train.py --epochs 2 --nnodes 9")
    assert (wanted.nnodes, wanted.nproc_per_node, wanted.max_restarts, wanted.tee) == (3, 2, 1, "3")
    assert (wanted.script, wanted.arguments) == ("train.py", ("--epochs", "2", "--nnodes", "9"))


def test_everything_after_the_script_is_the_scripts():
    """Even `--` and our own flags."""
    wanted = options.parse("train.py -- --help -m")
    assert wanted.arguments == ("--", "--help", "-m")
    assert not wanted.help


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_script_names_stay_as_they_are(name):
    """Names go through whole, without a shell."""
    wanted = options.parse_words(["--nnodes=1", name, name])
    assert (wanted.script, wanted.arguments) == (name, (name,))


@given(st.lists(st.text(max_size=12), max_size=5))
def test_any_words_give_options_or_one_clear_line(words):
    """Never another exception, whatever is typed."""
    try:
        wanted = options.parse_words(words)
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
        ("--nnodes 1:3 x.py", "elastic ranges are not supported yet"),
        ("--nproc-per-node gpu x.py", "from 1 to 64"),
        ("--nnode 3 x.py", "Did you mean --nnodes"),
        ("--nodes=3 x.py", "Did you mean --nnodes"),
        ("--frobnicate x.py", "--help lists"),
        ("-x x.py", "--help lists"),
        ("--node-rank 1 x.py", "decided by the launch itself"),
        ("--rdzv_endpoint=evil:1 x.py", "decided by the launch itself"),
        ("--no-python=1 x.py", "takes no value"),
        ("-m --no-python x", "exclude each other"),
        ("-t 4 x.py", "--tee 4"),
        ("--local-ranks-filter a x.py", "local ranks such as 0,2"),
        ("--timeout-s 0 x.py", "above 0"),
        ("--timeout-s nan x.py", "above 0"),
        ("--model '' x.py", "--model needs a value"),
        ("'unclosed", "No closing quotation"),
    ],
)
def test_bad_lines_say_what_would_be_right(line, right):
    """One or two lines naming the flag and the right value."""
    with pytest.raises(UsageError) as refused:
        options.parse(line)
    assert right in str(refused.value)
    assert len(str(refused.value).splitlines()) <= 2


def test_a_cells_arguments_follow_two_dashes():
    """The cell is the script; without dashes a word is refused with the right form."""
    assert options.parse("--nnodes 3 -- --epochs 2", cell=True).arguments == ("--epochs", "2")
    assert options.parse("", cell=True).arguments == ()
    with pytest.raises(UsageError, match=r"such as: -- train\.py"):
        options.parse("--nnodes 3 train.py", cell=True)
    with pytest.raises(UsageError, match="are for %gpu_launch"):
        options.parse("-m", cell=True)


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
def test_what_is_shown_is_what_torchruns_console_would_have(line, shown):
    """A stream is shown unless it is redirected and not teed."""
    wanted = options.parse(line)
    assert {(rank, stream) for rank in (0, 1) for stream in ("stdout", "stderr") if wanted.shows(rank, stream)} == shown


def test_other_torchrun_flags_are_passed_on():
    """With their values."""
    assert options.parse("--shutdown_timeout 5 --virtual-local-rank x").passed == (
        "--shutdown-timeout=5",
        "--virtual-local-rank",
    )
