"""Files and models that a recipe's parameters name, as far as this machine sees them."""

from __future__ import annotations

import os
from pathlib import Path

from gpu_launch.cli.context import Context
from gpu_launch.cli.recipes.parameters import Parameter, ParameterType
from gpu_launch.errors import BrokerError, UsageError
from gpu_launch.serving import model_names
from gpu_launch.serving.model_files import CONFIG

_BELOW_HOME = "~/"
_NOT_FOUND = 404


def check_value(context: Context, parameter: Parameter, value: str) -> str:
    """Return a value that names a file or a model, after checking that it exists; other values as they are.

    A laptop sees the home on the cluster, and not its shared folders: those are checked when the job starts.

    Raises:
        UsageError: There is no such file or model.
        BrokerError: The home cannot be read.
    """
    if parameter.type is ParameterType.PATH and value:
        _check_path(context, parameter, value)
    elif parameter.type is ParameterType.MODEL:
        return _find_model(context, parameter, value)
    return value


def _check_path(context: Context, parameter: Parameter, value: str) -> None:
    if value.startswith(_BELOW_HOME):
        path = value.removeprefix(_BELOW_HOME)
        if not _exists_at_home(context, path):
            raise UsageError(
                f"--set {parameter.name}={path}: there is no {path} in your home on the cluster. Copy it there with "
                f"`gpu-launch cp FOLDER home:{path}`, or name a folder such as /datasets/x."
            )
    elif _is_on_cluster(context) and not Path(value).exists():
        raise UsageError(f"--set {parameter.name}={value}: there is no such file or folder.")


def _find_model(context: Context, parameter: Parameter, value: str) -> str:
    """Return `~/PATH`, an absolute path, or the name of a shared model."""
    home = Path.home()
    if _is_on_cluster(context):
        try:
            folder = model_names.find_folder(value, cwd=home, environ=os.environ, home=home)
        except UsageError as error:
            raise UsageError(f"--set {parameter.name}={error}") from None
        model_names.check_shared(folder, environ=os.environ, home=home)
        return str(folder)
    path = value.removeprefix(_BELOW_HOME)
    if not value.startswith("/") and _exists_at_home(context, f"{path}/{CONFIG}"):
        return f"{_BELOW_HOME}{path}"
    if value.startswith(_BELOW_HOME):
        raise UsageError(
            f"--set {parameter.name}={path}: this folder of your home on the cluster has no {CONFIG}, so it has no "
            "model. Name a folder with one, or a shared model such as Qwen/Qwen3-8B."
        )
    context.console.print_note(f"gpu-launch: {value} is not in your home; whether the cluster has it shows in the job")
    return value


def _is_on_cluster(context: Context) -> bool:
    """Return whether this is a notebook's terminal, which has the home and the shared folders."""
    return not context.hub.url


def _exists_at_home(context: Context, path: str) -> bool:
    if _is_on_cluster(context):
        return (Path.home() / path).exists()
    try:
        context.transfer.get(path).close()
    except BrokerError as error:
        if error.status == _NOT_FOUND:
            return False
        raise
    return True
