"""`[notifications]` and the file of destinations."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from gpuhub.common.errors import SettingsError
from gpuhub.config.notifications import NotificationSettings
from gpuhub.notifications import machine_destinations

SECRET = "s3cret"


def write(path: Path, text: str, mode: int = 0o600) -> NotificationSettings:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return NotificationSettings.model_validate({"destinations_file": str(path)})


def test_lines_of_the_file_are_destinations(tmp_path: Path) -> None:
    """Except comments and empty lines; private addresses are permitted."""
    text = f"# owner\nmailto://localhost?to=ops@example.org\n\n  ntfys://{SECRET}-topic  \n"
    assert machine_destinations.load(write(tmp_path / "file", text)) == [
        "mailto://localhost?to=ops@example.org",
        f"ntfys://{SECRET}-topic",
    ]
    assert machine_destinations.load(NotificationSettings()) == []


def test_ids_of_destinations_depend_on_their_lines_alone() -> None:
    """What waits for a destination goes there after other lines are moved or removed; ids do not reveal the lines."""
    lines = ["mailto://ops@example.org", f"ntfys://{SECRET}", f"ntfys://{SECRET}/2"]
    ids = machine_destinations.build_ids(lines, "key")
    assert machine_destinations.build_ids(reversed(lines), "key") == ids
    assert machine_destinations.build_ids(lines[1:], "key").items() < ids.items()
    assert not ids.keys() & machine_destinations.build_ids(lines, "another key").keys()
    assert all(len(key) == 29 and SECRET not in key for key in ids)


@pytest.mark.parametrize(
    ("text", "mode", "reason"),
    [
        (f"ntfys://{SECRET}", 0o644, r"can be read by other users \(mode 0644\): chmod 600 it"),
        (f"ntfys://ok\nexec://{SECRET}", 0o600, "destination 2: the destination must begin with one of"),
        (f"ntfys://x?attach={SECRET}", 0o600, "destination 1: the parameter 'attach' is not permitted"),
        (f"ntfys://{SECRET}\n" * 21, 0o600, "20 destinations are the limit"),
    ],
)
def test_a_wrong_file_is_refused_without_its_content(tmp_path: Path, text: str, mode: int, reason: str) -> None:
    """With the remedy."""
    with pytest.raises(SettingsError, match=reason) as refusal:
        machine_destinations.load(write(tmp_path / "file", text, mode))
    assert SECRET not in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """With what to put there."""
    settings = NotificationSettings.model_validate({"destinations_file": str(tmp_path / "none")})
    with pytest.raises(SettingsError, match="no such file; put one Apprise URL in each line"):
        machine_destinations.load(settings)


def test_allowed_addresses_are_checked() -> None:
    """A name could lead anywhere."""
    with pytest.raises(ValidationError, match=r"'ntfy\.lan' is not an address"):
        NotificationSettings.model_validate({"allowed_addresses": ["ntfy.lan"]})
