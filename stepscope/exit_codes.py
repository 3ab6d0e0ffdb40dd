"""Exit codes of every `stepscope` command; scripts and CI may rely on them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a command's exit status says."""

    OK = 0
    """Done, and nothing touches the figures."""
    FAILED = 1
    """Could not: the message says what, where and what to do."""
    USAGE = 2
    """Wrong usage: an unknown option, a bad value, a layout that cannot be."""
    TOUCHED = 3
    """Done, but the health report touches figures (`analyze`, `import`, `doctor` only)."""
    SLOWER = 4
    """`compare --fail-if-slower`: slower beyond the noise band."""
    UNDECIDED = 5
    """`compare --fail-if-slower`: the noise is too wide to tell."""
