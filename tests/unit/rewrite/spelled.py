"""Methods in spellings that can be rewritten, and in some that cannot."""

# Written as the author of a model would.
# ruff: noqa: ANN001, ANN201, ANN202, ANN002, ANN003, ANN204

from __future__ import annotations

import contextlib
import functools
import sys


def plain_decorator(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return ("wrapped", function(*args, **kwargs))

    return wrapper


def with_arguments(prefix):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(self, *args, **kwargs):
            return (prefix, function(self, *args, **kwargs))

        return wrapper

    return decorate


def knows_itself(function):
    @functools.wraps(function)
    def wrapper(self, *args):
        return (wrapper is type(self).method, function(self, *args))

    return wrapper


def in_several_ways(function):
    def other(*args):
        return function(*args)

    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) if args[1] else other(*args)

    return wrapper


def by_attribute(function):
    @functools.wraps(function)
    def wrapper(*args):
        return wrapper.__wrapped__(*args)

    return wrapper


class Callable:
    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function = function


def make(captured):
    def method(self, x):
        return x + captured

    return method


OFFSET = 5


class Good:
    DEFAULT = 3

    def simple(self, x):
        return x * 2

    def defaults(self, x, y=DEFAULT, *, z=[DEFAULT]):  # noqa: B006
        return x * 2 + y + len(z)

    def annotated(self, x: NotDefined = None) -> AlsoNot:  # noqa: F821
        return x * 2

    @plain_decorator
    def decorated(self, x):
        return x * 2

    @with_arguments("a")
    @plain_decorator
    @with_arguments("b")
    def decorated_often(self, x):
        return x * 2

    @contextlib.contextmanager
    def _context(self):
        yield

    def global_names(self, x):
        return x * 2 + OFFSET

    def with_docstring(self, x):
        """Says what it does."""
        return x * 2


class KnowsItself:
    @knows_itself
    def method(self, x):
        return x * 2


class Bad(Good):
    def uses_super(self, x):
        return super().simple(x)

    def mangled(self, x):
        return self.__hidden(x)

    def generator(self, x):
        yield x

    async def coroutine(self, x):
        return x

    def own_variables(self, x):
        return locals()["x"]

    def frames(self, x):
        return sys._getframe().f_locals

    a_lambda = lambda self, x: x  # noqa: E731
    closure = make(2)
    built_in = len

    @in_several_ways
    def several_ways(self, x):
        return x

    @by_attribute
    def attribute(self, x):
        return x

    @Callable
    def in_an_object(self, x):
        return x
