"""`gpu-launch share` against a hub over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch.cli import main
from tests.support.hub.fake_hub import FakeHub
from tests.support.hub.laptop import logged_in

RUN = "run-20260101-000000-abc123"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with a running job."""
    monkeypatch.setenv("COLUMNS", "200")
    with logged_in(tmp_path, monkeypatch, {"x.py": "x"}) as hub:
        hub.add(RUN, name="train.py")
        hub.run()
        yield hub


def test_share_prints_a_link_for_each_user(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Below the hub's address; for a week unless `--for` says otherwise."""
    assert main.run_command(["share", "train.py", "--with", "ben"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"ben sees {RUN} for 7 d")
    assert told.endswith(f"/hub/gpuhub/shared/job-{RUN}\n")
    assert "http" in told
    assert main.run_command(["share", "--with", "eve", "--with", "mia", "--for", "2h", "--json", "abc123"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [share["viewer"] for share in shown] == ["eve", "mia"]
    assert shown[0]["url"].endswith(f"/hub/gpuhub/shared/job-{RUN}")


def test_shares_are_listed_and_ended(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """With one user or with all; an administrator's list has only the user's own."""
    assert main.run_command(["share", "list"]) == 0
    assert capsys.readouterr().out == "Nothing is shared.\n"
    for viewer in ("ben", "eve"):
        assert main.run_command(["share", "abc123", "--with", viewer]) == 0
    hub.add("run-20260109-000000-abc129", name="bens", owner="ben")
    hub.shares.append({**hub.shares[0], "id": "j9", "job": "j9", "run_id": "run-9", "owner": "ben", "viewer": "eve"})
    capsys.readouterr()
    assert main.run_command(["share", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["WHAT", "NAME", "OWNER", "WITH", "ENDS", "IN", "LINK"]
    assert [line.split()[3] for line in lines[1:]] == ["ben", "eve"]
    assert main.run_command(["share", "end", "train.py", "--with", "mia"]) == 0
    assert capsys.readouterr().out == f"{RUN} was not shared with mia\n"
    assert main.run_command(["share", "end", "train.py", "--with", "ben"]) == 0
    assert capsys.readouterr().out == f"{RUN} is no longer shared with ben\n"
    assert main.run_command(["share", "end", "train.py", "--json"]) == 0
    assert [share["viewer"] for share in json.loads(capsys.readouterr().out)] == ["eve"]


def test_notebook_is_shared_listed_and_ended_by_its_path(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    """Its path is its owner's: a viewer's list has the name alone."""
    (hub.home / "work").mkdir(exist_ok=True)
    (hub.home / "work" / "train.ipynb").write_text("{}")
    assert main.run_command(["share", "home:work/train.ipynb", "--with", "ben", "--for", "2h"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("ben sees home:work/train.ipynb for 2 h at http")
    assert told.endswith("/hub/gpuhub/shared-notebook/nb-train.ipynb\n")
    hub.shares.append({**hub.shares[0], "owner": "ben", "viewer": "ada", "notebook": "", "id": "nb-other"})
    assert main.run_command(["share", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        ["home:work/train.ipynb", "train.ipynb", "ada", "ben"],
        ["-", "train.ipynb", "ben", "ada"],
    ]
    assert main.run_command(["share", "end", "home:./work/train.ipynb", "--with", "eve"]) == 0
    assert capsys.readouterr().out == "home:work/train.ipynb was not shared with eve\n"
    assert main.run_command(["share", "end", "home:work/train.ipynb"]) == 0
    assert capsys.readouterr().out == "home:work/train.ipynb is no longer shared with ben\n"
    assert main.run_command(["share", "end", "home:work/train.ipynb"]) == 0
    assert capsys.readouterr().out == "home:work/train.ipynb was not shared\n"


def test_job_with_a_commands_name_is_shared_by_add(hub: FakeHub) -> None:
    """`share list` lists; `share add list` shares the job of that name."""
    hub.add("run-20260102-000000-abc124", name="list")
    assert main.run_command(["share", "add", "list", "--with", "ben"]) == 0
    assert [share["run_id"] for share in hub.shares] == ["run-20260102-000000-abc124"]


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["share", "abc123"], 2, "Missing option '--with'"),
        (["share", "nothing", "--with", "ben"], 2, "There is no job nothing"),
        (["share", "abc123", "--with", "ben", "--for", "2"], 2, "--for 2: a span of time with its unit is needed"),
        (["share", "abc123", "--with", "ben", "--for", "91d"], 2, "from 1 min to 90 d"),
        (["share", "abc123", "--with", "bne"], 1, "the hub has no user 'bne'"),
        (["share", "abc999", "--with", "ben"], 2, "is a notebook's launch"),
        (["share", "end", "nothing"], 2, "There is no job nothing"),
        (["share", "home:work/x.py", "--with", "ben"], 2, "home:work/x.py is no notebook"),
        (["share", "home:work/x.ipynb", "--with", "ben"], 1, "there is no 'work/x.ipynb' in the home"),
    ],
)
def test_wrong_shares_are_refused(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], words: list[str], status: int, text: str
) -> None:
    """With what is wrong; nothing is shared."""
    hub.add("run-20260103-000000-abc999", detached=False)
    assert main.run_command(words) == status
    assert text in capsys.readouterr().err
    assert hub.shares == []
