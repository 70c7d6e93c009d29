"""Functions of a user's: whether they can be called as a protocol calls them."""

import inspect
from collections.abc import Callable
from typing import Any


def refuses(function: Callable[..., Any], *arguments: object) -> bool:
    """True if a function cannot be called with so many arguments. Of one written in C only its call tells."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return True
    except ValueError:
        return False
    return False


def mismatch(function: Callable[..., Any], *arguments: object, may_yield: bool = False) -> str | None:
    """The head of a function that cannot be called so, or whose call only makes a coroutine or a generator."""
    is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
    yields = inspect.isgeneratorfunction(function) and not may_yield
    if not (is_async or yields or refuses(function, *arguments)):
        return None
    head = f"`{'async ' * is_async}def {function.__name__}{inspect.signature(function)}`"
    return f"{head} with yield" if yields else head
