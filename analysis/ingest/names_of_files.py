"""Which rank a trace file is of, as far as its name tells."""

from __future__ import annotations

import re
from pathlib import Path

from stepscope.analysis.ingest.rules import Rules
from stepscope.tracer.schema import MAX_RANKS

_WORDS = tuple(
    re.compile(rf"(?:^|[^a-z])(?:{word})[-_]?(\d{{1,7}})(?!\d)", re.IGNORECASE)
    for word in ("rank", "worker", "gpu", "rank|worker|gpu")
)
"""What a rank is called, the surest first."""
_COORDINATE = re.compile(r"(?:^|[^a-z])(pp|dp|cp|ep|tp)[-_]?(\d+)(?!\d)", re.IGNORECASE)
_OUTERMOST_FIRST = ("pp", "dp", "cp", "ep", "tp")


def _inside(path: str) -> str:
    """Of a chained URL (`zip://a/rank0.json::traces.zip`, `simplecache::https://host/rank0.json`) the part that names the
    file; any other path as it is."""
    return next((part for part in path.split("::") if "://" in part), path)


def file_name(path: str) -> str:
    """The last part of a path or URL; of a chained URL (`zip://rank0.json::file:///traces.zip`) that of the file itself."""
    return Path(_inside(path)).name


def beside(path: str, name: str) -> str:
    """The path or URL of the file called `name` in the same directory."""
    inside = _inside(path)
    return path.replace(inside, inside.removesuffix(file_name(path)) + name, 1)


def _told_apart(files: list[str]) -> dict[str, str]:
    """What each file is called among these: its name, with its directories where names come twice (`rank-3/trace.json`)."""
    names = {file: file_name(file) for file in files}
    if len(set(names.values())) == len(files):
        return names
    parts = {file: Path(_inside(file)).parts for file in files}
    shared = 0
    while len({one[shared] for one in parts.values() if len(one) > shared + 1}) == 1:
        shared += 1
    return {file: "/".join(one[shared:]) for file, one in parts.items()}


def ranks_of(files: list[str], rules: Rules) -> dict[str, int]:
    """The rank of each file as far as the user or its name tells, else its place in the order of the names.

    A rank that a file itself names comes before all this. Where names come twice, their directories count as part of
    them. Names may carry the rank (`rank-10`, `worker3`) or coordinates (`TP-1-DP-0-PP-0`): then ranks are counted in the
    order of pp, dp, cp, ep, tp, tp innermost. Files whose names say nothing beside others that do get the ranks that are left.
    """
    names = _told_apart(files)
    known = {file: rank for file in files if (rank := rules.rank(file_name(file))) is not None}
    rest = [file for file in files if file not in known]
    places = {file: _coordinates(names[file]) for file in rest}
    by_name = _by_words({file: names[file] for file in rest})
    if len(by_name) == len(rest):
        return known | by_name
    if all(places.values()) and len(set(places.values())) == len(rest):
        ordered = sorted(rest, key=lambda file: places[file])
    else:
        known |= by_name
        ordered = sorted((file for file in rest if file not in known), key=lambda file: natural(names[file]))
    taken = set(known.values())
    free = (rank for rank in range(len(files) + len(taken)) if rank not in taken)
    return known | dict(zip(ordered, free, strict=False))


def _by_words(names: dict[str, str]) -> dict[str, int]:
    """The ranks that names carry: of all of them, or of those that do, as long as each has one of its own.

    Ranks that come twice are those of one node each where something before them differs (`node1_rank0`); else they stay as
    they are (`rank0_step10`, `rank0_step20`), two files of one rank, which is refused later.
    """
    found = [{file: match for file, name in names.items() if (match := _rank_in_name(word, name))} for word in _WORDS]
    for matches in found:
        ranks = {file: int(match[1]) for file, match in matches.items()}
        if len(ranks) == len(names) == len(set(ranks.values())):
            return ranks
    for matches in found[:2]:  # `gpu8` may be a kind of machine
        ranks = {file: int(match[1]) for file, match in matches.items()}
        told = {(match.string[: match.start()], int(match[1])) for match in matches.values()}
        if len(ranks) == len(names) > len(told):
            return ranks
    ranks = {file: int(match[1]) for file, match in found[0].items()}
    return ranks if len(ranks) == len(set(ranks.values())) < len(names) else {}


def rank_in(rules: Rules, file: str) -> int | None:
    """The rank that the user gives this file, else the one in its name (`rank-10`), else None."""
    name = file_name(file)
    given = rules.rank(name)
    found = next(filter(None, (_rank_in_name(word, name) for word in _WORDS)), None)
    return given if given is not None else int(found[1]) if found else None


def _rank_in_name(word: re.Pattern[str], name: str) -> re.Match[str] | None:
    """Where a name carries a rank; a number that no rank has (a date, say) is none."""
    found = word.search(name)
    return found if found and int(found[1]) < MAX_RANKS else None


def _coordinates(name: str) -> tuple[int, ...]:
    found = {axis.lower(): int(number) for axis, number in _COORDINATE.findall(name)}
    return tuple(found.get(axis, 0) for axis in _OUTERMOST_FIRST) if found else ()


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts names with numbers by value: `rank-2` before `rank-10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
