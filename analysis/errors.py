"""The one exception that a user may see: it says what is wrong, where, and what to do."""

from __future__ import annotations


class StepscopeError(Exception):
    """A problem with the input that a person can act on; commands print its text and exit with 1."""
