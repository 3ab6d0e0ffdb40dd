"""`stepscope env`: what this machine has, and what is missing for what."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

import stepscope
from stepscope.commands.console import Quiet, console, say_next


class Need(NamedTuple):
    """One package, what it is for and how it gets here (from the project's folder)."""

    package: str
    purpose: str
    install: str


NEEDS = (
    Need("numpy", "analyze, compare", "pip install -e ."),
    Need("pandas", "analyze, compare", "pip install -e ."),
    Need("pyarrow", "analyze, compare: the column store", "pip install -e ."),
    Need("rich", "printing", "pip install -e ."),
    Need("plotly", "dashboard", "pip install -e ."),
    Need("dash", "dashboard", "pip install -e ."),
    Need("torch", "run: train and record", "pip install -e '.[runtime]'"),
    Need("dask", "reading many ranks on a cluster", "pip install -e '.[cluster]'"),
    Need("pytest", "developing: make test", "pip install -e '.[dev]'"),
    Need("playwright", "developing: browser tests", "pip install -e '.[dev]'"),
)

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def version_of(package: str) -> str | None:
    """The installed version, None where it is not installed; nothing is imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def memory_bytes() -> int | None:
    """Physical memory, None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def usable_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def torch_facts() -> dict[str, Any]:
    """Devices and communication backends as torch sees them; `error` where torch is there but does not load."""
    none: dict[str, Any] = {"devices": [], "backends": {}, "error": None}
    if version_of("torch") is None:
        return none
    try:
        import torch
        import torch.distributed as distributed
    except (ImportError, OSError) as error:
        return {**none, "error": f"torch is installed but does not load: {error}"}
    devices: list[dict[str, Any]] = [{"device": "cpu", "name": platform.processor() or platform.machine()}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append({"device": f"cuda:{index}", "name": properties.name, "memory_bytes": properties.total_memory})
    there = distributed.is_available()
    backends = {
        "gloo": there and distributed.is_gloo_available(),
        "nccl": there and distributed.is_nccl_available(),
    }
    return {"devices": devices, "backends": backends, "error": None}


def missing(versions: dict[str, str | None], torch: dict[str, Any]) -> list[dict[str, str]]:
    """What is not there, what it would be good for and how to install it."""
    rows = [need._asdict() for need in NEEDS if versions[need.package] is None]
    if torch["error"]:
        rows.append({"package": "torch", "purpose": torch["error"], "install": "pip install --force-reinstall torch"})
    if versions["playwright"] and not any(shutil.which(name) for name in CHROMIUM):
        rows.append(
            {"package": "chromium", "purpose": "developing: browser tests", "install": "apt-get install chromium"}
        )
    return rows


def facts() -> dict[str, Any]:
    """Everything that `stepscope env` says, as plain data (its `--json`)."""
    versions = {need.package: version_of(need.package) for need in NEEDS}
    torch = torch_facts()
    return {
        "schema": 1,
        "stepscope": {"version": stepscope.__version__, "path": str(Path(stepscope.__file__).resolve().parent)},
        "python": {"version": platform.python_version(), "path": sys.executable},
        "system": {
            "platform": platform.platform(),
            "host": platform.node(),
            "cores": usable_cores(),
            "memory_bytes": memory_bytes(),
        },
        "packages": versions,
        "devices": torch["devices"],
        "backends": torch["backends"],
        "missing": missing(versions, torch),
    }


def _size(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**30:.4g} GiB"


def show(found: dict[str, Any]) -> None:
    """Print the facts for a person."""
    from rich.markup import escape
    from rich.table import Table

    out = console()
    rows = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    system = found["system"]
    rows.add_row("stepscope", f"{found['stepscope']['version']}  {escape(found['stepscope']['path'])}")
    rows.add_row("python", f"{found['python']['version']}  {escape(found['python']['path'])}")
    rows.add_row("system", escape(system["platform"]))
    rows.add_row("cores, memory", f"{system['cores']}, {_size(system['memory_bytes'])}")
    for device in found["devices"]:
        memory = f", {_size(device['memory_bytes'])}" if "memory_bytes" in device else ""
        rows.add_row(device["device"], escape(device["name"]) + memory)
    if found["backends"]:
        has = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in found["backends"].items())
        rows.add_row("backends", has)
    for package, version in found["packages"].items():
        rows.add_row(package, escape(version) if version else "not installed")
    out.print(rows)
    if not found["missing"]:
        out.print("Nothing is missing.")
    for row in found["missing"]:
        out.print(f"Missing: {escape(row['package'])} ({escape(row['purpose'])}): {escape(row['install'])}")


def env(
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the facts as JSON; - is standard output.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Show versions, devices and communication backends, and what is missing with the command that installs it.

    Asks torch for its devices, which takes a few seconds; works without torch too. Always ends with status 0: what is
    missing is only missing for the purpose that stands beside it.

    Examples:

        stepscope env

        stepscope env --json - | python -m json.tool
    """
    found = facts()
    if json_file is None:
        show(found)
    else:
        text = json.dumps(found, indent=1) + "\n"
        if json_file == "-":
            sys.stdout.write(text)
        else:
            Path(json_file).write_text(text)
    say_next("stepscope run --dp 4 --steps 6", quiet=quiet or json_file is not None)
