"""Several things at a time, counted as the caller's."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context


def each[A, B](call: Callable[[A], B], items: Iterable[A], threads: int) -> list[B]:
    """The results of `call` for each of `items`, in order, from that many threads in the context of this one.

    One thread is this one. The first failure is raised; what had not begun by then is not begun.
    """
    given = list(items)
    if threads == 1:
        return [call(item) for item in given]
    # a context can be entered by one thread at a time, so each call has a copy
    contexts = [copy_context() for _ in given]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda context, item: context.run(call, item), contexts, given))
