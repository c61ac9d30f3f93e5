"""Values of parameters: what is taken, how it is written for the job, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_launch.cli.recipes import parameters
from gpu_launch.cli.recipes.parameters import Parameter, ParameterType
from gpu_launch.errors import UsageError

EPOCHS = Parameter(name="epochs", type=ParameterType.INTEGER, default="1", least=1, most=100)
RATE = Parameter(name="rate", type=ParameterType.NUMBER, default="0.001", least=1e-8)
METHOD = Parameter(name="method", type=ParameterType.CHOICE, choices=("lora", "full"), default="lora")
MERGE = Parameter(name="merge", type=ParameterType.FLAG, default="false")
DATA = Parameter(name="data", type=ParameterType.PATH)
ADAPTER = Parameter(name="adapter", type=ParameterType.PATH, default="")
MODEL = Parameter(name="model", type=ParameterType.MODEL)
NOTE = Parameter(name="note", default="")


@pytest.mark.parametrize(
    ("parameter", "text", "value"),
    [
        (EPOCHS, "3", "3"),
        (EPOCHS, "+07", "7"),
        (RATE, "1e-4", "1e-4"),
        (METHOD, "full", "full"),
        (MERGE, "Yes", "true"),
        (MERGE, "false", "false"),
        (DATA, "datasets/x", "~/datasets/x"),
        (DATA, "home:datasets/x/", "~/datasets/x"),
        (DATA, "~/datasets/x", "~/datasets/x"),
        (DATA, "/datasets/x", "/datasets/x"),
        (DATA, "my data; rm -rf $HOME", "~/my data; rm -rf $HOME"),
        (ADAPTER, "", ""),
        (MODEL, "models/tiny", "models/tiny"),
        (MODEL, "Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        (MODEL, "home:models/tiny", "~/models/tiny"),
        (MODEL, "/models/tiny", "/models/tiny"),
        (NOTE, "a=b 'c' \"d\" $e", "a=b 'c' \"d\" $e"),
    ],
)
def test_values_are_written_for_the_job(parameter: Parameter, text: str, value: str) -> None:
    """Numbers in one form, and paths below the home with a tilde."""
    assert parameter.parse(text) == value


@pytest.mark.parametrize(
    ("parameter", "text", "message"),
    [
        (EPOCHS, "0", "--set epochs='0': an integer from 1 to 100 is needed."),
        (EPOCHS, "101", "an integer from 1 to 100 is needed."),
        (EPOCHS, "1.5", "an integer from 1 to 100 is needed."),
        (EPOCHS, "", "an integer from 1 to 100 is needed."),
        (EPOCHS, "9" * 30, "an integer from 1 to 100 is needed."),
        (EPOCHS, "1_0", "an integer from 1 to 100 is needed."),
        (RATE, "nan", "a number of at least 1e-08 is needed."),
        (RATE, "inf", "a number of at least 1e-08 is needed."),
        (RATE, "fast", "a number of at least 1e-08 is needed."),
        (METHOD, "qlora", "one of lora, full is needed."),
        (MERGE, "1", "true or false is needed."),
        (DATA, "", "a path on the cluster is needed"),
        (DATA, "../ben/x", "a path on the cluster is needed"),
        (DATA, "~ben/x", "a path on the cluster is needed"),
        (DATA, "home:/etc", "a path on the cluster is needed"),
        (DATA, "~", "a path on the cluster is needed"),
        (MODEL, "", "a path on the cluster is needed"),
        (NOTE, "two\nlines", "one line of at most 4096 printable characters"),
        (NOTE, "x" * 5000, "one line of at most 4096 printable characters"),
    ],
)
def test_wrong_values_are_refused(parameter: Parameter, text: str, message: str) -> None:
    """With what would be right."""
    with pytest.raises(UsageError) as error:
        parameter.parse(text)
    assert message in str(error.value)
    assert len(str(error.value)) < 300


@given(st.text(max_size=60))
def test_paths_never_leave_home_by_dots(text: str) -> None:
    """Whatever is written, the value has no `..`, and is absolute or begins with `~/`."""
    try:
        value = DATA.parse(text)
    except UsageError:
        return
    assert ".." not in value.split("/")
    assert value.startswith(("/", "~/"))


def test_bounds_are_shown_as_they_are() -> None:
    """Large ones with all of their digits."""
    assert Parameter(name="a", type=ParameterType.INTEGER, least=8, most=2147483647).describe() == (
        "integer, 8 to 2147483647"
    )
    assert RATE.describe() == "number, at least 1e-08"


def test_defaults_and_last_words_count() -> None:
    values = parameters.parse_values((DATA, EPOCHS, METHOD), ["data=x", "epochs=2", "epochs=3"], recipe="r")
    assert values == {"data": "~/x", "epochs": "3", "method": "lora"}
    assert parameters.build_variables((DATA, EPOCHS), values) == {"RECIPE_DATA": "~/x", "RECIPE_EPOCHS": "3"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["data=x", "epoch=2"],
            "--set epoch: recipe:r has no such parameter. Did you mean epochs? It has data, epochs.",
        ),
        (["data=x", "memory=24G"], "--memory is an option of `gpu-launch run` itself"),
        (["data"], "--set data: NAME=VALUE is needed"),
        ([], "recipe:r needs --set data=PATH. `gpu-launch recipe show r` explains its parameters."),
    ],
)
def test_wrong_words_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        parameters.parse_values((DATA, EPOCHS), words, recipe="r", own=["memory"])
    assert message in str(error.value)
