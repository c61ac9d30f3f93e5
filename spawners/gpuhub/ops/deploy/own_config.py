"""An administrator's own JupyterHub configuration: `jupyterhub_config.d/*.py`, read last and in the order of names."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from traitlets.config import LazyConfigValue

from gpuhub.common.errors import SettingsError
from gpuhub.docker.containers.security import refuse_gpu_variables
from gpuhub.login import traits as login_traits
from gpuhub.spawners import traits
from gpuhub.spawners.docker.extra_host_config import check_host_config

FOLDER = "jupyterhub_config.d"
#: Lists below c.JupyterHub that gpuhub needs its entries in; of dictionaries, those with other names stay as they are.
_LISTS = ("services", "load_roles", "extra_handlers", "template_paths")
_TABLES = ("custom_scopes", "template_vars")


def list_files(hub_config: Path) -> list[Path]:
    """Return the files next to jupyterhub_config.py, in the order in which they are read."""
    return sorted(path for path in (hub_config.parent / FOLDER).glob("*.py") if path.is_file())


def check_syntax(hub_config: Path) -> None:
    """Check that each file is valid Python, without running it.

    Raises:
        SettingsError: One is not; the text names file and line.
    """
    for file in list_files(hub_config):
        _compile(file)


def read(config: Any, hub_config: Path, *, spawner: type[Any], authenticator: type[Any]) -> None:
    """Run each file on JupyterHub's configuration, and check what it sets for notebooks and logins.

    Services, roles, scopes, handlers, templates and variables of gpuhub stay, also where a file replaces the list.

    Args:
        config: The configuration as jupyterhub_config.py has it.
        spawner: The class that starts notebooks.
        authenticator: The class that logs users in.

    Raises:
        SettingsError: A file fails, or sets what has no effect; the text names it.
    """
    hub = config.JupyterHub
    lists = {name: list(hub[name]) for name in _LISTS if name in hub}
    tables = {name: dict(hub[name]) for name in _TABLES if name in hub}
    environment = dict(config.Spawner.get("environment", {}))
    classes = {name: hub[name] for name in ("spawner_class", "authenticator_class")}
    for file in list_files(hub_config):
        before = {section: {name: _copy(value) for name, value in values.items()} for section, values in config.items()}
        _run(file, config)
        changed = _list_changes(before, config)
        if hub.spawner_class != classes["spawner_class"]:
            _check_class(file, "spawner_class", hub.spawner_class, spawner, "GPUs come from leases alone")
        if hub.authenticator_class != classes["authenticator_class"]:
            reason = "[users] in cluster.toml decides who may log in"
            _check_class(file, "authenticator_class", hub.authenticator_class, authenticator, reason)
        mistakes = login_traits.list_mistakes(authenticator, changed, config)
        _check(file, changed, spawner, own_variables=environment, mistakes=mistakes)
    for name, entries in lists.items():
        hub[name] = _restore(name, entries, list(hub[name]))
    for name, table in tables.items():
        hub[name] = {**table, **hub[name]}
    for section in (kind.__name__ for kind in spawner.__mro__):
        if section in config and isinstance(values := config[section].get("environment"), dict):
            config[section].environment = {**environment, **values}


def _compile(file: Path) -> Any:
    try:
        return compile(file.read_bytes(), str(file), "exec")
    except (SyntaxError, ValueError) as error:
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) else ""
        raise SettingsError(f"{file}: {line}{error}") from error


def _run(file: Path, config: Any) -> None:
    code = _compile(file)
    try:
        exec(code, {"c": config, "get_config": lambda: config, "__file__": str(file), "__name__": file.stem})  # noqa: S102
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        raise SettingsError(f"{file}: line {lines[-1] if lines else '?'}: {type(error).__name__}: {error}") from error


def _copy(value: Any) -> Any:
    """Return a value that stays as it is when a file changes the original."""
    return value.copy() if type(value) in (dict, set, list) else value


def _list_changes(before: Mapping[str, Mapping[str, Any]], config: Any) -> dict[str, dict[str, Any]]:
    changes: dict[str, dict[str, Any]] = {}
    for section, values in config.items():
        known = before.get(section, {})
        changed = {name: value for name, value in values.items() if name not in known or known[name] != value}
        if changed:
            changes[section] = changed
    return changes


def _check(
    file: Path,
    changes: Mapping[str, Mapping[str, Any]],
    spawner: type[Any],
    *,
    own_variables: Collection[str],
    mistakes: Iterable[str],
) -> None:
    mistakes = [*mistakes, *traits.list_mistakes(spawner, changes)]
    for section, values in changes.items():
        try:
            variables = _read_dict(values.get("environment")).keys() - own_variables
            refuse_gpu_variables(dict.fromkeys(variables, ""))
            mistakes += [
                f"c.{section}.environment: gpuhub sets {name} itself"
                for name in traits.list_refused_variables(variables)
            ]
            check_host_config(_read_dict(values.get("extra_host_config")))
        except SettingsError as error:
            mistakes.append(f"c.{section}: {error}")
    if mistakes:
        raise SettingsError("\n".join(f"{file}: {mistake}" for mistake in mistakes))


def _read_dict(value: object) -> dict[str, Any]:
    """Return a dictionary, also one that was only updated; empty for a function, which is called at each start."""
    if isinstance(value, LazyConfigValue):
        value = value.to_dict().get("update", {})
    return dict(value) if isinstance(value, dict) else {}


def _check_class(file: Path, name: str, value: object, own: type[Any], reason: str) -> None:
    if not (isinstance(value, type) and issubclass(value, own)):
        raise SettingsError(f"{file}: c.JupyterHub.{name} must be {own.__name__} or a subclass of it, because {reason}")


def _restore(name: str, own: Iterable[Any], current: list[Any]) -> list[Any]:
    """Return a list with gpuhub's entries; of a role that a file defines again, both have effect."""
    if name == "template_paths":
        # The administrator's templates come first.
        return [*(entry for entry in current if entry not in own), *own]
    missing = []
    for entry in own:
        if entry in current:
            continue
        twin = next((other for other in current if _find_name(other) == _find_name(entry)), None)
        if twin is None:
            missing.append(entry)
        elif name == "load_roles":
            _unite(twin, entry)
        else:
            raise SettingsError(f"c.JupyterHub.{name}: {_find_name(entry)!r} is gpuhub's own: choose another name")
    return [*missing, *current]


def _find_name(entry: Any) -> Any:
    """Return what identifies an entry: the name of a service or role, the path of a handler."""
    return entry.get("name") if isinstance(entry, dict) else entry[0]


def _unite(role: dict[str, Any], own: Mapping[str, Any]) -> None:
    for key in ("scopes", "services", "users", "groups"):
        if key in own:
            role[key] = list(dict.fromkeys([*role.get(key, []), *own[key]]))
