"""Files of recipes: the head, and mistakes with their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpu_launch.recipes
from gpu_launch.cli.recipes.parameters import ParameterType
from gpu_launch.cli.recipes.recipe_file import Recipe, parse_recipe
from gpu_launch.errors import UsageError

SHIPPED = sorted((Path(gpu_launch.recipes.__file__).parent / "files").glob("*.yaml"))
LAB = """\
recipe:
  description: Trains the lab's
    segmentation network.
  parameters:
    data: {type: path, help: folder with scans}
    epochs: {type: integer, least: 1, most: 50, default: 3}
    rate: {type: number, least: 1e-8, default: 1e-3}
    loss: {type: choice, choices: [dice, focal], default: dice}
    debug: {type: flag, default: no}
    note: {default: ""}
num_nodes: 2
resources: {accelerators: RTX5090}
run: python /datasets/lab/train.py "$RECIPE_DATA"
"""


def _parse(text: str) -> Recipe:
    return parse_recipe(text, name="lab", origin="lab")


def test_head_has_description_and_parameters() -> None:
    """The rest is a task file like any other."""
    recipe = _parse(LAB)
    assert recipe.description == "Trains the lab's segmentation network."
    assert {each.name: (each.type, each.default) for each in recipe.parameters} == {
        "data": (ParameterType.PATH, None),
        "epochs": (ParameterType.INTEGER, "3"),
        "rate": (ParameterType.NUMBER, "1e-3"),
        "loss": (ParameterType.CHOICE, "dice"),
        "debug": (ParameterType.FLAG, "false"),
        "note": (ParameterType.TEXT, ""),
    }
    assert recipe.parameters[1].describe() == "integer, 1 to 50"
    assert recipe.parameters[3].describe() == "dice or focal"
    assert (recipe.task.nnodes, recipe.module) == (2, "")


def test_module_stands_instead_of_commands() -> None:
    recipe = _parse("recipe: {description: d, module: lab.train, arguments: [--x, 1, $RECIPE_A], parameters: {a: {}}}")
    assert (recipe.module, recipe.arguments) == ("lab.train", ("--x", "1", "$RECIPE_A"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_explain_themselves(path: Path) -> None:
    """Every parameter has a meaning, and reaches the program."""
    recipe = parse_recipe(path.read_text(), name=path.stem, origin="gpu-launch")
    assert all(parameter.help for parameter in recipe.parameters)
    assert {f"${parameter.variable}" for parameter in recipe.parameters} == {
        argument for argument in recipe.arguments if argument.startswith("$")
    }


def test_four_recipes_are_shipped() -> None:
    assert [path.stem for path in SHIPPED] == ["evaluate", "finetune", "serve", "sweep"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: x", "it has no head: a mapping `recipe:`"),
        ("recipe: finetune\nrun: x", "it has no head"),
        ("", "it has 0 documents; a recipe is one task."),
        ("recipe: {description: d}\nrun: x\n---\nrun: y", "it has 2 documents"),
        ("recipe: {}\nrun: x", "line 1: recipe needs a `description`."),
        ("recipe: {description: d}", "it has no `run` commands."),
        ("recipe: {description: d, modul: x}\nrun: x", "line 1: recipe.modul is not known; a recipe's head has"),
        ("recipe: {description: d, module: x}\nrun: x", "has a `module`, which replaces `run`"),
        ("recipe: {description: d, module: 'x; y'}", "recipe.module is the name of a Python module"),
        ("recipe: {description: d, arguments: [a]}\nrun: x", "has `arguments` without a `module`"),
        ("recipe: {description: d, module: x, arguments: [$RECIPE_B]}", "has the argument $RECIPE_B, and"),
        ("recipe: {description: d, module: x, single_gpu: 1}", "recipe.single_gpu is true or false."),
        ("recipe: {description: d}\nworkdir: .\nrun: x", "a recipe is not sent from one machine"),
        ("recipe: {description: d}\nrum: x", "line 2: rum is not known"),
        ("recipe: {description: d, parameters: [a]}\nrun: x", "recipe.parameters is a mapping of names"),
        (
            "recipe:\n  description: d\n  parameters:\n    A: {}\nrun: x",
            "line 4: recipe.parameters.A is not a parameter",
        ),
        ("recipe: {description: d, parameters: {parameters: {}}}\nrun: x", "and not name or parameters."),
        ("recipe: {description: d, parameters: {a: 1}}\nrun: x", "recipe.parameters.a is a mapping, such as"),
        ("recipe: {description: d, parameters: {a: {typ: x}}}\nrun: x", "a.typ is not known; a parameter has type"),
        ("recipe: {description: d, parameters: {a: {type: int}}}\nrun: x", "a.type is 'int'; one of text, integer"),
        ("recipe: {description: d, parameters: {a: {type: integer, least: x}}}\nrun: x", "a.least is 'x': a number"),
        ("recipe: {description: d, parameters: {a: {least: 1}}}\nrun: x", "has bounds, and is of the type text"),
        (
            "recipe: {description: d, parameters: {a: {type: integer, least: 2, most: 1}}}\nrun: x",
            "has `least` 2 above `most` 1.",
        ),
        ("recipe: {description: d, parameters: {a: {type: choice}}}\nrun: x", "`type: choice` or `choices` without"),
        (
            "recipe: {description: d, parameters: {a: {type: integer, most: 5, default: 9}}}\nrun: x",
            "a.default is not a value of the parameter: --set a='9': an integer of at most 5 is needed.",
        ),
        ("recipe: {description: d, parameters: {a: {default: [1]}}}\nrun: x", "a.default is a text, a number"),
        ("recipe: {description: [", "it is not YAML"),
        ("#" * 70_000, "it has 70000 characters; a recipe has at most 65536."),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    """With the line, and what would be right."""
    with pytest.raises(UsageError) as error:
        _parse(text)
    assert message in str(error.value)
