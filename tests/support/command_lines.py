"""Command lines as click reads them: nothing is run."""

from __future__ import annotations

from collections.abc import Sequence

import click

from gpu_launch.cli.context import Context


def parse(command: click.Command, words: Sequence[str]) -> None:
    """Parse the words after a command's name.

    Raises:
        click.UsageError: The command, or one below it, does not accept them.
    """
    context, rest = command.make_context(command.name, list(words), obj=Context()), list(words)
    while isinstance(command, click.Group):
        _, below, rest = command.resolve_command(context, rest)
        assert below is not None
        command = below
        # An option that ends a program, such as --help, does so by an exception.
        with context.scope(cleanup=False):
            context = command.make_context(command.name, list(rest), parent=context)
