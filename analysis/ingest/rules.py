"""What counts as what: one versioned rule table (rules.toml), extendable by the user, applied to distinct names only."""

from __future__ import annotations

import fnmatch
import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import tomllib

from stepscope.analysis.errors import StepscopeError
from stepscope.tracer.schema import AXES, COLLECTIVES, MAX_RANKS, code_of

BUILT_IN = "built-in rules"
"""What a store calls them among its sources."""

_TABLES = {
    "categories": ("kernel", "memcpy", "wait", "launch"),
    "communication": ("names", "fused", "host", "except"),
    "collectives": COLLECTIVES,
    "axes": AXES,
    "steps": ("names",),
    "ranks": (),  # any file name
}


_STEP = re.compile(r"([A-Za-z][A-Za-z _:#=./\[(-]*?)[ _:#=./\[(-]*(\d{1,18})?[ _:.)\]]*\Z")
"""Words, separators and at most one number, at the end."""

_LONGEST_STEP = 80  # characters of a step's name: no longer text is tried


@dataclass(frozen=True)
class Rules:
    """The compiled table; every question is about one distinct string, so answers are cheap to cache."""

    version: int
    _categories: dict[str, str]
    _communication: re.Pattern[str]
    _fused: re.Pattern[str]
    _host: re.Pattern[str]
    _except: re.Pattern[str]
    _collectives: dict[str, int]
    _axes: tuple[tuple[re.Pattern[str], int], ...]
    _steps: frozenset[str]
    _ranks: tuple[tuple[str, int], ...]

    def category(self, cat: str) -> str:
        """kernel | memcpy | wait | launch | host for a row's category."""
        return self._categories.get(cat.lower(), "host")

    def communication(self, name: str) -> bool:
        """Is a kernel of this name a communication?"""
        names = _candidates(name)
        if any(self._except.match(part) for part in names):
            return False
        return self.fused(name) or any(self._communication.match(part) for part in names)

    def fused(self, name: str) -> bool:
        """Does a kernel of this name compute and communicate?"""
        return any(self._fused.match(part) for part in _candidates(name))

    def host_communication(self, name: str) -> bool:
        """Is an annotation of this name the communication of a rank without device rows?"""
        return bool(self._host.match(name.lower()))

    def collective(self, name: str) -> int:
        """Code of a collective by whatever name its writer gave it (`_allgather_base`, `nccl:all_to_all`), or -1."""
        return self._collectives.get(re.sub("[^a-z]", "", name.lower().rpartition(":")[2]), -1)

    def axis(self, description: str) -> int:
        """Code of the mesh axis that a process group's description names, or -1."""
        text = description.lower()
        return next((axis for pattern, axis in self._axes if pattern.match(text)), -1)

    def step(self, name: str) -> tuple[str, int] | None:
        """(the words, the number) of a range that is a step, -1 without a number; None for any other name.

        `step 12`, `Train_Step::12`, `iter_0012` and `iteration=12` are step 12, `train_step` is a step that is counted.
        """
        found = _STEP.match(name) if len(name) <= _LONGEST_STEP else None
        if found is None:
            return None
        words = " ".join(re.findall("[a-z]+", found.group(1).lower()))
        return (words, int(found.group(2) or -1)) if words in self._steps else None

    def rank(self, file: str) -> int | None:
        """The rank that the user gave a file of this name, or None."""
        return next((rank for glob, rank in self._ranks if fnmatch.fnmatch(file, glob)), None)


def collective_of_kernel(name: str) -> int:
    """The collective that an NCCL kernel's own name gives (`ncclDevKernel_AllReduce_...`); -1 for SendRecv and Generic."""
    found = re.match(r"(?:nccl|rccl)(?:Dev)?Kernel_([A-Za-z]+)", name)
    words = {"AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter"}
    words |= {"Broadcast": "broadcast", "Reduce": "reduce", "AllToAll": "all_to_all"}
    return code_of(COLLECTIVES, words.get(found.group(1), "")) if found else -1


def load_rules(user_file: str | None = None) -> Rules:
    """The built-in rules, with those of a user's TOML file in front. StepscopeError names what is wrong in it."""
    return _loaded(user_file, _state(user_file) if user_file is not None else None)


def _state(path: str) -> tuple[int, int] | None:
    """What changes when the file does; None where there is none."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


@lru_cache(maxsize=8)
def _loaded(user_file: str | None, state: tuple[int, int] | None) -> Rules:
    table = tomllib.loads(resources.files(__package__).joinpath("rules.toml").read_text(encoding="utf-8"))
    if user_file is not None:
        table = _merged(_user_table(user_file), table)
    collectives = {word: code_of(COLLECTIVES, ours) for ours, words in table["collectives"].items() for word in words}
    axes = tuple((_globs(globs), code_of(AXES, axis)) for axis, globs in table["axes"].items())
    categories = {word.lower(): kind for kind, words in table["categories"].items() for word in words}
    communication = table["communication"]
    return Rules(
        int(table["version"]),
        categories,
        _globs(communication["names"]),
        _globs(communication["fused"]),
        _globs(communication["host"]),
        _globs(communication["except"]),
        collectives,
        axes,
        frozenset(" ".join(re.findall("[a-z]+", name.lower())) for name in table["steps"]["names"]),
        tuple(table["ranks"].items()),
    )


def built_in_digest() -> str:
    """What tells one edition of the built-in rules from another: a store made by others is out of date."""
    return hashlib.sha256(resources.files(__package__).joinpath("rules.toml").read_bytes()).hexdigest()[:16]


def _user_table(path: str) -> dict[str, Any]:
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise StepscopeError(f"cannot read the rules in {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StepscopeError(f"{path} is no valid TOML: {error}") from error
    for section, content in table.items():
        if section == "version":
            continue
        if section == "ranks" and isinstance(content, dict):
            if not all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in content.values()):
                raise StepscopeError(f"{path}: [ranks] must give whole numbers from 0 to {MAX_RANKS - 1} to file names")
            continue
        known = _TABLES.get(section)
        if known is None or not isinstance(content, dict):
            raise StepscopeError(f"{path}: there is no table [{section}]: write one of {', '.join(_TABLES)}")
        for key, words in content.items():
            if key not in known:
                raise StepscopeError(f"{path}: [{section}] has no {key!r}: write one of {', '.join(known)}")
            if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                raise StepscopeError(f"{path}: [{section}] {key} must be a list of strings")
    return table


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """`first` in front: its tables keep their order, so that its globs are tried before the built-in ones."""
    merged: dict[str, Any] = {"version": second["version"]}
    for section in _TABLES:
        ours, theirs = second[section], first.get(section, {})
        if section == "ranks":
            merged[section] = theirs
            continue
        merged[section] = {**{key: list(words) for key, words in theirs.items()}}
        for key, words in ours.items():
            # an axis that both name is tried at the user's place, with both lists
            merged[section].setdefault(key, []).extend(words)
    taken = {word for words in first.get("categories", {}).values() for word in words}
    for kind, words in merged["categories"].items():
        if kind not in first.get("categories", {}):
            merged["categories"][kind] = [word for word in words if word not in taken]
    return merged


def _globs(globs: list[str]) -> re.Pattern[str]:
    """One pattern for many globs, on lower-case text."""
    return re.compile("|".join(fnmatch.translate(glob.lower()) for glob in globs) or r"(?!)")


@lru_cache(maxsize=1 << 16)
def _candidates(name: str) -> tuple[str, str]:
    """A kernel's qualified name and its last component, lower case, without `void `, parameters and template arguments."""
    text = (
        name.strip()
        .removeprefix("void ")
        .replace("(anonymous namespace)", "anonymous")
        .replace("{anonymous}", "anonymous")
    )
    cut = min((text.find(mark) for mark in "<(" if mark in text), default=len(text))
    qualified = text[:cut].strip().lower() or text.lower()
    return qualified, qualified.rpartition("::")[2]
