"""Whether a package defines a name, told from its source: importing vLLM takes ten seconds, reading it a moment."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path


def lacks(places: Iterable[str]) -> dict[str, str]:
    """Return, by place (`module:path`), why it is not to be found; '' when it is, or when only importing could tell."""
    try:
        return {where: _lacks(where) for where in places}
    finally:
        _parse.cache_clear()  # syntax trees of large files


def _lacks(where: str) -> str:
    module, _, path = where.partition(":")
    tree = _parse(module)
    if tree is None:
        return "" if _is_compiled(module) else f"there is no module {module}"
    return "" if _defines(module, path.split(".")) else f"{module} has no {path}"


def _defines(module: str, path: list[str]) -> bool:
    tree = _parse(module)
    if tree is None:
        return True  # outside of what can be read
    name, *rest = path
    answers = (_answer(module, statement, name, rest) for statement in _statements(tree.body))
    found = next((answer for answer in answers if answer is not None), None)
    if found is None and any(_binds(statement, "__getattr__") for statement in _statements(tree.body)):
        return True  # names are made when they are asked for
    return (_parse(f"{module}.{name}") is not None and not rest) if found is None else found


def _answer(module: str, statement: ast.stmt, name: str, rest: list[str]) -> bool | None:
    """Return whether a statement of a module defines the name with what is wanted of it; None: not this name."""
    if isinstance(statement, ast.ClassDef) and statement.name == name:
        return not rest or _has(module, statement, rest[0])
    if _binds(statement, name):
        return not rest
    if isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            if alias.name == "*":
                return True
            if name == (alias.asname or alias.name):
                return not rest or _defines(_absolute(module, statement), [alias.name, *rest])
    return None


def _binds(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return statement.name == name
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return any(isinstance(target, ast.Name) and target.id == name for target in targets)
    return isinstance(statement, ast.Import) and any(
        name == (alias.asname or alias.name).partition(".")[0] for alias in statement.names
    )


def _has(module: str, owner: ast.ClassDef, name: str) -> bool:
    """Return whether a class or one of its bases has the attribute; bases that cannot be read count as having it."""
    if any(_binds(statement, name) for statement in _statements(owner.body)):
        return True
    bases = [base for base in owner.bases if not (isinstance(base, ast.Name) and base.id in {"object", "ABC"})]
    return any(not isinstance(base, ast.Name) or _defines(module, [base.id, name]) for base in bases)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module or class, and those under its conditions."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If):
            yield from _statements([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            handlers = [line for handler in statement.handlers for line in handler.body]
            yield from _statements([*statement.body, *handlers, *statement.orelse])


def _absolute(module: str, statement: ast.ImportFrom) -> str:
    if not statement.level:
        return statement.module or ""
    parents = module.split(".")
    drop = statement.level - (1 if _path(module).endswith("__init__.py") else 0)
    return ".".join([*parents[: len(parents) - drop], *([statement.module] if statement.module else [])])


@functools.cache
def _path(module: str) -> str:
    """Return the source file of a module, '' when there is none. Imports nothing."""
    package, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return ""
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        base = Path(folder, *rest)
        for path in (base / "__init__.py", base.with_name(base.name + ".py")):
            if path.is_file():
                return str(path)
    return ""


@functools.cache
def _parse(module: str) -> ast.Module | None:
    path = _path(module)
    try:
        return ast.parse(Path(path).read_text()) if path else None
    except (OSError, ValueError, SyntaxError):
        return None


def _is_compiled(module: str) -> bool:
    package, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return any(list(Path(folder, *rest[:-1]).glob(f"{rest[-1]}.*so")) for folder in folders if rest)
