"""Feature tests: whether a function of vLLM has learned what a patch does, told from the function itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any


def mentions(*names: str) -> Callable[[Callable[..., Any]], bool]:
    """Return the test whether a function uses all these names, as globals, attributes or methods."""

    def test(function: Callable[..., Any]) -> bool:
        code = getattr(inspect.unwrap(function), "__code__", None)
        return code is not None and set(names) <= _names(code)

    return test


def _names(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found
