"""Several calls at a time, in the caller's context."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context


def each[A, B](call: Callable[[A], B], items: Iterable[A], threads: int) -> list[B]:
    """The results of `call` for each of `items`, in order, from `threads` threads in the context of this one. With one
    thread, or one item, it is this one. The first failure is raised; calls that have not begun by then are dropped."""
    given = list(items)
    if threads == 1 or len(given) < 2:
        return [call(item) for item in given]
    # only one thread at a time can enter a context, so each call has a copy
    contexts = [copy_context() for _ in given]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda context, item: context.run(call, item), contexts, given))
