"""Methods of other libraries that do something of ours beside their own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def wrap(owner: type, name: str, ours: Callable[..., Any]) -> None:
    """Makes ``owner.name(...)`` call ``ours(method, ...)`` with the method that was there. Once: not that of ours."""
    found = inspect.getattr_static(owner, name)
    of_class = isinstance(found, classmethod)
    method: Any = found.__func__ if of_class else found
    if hasattr(method, "htree_wraps"):
        return

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return ours(method, *args, **kwargs)

    wrapped.htree_wraps = method  # type: ignore[attr-defined]
    setattr(owner, name, classmethod(wrapped) if of_class else wrapped)
