"""The YAML of task files: keys with their values and lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml  # type: ignore[import-untyped]

from gpu_launch.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class YamlItem:
    """A key of a mapping, with its parsed value and its line from 1."""

    #: Includes the keys of the mappings around it: `resources.cpus`.
    key: str
    value: Any
    line: int
    #: The items below, if the value is a mapping; one for each mapping of a list, whose items have keys as if the
    #: mapping stood in the list's place: `resources.cpus` within `resources.any_of`.
    items: tuple[YamlItem, ...] = ()

    def build_error(self, text: str) -> UsageError:
        """Return an error about this key."""
        return UsageError(f"line {self.line}: {self.key} {text}")


def parse_documents(text: str) -> tuple[tuple[YamlItem, ...], ...]:
    """Return the keys of each document of the file; empty documents are left out.

    Raises:
        UsageError: The file has another format; the text names the line.
    """
    loader = yaml.SafeLoader(text)
    documents = []
    try:
        while loader.check_node():
            node = loader.get_node()
            if isinstance(node, yaml.ScalarNode) and not node.value:
                continue
            if not isinstance(node, yaml.MappingNode):
                raise UsageError("it is not a task: a mapping such as `run: python train.py` is needed.")
            documents.append(tuple(_iter_items(loader, node, "")))
    except yaml.YAMLError as error:
        raise UsageError(_format_yaml_error(error)) from None
    except RecursionError:
        raise UsageError("it is nested too deeply.") from None
    finally:
        loader.dispose()
    return tuple(documents)


def _iter_items(loader: yaml.SafeLoader, node: yaml.MappingNode, above: str) -> Iterator[YamlItem]:
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        name = f"{above}{key}"
        sub_items: tuple[YamlItem, ...] = ()
        if isinstance(value_node, yaml.MappingNode):
            sub_items = tuple(_iter_items(loader, value_node, f"{name}."))
        elif isinstance(value_node, yaml.SequenceNode):
            sub_items = tuple(_iter_elements(loader, value_node, name, above))
        value = loader.construct_object(value_node, deep=True)
        yield YamlItem(key=name, value=value, line=key_node.start_mark.line + 1, items=sub_items)


def _iter_elements(loader: yaml.SafeLoader, node: yaml.SequenceNode, name: str, above: str) -> Iterator[YamlItem]:
    for element in node.value:
        if isinstance(element, yaml.MappingNode):
            sub_items = tuple(_iter_items(loader, element, above))
            value = loader.construct_object(element, deep=True)
            yield YamlItem(key=name, value=value, line=element.start_mark.line + 1, items=sub_items)


def _format_yaml_error(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    return f"line {mark.line + 1}: it is not YAML: {problem}." if mark is not None else f"it is not YAML: {problem}."
