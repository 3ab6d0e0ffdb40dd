"""Traces of other programs: which of the given files are traces, of which format, and how to read them."""

from __future__ import annotations

import filecmp
import glob
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import names_of_files
from stepscope.analysis.ingest.build import Entry, Plan, Task, fingerprint, meta_from_ranks
from stepscope.analysis.ingest.detect import UNREAD, detect
from stepscope.analysis.ingest.formats import CONFIG
from stepscope.analysis.ingest.names_of_files import file_name
from stepscope.analysis.ingest.rules import BUILT_IN, built_in_digest, load_rules
from stepscope.analysis.ingest.source import filesystem_of
from stepscope.analysis.records import HealthItem
from stepscope.analysis.units import counted
from stepscope.tracer.schema import RUN_FILE, Lane, RunMeta

READERS = {"kineto": "kineto", "nsys": "nsys", "ndtimeline": "ndtimeline", "pp-vis": "pp_vis"}
"""Format -> module here whose `read_file` reads one task; imported when a file of the format is read."""

FORMAT_NAMES = {
    "kineto": "PyTorch profiler (Kineto)",
    "nsys": "Nsight Systems",
    "ndtimeline": "table of operations (ndtimeline)",
    "pp-vis": "pipeline dump (pp-vis)",
}

WHOLE_JOBS = ("ndtimeline", "pp-vis")
"""Formats whose files are read together: the windows of the steps are common to all ranks."""

TRACE_NAMES = (".json", ".gz", ".csv", ".tsv", ".parquet", ".sqlite", ".db")
"""How names of traces end, where nothing but the name can be read of them."""

MOST_LISTED = 10
"""Ignored files, and reasons for it, that the health report names."""


def plan_foreign(paths: list[str], rules: str | None) -> Plan:
    """How to read what `paths` name: files, directories, globs, URLs. StepscopeError when none of it is a trace."""
    found: dict[str, list[str]] = {}
    ignored: list[tuple[str, str]] = []
    unread: list[tuple[str, str]] = []
    for file in _expanded(paths):
        format, why = detect(file)
        if format:
            found.setdefault(format, []).append(file)
        elif format == UNREAD and file_name(file).lower().endswith(TRACE_NAMES):
            unread.append((file, why))
        else:
            ignored.append((file, why))
    if not found:
        said = (
            "; ".join(f"{file_name(file)}: {why}" for file, why in (*unread, *ignored)[:5]) or "the directory is empty"
        )
        raise StepscopeError(f"nothing in {', '.join(paths)} is a trace ({said})")
    if len(found) > 1:
        said = "; ".join(f"{FORMAT_NAMES[format]}: {file_name(files[0])}" for format, files in found.items())
        raise StepscopeError(f"the files are of several formats ({said}): give those of one run")
    [(format, files)] = found.items()
    identity = _identity(paths)
    sources: dict[str, Any] = {file: _fingerprint(file) for file in files} | {BUILT_IN: built_in_digest()}
    if format == "pp-vis":
        used = {names_of_files.beside(file, CONFIG) for file in files}
        ignored = [(file, why) for file, why in ignored if file not in used]
        sources |= {file: _fingerprint(file) for file in used if "://" not in file and Path(file).is_file()}
    if rules is not None:
        load_rules(rules)  # what is wrong with them is said at once
        sources[f"rules {rules}"] = fingerprint(Path(rules))
    tasks = partial(_tasks, format, files, rules)
    describe = partial(_describe, _name(paths), format, ignored, unread)
    return Plan(identity, False, sources, tasks, read_file, describe)


def read_file(task: Task) -> list[Entry]:
    """Read one file by its format's reader."""
    read: Callable[[Task], list[Entry]] = import_module(f"{__package__}.{READERS[task.format]}").read_file
    return read(task)


def _first_ranks(files: list[str], rules: str | None) -> dict[str, int]:
    """Of exports with one device or several each: the rank of the first device."""
    from stepscope.analysis.ingest import nsys  # brings in sqlite

    ordered = sorted(files, key=lambda one: names_of_files.natural(file_name(one)))
    return nsys.first_ranks(ordered, load_rules(rules))


def _tasks(format: str, files: list[str], rules: str | None, directory: Path, build: str) -> list[Task]:
    if format in WHOLE_JOBS:
        ordered = sorted(files, key=lambda one: names_of_files.natural(file_name(one)))
        size = sum(int(_fingerprint(file)[0]) for file in files)
        return [Task(format, ordered[0], None, directory, build, size, rules, tuple(ordered[1:]))]
    # counting the devices of an export takes a look at every kernel: a later open needs it not
    hints = _first_ranks(files, rules) if format == "nsys" else names_of_files.ranks_of(files, load_rules(rules))
    return [Task(format, file, hints.get(file), directory, build, int(_fingerprint(file)[0]), rules) for file in files]


def _describe(
    name: str,
    format: str,
    ignored: list[tuple[str, str]],
    unread: list[tuple[str, str]],
    entries: list[Entry],
    health: list[HealthItem],
) -> RunMeta:
    if ignored:
        what = counted(len(ignored), "file is no trace and was", "files are no traces and were")
        health.append(HealthItem("ignored_files", f"{what} ignored: {_listing(ignored)}"))
    if unread:
        what = counted(len(unread), "file cannot be read and was", "files cannot be read and were")
        touched = ("ledger", "summary", "collectives", "stragglers")
        health.append(HealthItem("unread_files", f"{what} left out: {_listing(unread)}", touches=touched))
    unsaid = [entry for entry in entries if entry["facts"]["rank"] is None]
    if format == "kineto" and unsaid and len(entries) > 1:
        listed = ", ".join(f"{entry['file']} = {entry['rank']}" for entry in unsaid[:4])
        listed += ", ..." if len(unsaid) > 4 else ""
        said = counted(len(unsaid), "file does not say which rank it is", "files do not say which rank they are")
        text = f"{said} of: taken from the names ({listed})"
        health.append(HealthItem("rank_from_name", text))
        health.extend(_copies(unsaid))
    if format == "nsys":
        places = ", ".join(f"rank {entry['rank']}: {entry['facts']['place']}" for entry in entries[:8])
        health.append(HealthItem("rank_from_device", f"ranks are counted over the devices ({places})"))
    if len(entries) == 1 and not entries[0]["facts"]["world_size"] and _communicates(entries[0]):
        text = (
            "the trace is of one rank, communicates, and does not say with how many others: its communication is taken "
            "for transfer, the waits in it are unknown"
        )
        touches = ("visible_comm_ns", "bubble_ns", "imbalance_ns", "collectives", "stragglers")
        health.append(HealthItem("unknown_world", text, touches=touches))
    return meta_from_ranks(name, entries, "imported")


def _copies(entries: list[Entry]) -> list[HealthItem]:
    """Files that do not say which rank they are of and are the same to the last byte: one rank, taken for several."""
    first: dict[tuple[int, int, int], Entry] = {}
    items = []
    for entry in entries:
        facts = entry["facts"]
        other = first.setdefault((facts["rows"], facts["first_ns"], facts["last_ns"]), entry)
        if other is entry or "://" in entry["path"] + other["path"]:
            continue
        if filecmp.cmp(other["path"], entry["path"], shallow=False):
            text = f"{other['file']} and {entry['file']} are the same to the last byte: is one a copy of the other?"
            touches = ("visible_comm_ns", "bubble_ns", "imbalance_ns", "collectives", "stragglers")
            items.append(HealthItem("same_file", text, rank=entry["rank"], file=entry["file"], touches=touches))
    return items


def _communicates(entry: Entry) -> bool:
    """Has the rank a stream of communication?"""
    return any(Lane(*lane).role == "comm" for lane in entry["lanes"])


def _listing(ignored: list[tuple[str, str]]) -> str:
    """What was ignored and why, the same reason said once: `a, b (it is empty)`."""
    names: dict[str, list[str]] = {}
    for file, why in ignored:
        names.setdefault(why, []).append(file_name(file))
    listed = [
        f"{', '.join(files[:MOST_LISTED])}{', ...' if len(files) > MOST_LISTED else ''} ({why})"
        for why, files in names.items()
    ]
    more = "; ..." if len(listed) > MOST_LISTED else ""
    return f"{'; '.join(listed[:MOST_LISTED])}{more}"


def _expanded(paths: list[str]) -> list[str]:
    """Every file that the paths name, absolute, each once, by the name that it is given here (a link may say its rank)."""
    files: list[str] = []
    for path in paths:
        if "://" in path:
            files += _expanded_url(path)
            continue
        place = Path(path).expanduser()
        if place.is_dir():
            files += _in_directory(place)
        elif place.exists():
            files.append(_one_file(place))
        else:
            matches = [Path(match) for match in sorted(glob.glob(str(place), recursive=True))]
            if not matches:
                raise StepscopeError(f"there is no {path}: give a run directory, a trace, or a pattern that fits some")
            for match in matches:
                files += _in_directory(match) if match.is_dir() else [_one_file(match)]
    real: dict[str, str] = {}
    for file in files:
        place_of_it = file if "://" in file else os.path.realpath(file)
        if file == place_of_it or place_of_it not in real:
            real[place_of_it] = file
    return list(real.values())


def _one_file(place: Path) -> str:
    """The absolute path of a file. StepscopeError for what can be read but once, if at all."""
    if place.exists() and not place.is_file():
        raise StepscopeError(f"{place} is a pipe or a device, and traces are read more than once: give a file")
    return str(place.absolute())


def _in_directory(directory: Path) -> list[str]:
    """The directory's own files, else those of all directories below."""
    own = [file for file in directory.iterdir() if file.is_file() and not file.name.startswith(".")]
    if not any(detect(str(file))[0] for file in own):
        runs = sorted(one.name for one in directory.iterdir() if one.is_dir() and (one / RUN_FILE).is_file())
        if runs:
            named = ", ".join(runs[:5]) + (", ..." if len(runs) > 5 else "")
            raise StepscopeError(
                f"{directory} is no run, it holds {counted(len(runs), 'run', 'runs')} ({named}): name one"
            )
        below = (file for file in directory.rglob("*") if file.is_file())
        own = [file for file in below if not any(part.startswith(".") for part in file.relative_to(directory).parts)]
    return sorted(str(file.absolute()) for file in own)


def _expanded_url(url: str) -> list[str]:
    """The files that a URL names; of a chained one (`zip://*.json::file:///traces.zip`) each with the rest of the chain."""
    first, link, rest = url.partition("::")
    if "://" not in first:  # a cache in front of what is meant: `simplecache::https://...`
        return [first + link + one for one in _expanded_url(rest)]
    fs, path = filesystem_of(url)
    try:
        if glob.has_magic(path):
            names: list[str] = []
            for name, facts in fs.glob(path, detail=True).items():
                names += _listed(fs, name) if facts["type"] == "directory" else [name]
        elif _may_list(path) and fs.isdir(path):
            names = _listed(fs, path)
        else:
            names = [path]
    except Exception as error:  # every filesystem has exceptions of its own
        raise StepscopeError(f"cannot list {url}: {error}") from error
    return sorted(fs.unstrip_protocol(name) + link + rest for name in names)


def _may_list(path: str) -> bool:
    """Whether to ask if it is a directory: a web server answers with the whole file where it is none."""
    return not path.startswith(("http://", "https://")) or not Path(path.partition("?")[0]).suffix or path.endswith("/")


def _listed(fs: Any, directory: str) -> list[str]:
    """The files of a directory."""
    return [entry["name"] for entry in fs.ls(directory, detail=True) if entry["type"] == "file"]


def _fingerprint(file: str) -> list[Any]:
    if "://" not in file:
        return fingerprint(Path(file))
    fs, path = filesystem_of(file)
    try:
        facts = fs.info(path)
    except Exception as error:  # every filesystem has exceptions of its own
        raise StepscopeError(f"cannot read {file}: {error or type(error).__name__}") from error
    return [facts.get("size") or 0, next((str(facts[key]) for key in _EDITION if facts.get(key)), "")]


_EDITION = ("mtime", "LastModified", "ETag", "updated", "last_modified", "CRC", "created")
"""What filesystems call that which changes when a file does."""


def _identity(paths: list[str]) -> Path:
    """What the store in the cache directory is filed under."""
    absolute = [path if "://" in path else os.path.realpath(Path(path).expanduser()) for path in paths]
    return Path(absolute[0]) if len(absolute) == 1 else Path(absolute[0]).parent / "+".join(sorted(absolute))


def _name(paths: list[str]) -> str:
    """What a run of these is called: the one path's last part, else (several, or a pattern) the directory they share."""
    if len(paths) == 1 and (not glob.has_magic(paths[0]) or Path(paths[0]).expanduser().exists()):
        return _identity(paths).name or "run"
    parts = [Path(path.partition("://")[2] or Path(path).expanduser().absolute()).parts for path in paths]
    shared: list[str] = []
    for level in zip(*(one[:-1] for one in parts), strict=False):
        if len(set(level)) > 1 or glob.has_magic(level[0]):
            break
        shared.append(level[0])
    return Path(*shared).name if shared and Path(*shared).name else "run"
