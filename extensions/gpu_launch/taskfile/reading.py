"""A task file as it is written: YAML, with the line of every key. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml  # type: ignore[import-untyped]

from gpu_launch.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Item:
    """One key of a mapping, with its value as YAML has it and its line from 1."""

    #: With those of the mappings around it: `resources.cpus`.
    key: str
    value: Any
    line: int
    #: The keys below, where the value is a mapping.
    items: tuple[Item, ...] = ()

    def refuse(self, text: str) -> UsageError:
        """An error about this key."""
        return UsageError(f"line {self.line}: {self.key} {text}")


def read(text: str) -> tuple[Item, ...]:
    """The keys of the file's one mapping. Raises UsageError with the line for anything else."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise UsageError("it is empty.")
        if not isinstance(node, yaml.MappingNode):
            raise UsageError("it is no task: a mapping such as `run: python train.py` is needed.")
        return tuple(_items(loader, node, ""))
    except yaml.composer.ComposerError as error:
        if "single document" in str(error):
            raise UsageError("it holds several tasks; give each a file of its own.") from None
        raise UsageError(_yaml_text(error)) from None
    except yaml.YAMLError as error:
        raise UsageError(_yaml_text(error)) from None
    except RecursionError:
        raise UsageError("it is nested too deeply.") from None
    finally:
        loader.dispose()


def _items(loader: yaml.SafeLoader, node: yaml.MappingNode, above: str) -> Iterator[Item]:
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        name = f"{above}{key}"
        below = tuple(_items(loader, value_node, f"{name}.")) if isinstance(value_node, yaml.MappingNode) else ()
        value = loader.construct_object(value_node, deep=True)
        yield Item(key=name, value=value, line=key_node.start_mark.line + 1, items=below)


def _yaml_text(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}: it is no YAML: {problem}." if mark is not None else f"it is no YAML: {problem}."
