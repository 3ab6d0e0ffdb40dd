"""Data parallelism: buckets by hand, gradients against torch's DistributedDataParallel, and when what is reduced."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import COMM_TIMEOUT_S, GROUPS, gloo
from torch import nn

from stepscope.parallel_runtime.comm import DryComm
from stepscope.parallel_runtime.comm_gloo import make_process_groups
from stepscope.parallel_runtime.config import ModelConfig, TrainConfig
from stepscope.parallel_runtime.data import local_batch
from stepscope.parallel_runtime.dp.buckets import Bucket, assign_buckets
from stepscope.parallel_runtime.dp.data_parallel import GRADIENTS, DataParallel
from stepscope.parallel_runtime.mesh import Mesh
from stepscope.parallel_runtime.model.initial import initialise
from stepscope.parallel_runtime.model.stage import Stage
from stepscope.tracer.recorder import NullRecorder, Recorder

CONFIG = ModelConfig(layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=40, seq=12)
TRAIN = TrainConfig(microbatches=3, padding=0.7, dtype="float64")
TWO = Mesh(dp=2)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_buckets_by_hand():
    """Sizes 5, 1, 2, 3 of 8 bytes, 40 bytes a bucket: 3 + 2 fill one, 1 + 5 the next."""
    assert assign_buckets([5, 1, 2, 3], 8, 40) == (Bucket((3, 2), (0, 3), 5), Bucket((1, 0), (0, 1), 6))
    assert assign_buckets([5, 1, 2, 3], 8, 1) == tuple(
        Bucket((index,), (0,), size) for index, size in ((3, 3), (2, 2), (1, 1), (0, 5))
    )
    assert [bucket.elements for bucket in assign_buckets([5, 1, 2, 3], 8, 10**9)] == [11]
    assert assign_buckets([], 8, 40) == ()
    with pytest.raises(ValueError, match="take a positive size"):
        assign_buckets([1], 8, 0)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.sampled_from([2, 4, 8]), st.integers(1, 500))
def test_buckets_hold_every_parameter_once_in_reverse_order(sizes, element_size, limit):
    buckets = assign_buckets(sizes, element_size, limit)
    assert [i for bucket in buckets for i in bucket.parameters] == list(reversed(range(len(sizes))))
    for number, bucket in enumerate(buckets):
        filled = 0
        for index, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            assert offset == filled
            filled += sizes[index]
        assert filled == bucket.elements
        without_last = filled - sizes[bucket.parameters[-1]]
        assert without_last * element_size < limit
        assert filled * element_size >= limit or number == len(buckets) - 1


# -- gradients ---------------------------------------------------------------------------------------------------------


def local_stage(recorder):
    stage = Stage(CONFIG, recorder, dtype=torch.float64)
    initialise(stage, CONFIG, seed=0)
    return stage


def accumulate(stage, parallel, dp_index, step=0, dp=2):
    """A step without pipeline; the batch is this dp rank's."""
    batch = local_batch(CONFIG, TRAIN, dp, dp_index, step)
    parallel.begin_step()
    for number, microbatch in enumerate(batch.microbatches):
        if number == len(batch.microbatches) - 1:
            parallel.arm()
        stage(None, microbatch, batch.valid_tokens).backward()
    parallel.finish()


def our_gradients(rank, bucket_bytes, overlap):
    comm = gloo(TWO, rank, NullRecorder(), ("dp",))
    if comm is None:
        return None
    stage = local_stage(comm.recorder)
    parallel = DataParallel(stage.parameters(), comm, bucket_bytes, overlap)
    for step in range(2):  # the second step starts from buckets that were used
        accumulate(stage, parallel, rank, step)
    comm.close()
    return {name: parameter.grad.clone() for name, parameter in stage.named_parameters()}


class Summed(nn.Module):
    """A rank's whole loss: what DistributedDataParallel wraps."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, batch):
        return sum(self.stage(None, microbatch, batch.valid_tokens) for microbatch in batch.microbatches)


def oracle_gradients(rank):
    """torch's own data parallelism; it averages, so its gradients are taken twice."""
    group = make_process_groups(TWO, rank, ("dp",), "gloo", COMM_TIMEOUT_S, GROUPS).get("dp")
    if group is None:
        return None
    stage = local_stage(NullRecorder())
    wrapped = nn.parallel.DistributedDataParallel(Summed(stage), process_group=group, broadcast_buffers=False)
    wrapped(local_batch(CONFIG, TRAIN, 2, rank, 1)).backward()
    return {name: parameter.grad * 2 for name, parameter in stage.named_parameters()}


@pytest.mark.parametrize(("bucket_bytes", "overlap"), [(1, True), (20_000, True), (10**9, True), (20_000, False)])
def test_gradients_agree_with_torch(pool, bucket_bytes, overlap):
    """Unequal valid tokens on both ranks; float64: only the order of additions differs."""
    ours, oracle = pool.run(our_gradients, bucket_bytes, overlap), pool.run(oracle_gradients)
    for rank in (0, 1):
        for name, gradient in oracle[rank].items():
            torch.testing.assert_close(ours[rank][name], gradient, rtol=1e-11, atol=1e-13, msg=name)


# -- what is reduced when ----------------------------------------------------------------------------------------------


def recorded_step(bucket_bytes, overlap):
    """(rows, DataParallel) of a step on one of two ranks where nothing moves."""
    recorder = Recorder(0)
    comm = DryComm(TWO, 0, recorder, ("dp",))
    stage = local_stage(recorder)
    parallel = DataParallel(stage.parameters(), comm, bucket_bytes, overlap)
    recorder.begin_step(0)
    accumulate(stage, parallel, 0)
    recorder.end_step()
    return recorder.operations(), parallel


def test_a_bucket_is_reduced_as_soon_as_it_is_full():
    """One bucket a parameter: each reduction starts inside the block whose backward made the gradient."""
    rows, parallel = recorded_step(1, True)
    comms = [(number, row) for number, row in enumerate(rows) if row.kind == "comm"]
    names = [name for name, _ in local_stage(NullRecorder()).named_parameters()]
    assert len(comms) == len(parallel.buckets) == len(names)
    for (number, row), name in zip(comms, reversed(names), strict=True):
        part = name.split(".")
        block = {"layers": f"layer.{part[1]}", "embedding": "embedding"}.get(part[0], "head")
        assert (rows[number - 1].name, rows[number - 1].phase) == (block, "backward"), name
        assert (row.collective, row.axis, row.strategy, row.stream) == ("all_reduce", "dp", "dp", "dp")
    forwards = [number for number, row in enumerate(rows) if row.name == "head" and row.phase == "forward"]
    assert min(number for number, _ in comms) > max(forwards), "only the last microbatch's backward reduces"
    assert all(row.kind != "wait" for row in rows[: comms[-1][0]]), "nothing is waited for while backward runs"


def test_without_overlap_the_same_buckets_follow_backward():
    overlapping, _ = recorded_step(20_000, True)
    serial, parallel = recorded_step(20_000, False)
    assert len(parallel.buckets) > 2

    def sizes(rows):
        return [row.bytes for row in rows if row.kind == "comm"]

    def blocks(rows):
        return {rows[number - 1].name for number, row in enumerate(rows) if row.kind == "comm"}

    assert sizes(overlapping) == sizes(serial)
    assert sum(sizes(serial)) == 8 * sum(p.numel() for p in parallel.parameters)
    assert blocks(serial) == {GRADIENTS}
    assert blocks(overlapping) == {"layer.2", "layer.1", "layer.0", "embedding"}


def test_gradients_are_views_of_the_buckets():
    _, parallel = recorded_step(20_000, True)
    for bucket, buffer in zip(parallel.buckets, parallel.buffers, strict=True):
        for index in bucket.parameters:
            gradient = parallel.parameters[index].grad
            assert gradient.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            assert gradient.abs().max() > 0


def test_buckets_are_submitted_in_order_whatever_comes_first():
    """Three parameters, one bucket each; the first one's gradient comes first: it must wait for the later ones."""
    recorder = Recorder(0)
    parameters = [nn.Parameter(torch.ones(size)) for size in (1, 2, 3)]
    parallel = DataParallel(parameters, DryComm(TWO, 0, recorder, ("dp",)), bucket_bytes=1)
    recorder.begin_step(0)
    parallel.begin_step()
    parallel.arm()
    for parameter in parameters:
        parameter.sum().backward()
    parallel.finish()
    recorder.end_step()
    assert [row.in_elements for row in recorder.operations() if row.kind == "comm"] == [3, 2, 1]


def test_a_parameter_without_gradient_is_reduced_too():
    """Another rank may have one: the bucket goes out at the end, with zeros."""
    recorder = Recorder(0)
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    parallel = DataParallel([used, unused], DryComm(TWO, 0, recorder, ("dp",)), bucket_bytes=1)
    recorder.begin_step(0)
    parallel.begin_step()
    parallel.arm()
    used.sum().backward()
    parallel.finish()
    recorder.end_step()
    assert [row.in_elements for row in recorder.operations() if row.kind == "comm"] == [3, 2]
    assert unused.grad.tolist() == [0, 0, 0] and used.grad.tolist() == [1, 1]
