"""The scanner as machine code: compiled by numba once in an installation, loaded by LLVM alone ever after.

Loading numba takes half a second, as long as reading half a million events; loading an object file takes 30 ms. The file's
name tells the sources, the versions of numba and LLVM, and the processor that it is good for, so it is never out of date.
A process of its own compiles (`python -m stepscope.analysis.ingest.scanner.machine`): what that takes, three hundred
megabytes, is gone when the reading starts.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.analysis.errors import StepscopeError
from stepscope.analysis.ingest import raw

_NAMES = ("scan_events", "skip_value", "enter_strings")
_MAGIC = b"stepscope-machine-code\n"
_NUMBAS_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
"""How numba's functions are called: where the result goes, where an exception would go (none is raised), the argument."""

Entry = Callable[[int], int]
"""A compiled function of the address of a frame (codes.py)."""


class Entries(NamedTuple):
    """The compiled functions (entries.py)."""

    scan_events: Entry
    skip_value: Entry
    enter_strings: Entry


@lru_cache(maxsize=1)
def entries() -> Entries:
    """The compiled scanner: from the file where it was kept, else compiled (ten seconds) and kept."""
    llvm = _llvm()
    machine = _target(llvm)
    name = f"scanner-{_fingerprint(llvm)}.o"
    places = _places()
    code = next((found for place in places if (found := _kept(place / name)) is not None), None)
    if code is None:
        code = _compiled_apart() or _compiled(llvm, machine)
        for place in places:
            if _keep(place / name, code):
                break
    return _loaded(llvm, machine, code)


def _llvm() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def _target(llvm: Any) -> Any:
    features = llvm.get_host_cpu_features().flatten()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features, opt=3, reloc="default", codemodel="jitdefault", jit=True
    )


def _fingerprint(llvm: Any) -> str:
    """Of everything that the machine code depends on."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted(here.glob("*.py")):
        digest.update(file.read_bytes())
    digest.update(repr((raw.FIELDS, raw.MISSING)).encode())
    versions = (metadata.version("numba"), metadata.version("llvmlite"), platform.machine(), platform.system())
    digest.update(repr((versions, llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())).encode())
    return digest.hexdigest()[:24]


def _places() -> list[Path]:
    """Where machine code may be kept: where the user says, beside the sources, in the user's cache directory."""
    told = os.environ.get("NUMBA_CACHE_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepscope"
    beside = Path(__file__).resolve().parent / "__pycache__"
    return [Path(told)] if told else [beside, cache]


def _kept(file: Path) -> bytes | None:
    """The machine code in a file, None where there is none or it is damaged."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    head = len(_MAGIC)
    if data[:head] != _MAGIC or hashlib.sha256(data[head + 32 :]).digest() != data[head : head + 32]:
        return None
    return data[head + 32 :]


def _keep(file: Path, code: bytes) -> bool:
    """Write it there, whole or not at all; False where that is not possible."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, under_way = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
        with os.fdopen(descriptor, "wb") as out:
            out.write(_MAGIC + hashlib.sha256(code).digest() + code)
        os.chmod(under_way, 0o644)  # where root installs, others read
        os.replace(under_way, file)
    except OSError:
        return False
    for old in file.parent.glob("scanner-*.o"):  # of earlier sources or versions
        if old != file:
            old.unlink(missing_ok=True)
    return True


def _compiled_apart() -> bytes | None:
    """What `_compiled` gives, from a process of its own; None where there is none to be had (an embedded interpreter)."""
    if not sys.executable or getattr(sys, "frozen", False):
        return None
    # optimised once, as a whole (see _compiled), instead of each function by itself first: a sixth of the time
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = {**os.environ, "NUMBA_OPT": "0", "PYTHONPATH": path}
    try:
        done = subprocess.run([sys.executable, "-m", __name__], env=environment, capture_output=True)
    except OSError:
        return None
    found = done.stdout.startswith(_MAGIC) and done.returncode == 0
    return done.stdout[len(_MAGIC) :] if found else None


def _compiled(llvm: Any, machine: Any) -> bytes:
    """Object code with the functions of entries.py under their own names, and nothing of Python's in it."""
    from stepscope.analysis.ingest.scanner import entries as source

    module = None
    for name in _NAMES:
        [overload] = getattr(source, name).overloads.values()
        one = llvm.parse_assembly(overload.library.get_llvm_str())
        native = overload.fndesc.llvm_func_name
        for function in one.functions:
            if not function.is_declaration and function.name != native:
                function.linkage = "internal"  # wrappers for Python: unused, so they go
        entry = one.get_function(native)
        entry.name = f"stepscope_{name}"
        if module is None:
            module = one
        else:
            module.link_in(one)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)  # leaves out what nobody uses, too
    return bytes(machine.emit_object(module))


def _loaded(llvm: Any, machine: Any, code: bytes) -> Entries:
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    found = {name: engine.get_function_address(f"stepscope_{name}") for name in _NAMES}
    if not all(found.values()):
        raise StepscopeError(
            "the compiled scanner cannot be loaded: remove the files scanner-*.o in its cache directory"
        )
    return Entries(**{name: _callable(engine, address) for name, address in found.items()})


def _callable(engine: Any, address: int) -> Entry:
    """The function at an address; it keeps the engine alive, in whose memory its code is."""
    function = _NUMBAS_CALL(address)
    result = ctypes.c_int64(0)
    into = ctypes.byref(result)

    def call(frame: int, engine: Any = engine) -> int:
        function(into, None, frame)
        return result.value

    return call


if __name__ == "__main__":
    binding = _llvm()
    sys.stdout.buffer.write(_MAGIC + _compiled(binding, _target(binding)))
