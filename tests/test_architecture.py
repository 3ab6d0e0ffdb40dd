"""The house rules of ARCHITECTURE.md that a machine can check."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("tracer", "parallel_runtime", "analysis", "dashboard")
PLOTTING = ("plotly", "dash", "matplotlib", "bokeh", "altair")
PICKLING = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")
TALKS_TO_TORCH_DISTRIBUTED = (
    "parallel_runtime/comm*",
    "parallel_runtime/comm/*",
    "parallel_runtime/mesh.py",
    "parallel_runtime/launch.py",
    "tracer/kineto.py",
    "tracer/attach.py",
    "tracer/memory.py",
)


def sources(*folders: str) -> list[Path]:
    """Every Python file of some top-level folders; `stepscope` without the folders that it links to."""
    return [
        Path(where) / name
        for folder in folders
        for where, _, names in os.walk(ROOT / folder)  # does not follow links
        for name in sorted(names)
        if name.endswith(".py")
    ]


def where(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that is imported, `from a import b` as `a.b`, relative imports left out."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def names_of(module: ast.Module) -> dict[str, str]:
    """Local name -> what it stands for, of every import (`import torch.distributed as dist`: dist)."""
    names = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """`torch.distributed.all_reduce` of an attribute chain, its first name resolved; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id, node.id), *reversed(parts)])


def uses(module: ast.Module, *packages: str) -> list[int]:
    """Lines that import one of `packages` or reach it through an attribute."""
    names = names_of(module)
    lines = {line for line, name in imported(module) if within(name, *packages)}
    lines |= {
        node.lineno
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and within(dotted(node, names), *packages)
    }
    return sorted(lines)


def allowed(path: Path, patterns: tuple[str, ...]) -> bool:
    relative = path.relative_to(ROOT)
    return any(relative.match(pattern) for pattern in patterns)


def offences(paths: list[Path], *packages: str) -> list[str]:
    return [f"{where(path)}:{line}" for path in paths for line in uses(tree(path), *packages)]


def test_the_search_finds_every_way_to_reach_a_module() -> None:
    module = ast.parse(
        "import torch\n"
        "import torch.distributed as dist\n"
        "from torch import distributed\n"
        "from torch.distributed import all_reduce\n"
        "torch.distributed.barrier()\n"
        "torch.nn.Linear\n"
        "dist.barrier()\n"
        "import torch.distributed.tensor\n"
        "distributedly = torch.distributedly\n"
    )
    assert uses(module, "torch.distributed") == [2, 3, 4, 5, 7, 8]
    assert names_of(module)["dist"] == "torch.distributed"


def test_import_contracts_hold() -> None:
    # in a process of its own: import-linter reconfigures logging for whoever calls it
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_room_is_imported_by_its_bare_name() -> None:
    paths = sources("stepscope", "tests", "benchmarks", *ROOMS)
    assert len(paths) > 30
    bare = [
        f"{where(path)}:{line} {name}" for path in paths for line, name in imported(tree(path)) if within(name, *ROOMS)
    ]
    assert not bare, "only `stepscope` is installed: import stepscope.<room>"


def test_only_the_door_talks_to_torch_distributed() -> None:
    paths = [p for p in sources("stepscope", *ROOMS) if not allowed(p, TALKS_TO_TORCH_DISTRIBUTED)]
    asking = ROOT / "stepscope/commands/env.py"  # asks which backends this torch has, and sends nothing
    assert asking in paths
    paths.remove(asking)
    assert not offences(paths, "torch.distributed")


def test_reading_and_showing_need_no_torch() -> None:
    assert not offences(sources("analysis", "dashboard"), "torch")


def test_analysis_draws_nothing() -> None:
    assert not offences(sources("analysis"), *PLOTTING)


def test_nothing_is_pickled() -> None:
    paths = sources("stepscope", "benchmarks", *ROOMS)
    assert not offences(paths, *PICKLING)
    lines = []
    for path in paths:
        names = names_of(tree(path))
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                lines.append(f"{where(path)}:{node.value.lineno}")
            if isinstance(node, ast.Attribute) and node.attr in ("read_pickle", "to_pickle"):
                lines.append(f"{where(path)}:{node.lineno}")
            if isinstance(node, ast.Attribute) and dotted(node, names) in ("torch.load", "torch.save"):
                lines.append(f"{where(path)}:{node.lineno}")
    assert not lines


def ours(name: str) -> Path | None:
    """The file of a module of ours, `stepscope.a.b` or `stepscope.a.b.name`; None for what is not ours."""
    parts = name.split(".")
    for end in (len(parts), len(parts) - 1):
        path = ROOT.joinpath(*parts[:end]).with_suffix(".py")
        if parts[0] == "stepscope" and path.exists():
            return path
    return None


@pytest.mark.parametrize("name", ["schema", "writer"])
def test_what_analysis_sees_of_the_tracer_is_standard_library(name: str) -> None:
    seen: set[Path] = set()
    ahead = [ROOT / "stepscope/tracer" / f"{name}.py"]
    while ahead:
        path = ahead.pop()
        if path in seen:
            continue
        seen.add(path)
        for line, module in imported(tree(path)):
            deeper = ours(module)
            if deeper is None:
                assert module.split(".")[0] in sys.stdlib_module_names, f"{where(path)}:{line} {module}"
            else:
                ahead.append(deeper)
    assert all("/tracer/" in path.as_posix() for path in seen)


def test_the_rooms_are_one_package() -> None:
    for room in ROOMS:
        link = ROOT / "stepscope" / room
        assert link.is_symlink()
        assert os.readlink(link) == f"../{room}"


def test_no_bare_except_and_no_swallowed_error() -> None:
    lines = []
    for path in sources("stepscope", "benchmarks", "tests", *ROOMS):
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            silent = all(isinstance(statement, ast.Pass) for statement in node.body)
            if node.type is None or (broad and silent):
                lines.append(f"{where(path)}:{node.lineno}")
    assert not lines
