"""Debian's components in apt's sources, in one-line files (`*.list`) and in deb822 files (`*.sources`)."""

from __future__ import annotations

import re

from gpuhub.ops.provision.machine_state import AptSourceFile

#: What NVIDIA's driver needs besides `main`: itself, what it depends on, and the firmware of its GPUs.
DRIVER_COMPONENTS = ("contrib", "non-free", "non-free-firmware")
_ONE_LINE = re.compile(
    r"(?P<type>deb)\s+(?:\[(?P<options>[^]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)\s+(?P<components>.+)"
)
#: The name of Debian's own keys, which tells its archive and mirrors from other repositories for Debian.
_DEBIAN_KEYS = "debian-archive"


def add_components(file: AptSourceFile, codename: str) -> str:
    """Return the file's text with the driver's components in every entry for binary packages of Debian's own archive.

    The text is the same where nothing is missing. Other repositories' entries, comments and order are kept.
    """
    if file.path.endswith(".sources"):
        stanzas = re.split(r"(\n[ \t]*\n)", file.text)
        return "".join(_extend_stanza(stanza, codename) for stanza in stanzas)
    return "".join(_extend_line(line, codename) for line in file.text.splitlines(keepends=True))


def _extend_line(line: str, codename: str) -> str:
    entry, sign, comment = line.partition("#")
    match = _ONE_LINE.fullmatch(entry.strip())
    if match is None or not _is_debian([match["suite"]], _find_keys(match["options"]), codename):
        return line
    missing = _find_missing(match["components"].split())
    if not missing:
        return line
    content = entry.rstrip()
    return f"{content} {' '.join(missing)}{entry[len(content) :]}{sign}{comment}"


def _extend_stanza(stanza: str, codename: str) -> str:
    fields = {
        match[1].lower(): match[2].strip() for match in re.finditer(r"^([A-Za-z-]+):[ \t]*(.*)$", stanza, re.MULTILINE)
    }
    is_binary = "deb" in fields.get("types", "").split() and fields.get("enabled", "yes").lower() != "no"
    if not is_binary or not _is_debian(fields.get("suites", "").split(), fields.get("signed-by"), codename):
        return stanza
    missing = _find_missing(fields.get("components", "").split())
    if not missing:
        return stanza
    return re.sub(
        r"^(Components:.*?)[ \t]*$",
        lambda match: f"{match[1]} {' '.join(missing)}",
        stanza,
        count=1,
        flags=re.MULTILINE | re.IGNORECASE,
    )


def _find_keys(options: str | None) -> str | None:
    """Return the value of `signed-by` in a one-line entry's options."""
    values = (option.partition("=") for option in (options or "").split())
    return next((value for name, _, value in values if name.lower() == "signed-by"), None)


def _is_debian(suites: list[str], keys: str | None, codename: str) -> bool:
    """Return whether the suites are Debian's own, by their names and keys; None for apt's default keys."""
    own = {f"{name}{part}" for name in (codename, "stable") for part in ("", "-updates", "-security")}
    return bool(suites) and own.issuperset(suites) and (keys is None or _DEBIAN_KEYS in keys)


def _find_missing(components: list[str]) -> list[str]:
    # Without `main` it is not an entry that a driver's package could come from.
    return [name for name in DRIVER_COMPONENTS if name not in components] if "main" in components else []
