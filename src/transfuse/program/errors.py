"""Why a forward has no program, or a program is not kept."""

from __future__ import annotations


class CaptureError(Exception):
    """A forward is not a straight line of operations on sizes that follow from the step's; the message says where.

    It does not reach users: the modules run one by one instead, and the message is the reason given.
    """


class StoreError(Exception):
    """A program cannot be kept on disk; the message says why. Nor does this one reach users."""
