"""Which variables the code of a cell uses, found without running it."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import symtable
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: Instructions that need a global variable, in all supported versions of Python.
_USES = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_NAME", "DELETE_GLOBAL")


def find_used_names(body: str) -> frozenset[str]:
    """Return the global names that a cell needs before it gives them a value itself.

    Names in strings that the cell evaluates are not found.

    Raises:
        SyntaxError: The cell is not Python.
    """
    used: set[str] = set()
    _visit(ast.parse(body).body, set(), used)
    return frozenset(used)


def find_bound_names(body: str) -> frozenset[str]:
    """Return the global names that a cell gives a value.

    Raises:
        SyntaxError: The cell is not Python.
    """
    table = symtable.symtable(body, "<cell>", "exec")
    return frozenset(_iter_bound_names(table))


def find_imports(body: str) -> tuple[str, ...]:
    """Return the submodules that the `import a.b` statements of a cell name.

    Raises:
        SyntaxError: The cell is not Python.
    """
    imports = (node for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Import))
    return tuple(alias.name for node in imports for alias in node.names if "." in alias.name)


def find_submodules(body: str, namespace: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the imported submodules that a cell reaches through a module, such as `xml.dom` by `xml.dom.Node`.

    Raises:
        SyntaxError: The cell is not Python.
    """
    paths = (node for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Attribute))
    return tuple(name for node in paths if (name := _find_module_name(node, namespace)) in sys.modules)


def _find_module_name(node: ast.expr, namespace: Mapping[str, Any]) -> str:
    """Return the full name that `module.a.b` would have as a module; empty if it does not begin with a module."""
    match node:
        case ast.Name() if isinstance(module := namespace.get(node.id), types.ModuleType):
            return module.__name__
        case ast.Attribute() if above := _find_module_name(node.value, namespace):
            return f"{above}.{node.attr}"
    return ""


def find_function_names(value: Any, namespace: dict[str, Any]) -> frozenset[str]:
    """Return the global names of `namespace` that a function, or the methods of a class, use.

    Functions within decorators, closures and partial calls are followed.
    """
    found: set[str] = set()
    # Kept, so that their ids stay unique.
    seen: dict[int, Any] = {}
    pending = [value]
    if isinstance(value, type):
        pending = list(vars(value).values())
        found |= {base.__name__ for base in value.__bases__ if namespace.get(base.__name__) is base}
    while pending:
        part = pending.pop()
        if id(part) not in seen:
            seen[id(part)] = part
            if _is_function(part) and part.__globals__ is namespace:
                found.update(_iter_code_names(part.__code__))
            pending += _iter_inner_functions(part)
    return frozenset(found)


def find_all_names(used: Iterable[str], namespace: dict[str, Any]) -> frozenset[str]:
    """Return those of `used` that the namespace has, and the names that its functions and classes use in turn."""
    found: set[str] = set()
    pending = [name for name in used if name in namespace]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            value = namespace[name]
            needs = find_function_names(value, namespace)
            if not needs and not isinstance(value, type) and namespace.get(type(value).__name__) is type(value):
                # An object of a class of the notebook: its methods need the same as the class.
                needs = frozenset({type(value).__name__})
            pending += [other for other in needs if other in namespace]
    return frozenset(found)


def select_variables(names: Iterable[str], hidden: Mapping[str, Any]) -> frozenset[str]:
    """Return those of `names` that are a person's: not what IPython itself has put there."""
    return frozenset(name for name in names if name not in hidden and name.strip("_") and not name.startswith("__"))


def _iter_bound_names(table: symtable.SymbolTable) -> Iterator[str]:
    is_module = table.get_type() == "module"
    for symbol in table.get_symbols():
        if (symbol.is_assigned() or symbol.is_imported()) and (is_module or symbol.is_declared_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _iter_bound_names(child)


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType)


def _iter_inner_functions(value: Any) -> Iterator[Any]:
    """Return the functions that a call of `value` may call, and other values."""
    match value:
        case types.FunctionType():
            for cell in value.__closure__ or ():
                # An empty cell raises.
                with contextlib.suppress(ValueError):
                    yield cell.cell_contents
        case types.MethodType() | classmethod() | staticmethod():
            yield value.__func__
        case property():
            yield from (value.fget, value.fset)
        case functools.partial() | functools.cached_property():
            yield value.func
    # Not getattr, which runs code of an object's class.
    yield inspect.getattr_static(value, "__wrapped__", None)


def _visit(statements: Iterable[ast.stmt], bound: set[str], used: set[str]) -> None:
    """Add to `used` what the statements need, and to `bound` what they have surely given a value."""
    for statement in statements:
        match statement:
            case ast.With() | ast.AsyncWith():
                for item in statement.items:
                    used |= _names_of(ast.Expr(item.context_expr)) - bound
                    bound |= _bound_names([item.optional_vars])
                _visit(statement.body, bound, used)
            case ast.For() | ast.AsyncFor():
                used |= _names_of(ast.Expr(statement.iter)) - bound
                # The loop may run no time at all, so that what follows it does not know these names.
                _visit(statement.body, bound | _bound_names([statement.target]), used)
                _visit(statement.orelse, set(bound), used)
            case ast.While():
                used |= _names_of(ast.Expr(statement.test)) - bound
                _visit(statement.body, set(bound), used)
                _visit(statement.orelse, set(bound), used)
            case ast.If():
                used |= _names_of(ast.Expr(statement.test)) - bound
                branches = [set(bound), set(bound)]
                _visit(statement.body, branches[0], used)
                _visit(statement.orelse, branches[1], used)
                bound |= branches[0] & branches[1]
            case _:
                used |= _names_of(statement) - bound
                bound |= _bound_by(statement)


def _bound_by(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.Assign():
            return _bound_names(statement.targets)
        case ast.AnnAssign(value=ast.expr()):
            return _bound_names([statement.target])
        case ast.Import() | ast.ImportFrom():
            return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {statement.name}
    return set()


def _bound_names(targets: Iterable[ast.expr | None]) -> set[str]:
    """Return the names among assigned targets, those in tuples and lists included."""
    names: set[str] = set()
    for target in targets:
        match target:
            case ast.Name():
                names.add(target.id)
            case ast.Tuple() | ast.List():
                names |= _bound_names(target.elts)
            case ast.Starred():
                names |= _bound_names([target.value])
    return names


def _names_of(statement: ast.stmt) -> set[str]:
    module = ast.fix_missing_locations(ast.Module(body=[statement], type_ignores=[]))
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return set(_iter_code_names(compile(module, "<cell>", "exec", flags, dont_inherit=True)))


def _iter_code_names(code: types.CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in _USES:
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _iter_code_names(constant)
