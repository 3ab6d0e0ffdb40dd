"""What recording costs a step: the same step unrecorded, recorded in memory, and recorded into a file, in turn.

    python benchmarks/recorder_overhead.py

One process, one thread, products of 128 x 128 matrices: a step with more marks a second than real ones have. Prints the
median step time of each as a ratio to the unrecorded one, and what run.json would say.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from stepscope.tracer.recorder import CommSite, NullRecorder, Recorder
from stepscope.tracer.schema import RunMeta
from stepscope.tracer.writer import RankWriter

PAIRS, MICROBATCHES, LAYERS, PRODUCTS = 60, 8, 12, 6
SITE = CommSite("all_reduce", "dp", "dp", "mesh_dp_0", (0, 1), "dp", "float32", 4, 4, 16)


def step(recorder: Recorder | NullRecorder, number: int, matrix: torch.Tensor) -> None:
    """A block mark every six products, a communication every four blocks."""
    recorder.begin_step(number)
    for microbatch in range(MICROBATCHES):
        recorder.place(phase="forward", stage=0, chunk=0, microbatch=microbatch)
        for layer in range(LAYERS):
            recorder.block("layer", layer=layer)
            for _ in range(PRODUCTS):
                torch.mm(matrix, matrix)
            if layer % 4 == 0:
                op_id = recorder.issue(SITE, 0)
                recorder.resume()
                now = time.perf_counter_ns()
                recorder.communicated(op_id, now, now)
                recorder.wait(op_id)
                recorder.resume()
    recorder.end_step()


def main() -> None:
    """Print the ratios."""
    torch.set_num_threads(1)
    matrix = torch.randn(128, 128)
    with tempfile.TemporaryDirectory() as directory:
        writer = RankWriter(Path(directory), 0, RunMeta("overhead", "overhead", world_size=2, backend="gloo"))
        recorders = {"not recorded": NullRecorder(), "in memory": Recorder(0), "into a file": Recorder(0, writer)}
        times: dict[str, list[float]] = {name: [] for name in recorders}
        for pair in range(PAIRS):
            for name, recorder in recorders.items():
                step(recorder, 2 * pair, matrix)  # its rows are written during the next step, which is the one timed
                start = time.perf_counter()
                step(recorder, 2 * pair + 1, matrix)
                times[name].append(time.perf_counter() - start)
                time.sleep(0.02)
        recorders["into a file"].close()
        base = statistics.median(times["not recorded"])
        for name, samples in times.items():
            median = statistics.median(samples)
            print(f"{name:<14} {1000 * median:8.2f} ms a step   x {median / base:.3f}")
        print("run.json would say", recorders["into a file"].summary())


if __name__ == "__main__":
    main()
