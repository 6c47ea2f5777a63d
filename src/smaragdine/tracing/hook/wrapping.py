"""Put our code around methods of the program's classes.

Apart from `install`: it needs functools, which an interpreter does not load by itself.
"""

import functools
import sys

from . import marks


def around(owner, name, before=None, after=None, source="hook"):
    """Call `before(self, args, kwargs)` and `after(self, args, kwargs)` around a method."""

    def make(original):
        @functools.wraps(original)
        def wrapper(self, *args, **kwargs):
            if before is not None:
                try:
                    before(self, args, kwargs)
                except Exception as exception:
                    marks.error(source, exception)
            result = original(self, *args, **kwargs)
            if after is not None:
                try:
                    after(self, args, kwargs)
                except Exception as exception:
                    marks.error(source, exception)
            return result

        return wrapper

    replace(owner, name, make)


def replace(owner, name, make):
    """Set `owner.name` to `make(original)`, unless it is ours already or `owner` does not define it."""
    original = vars(owner).get(name)
    if callable(original) and not getattr(original, "_smaragdine_hook", False):
        wrapper = make(original)
        wrapper._smaragdine_hook = True
        setattr(owner, name, wrapper)


def argument(args, kwargs, position, name, default=None):
    return args[position] if len(args) > position else kwargs.get(name, default)


def failing():
    """The name of the exception being handled."""
    return sys.exc_info()[0].__name__
