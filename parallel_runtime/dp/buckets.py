"""Which gradient goes into which bucket: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Bucket(NamedTuple):
    """Parameters that are reduced by one operation, in the order of their place in the flat buffer."""

    parameters: tuple[int, ...]  # indices into the list of all parameters
    offsets: tuple[int, ...]  # first element of each in the buffer
    elements: int


def assign_buckets(elements: Sequence[int], element_size: int, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Fill buckets from the last parameter to the first, the order in which backward makes gradients.

    A bucket is closed as soon as it holds `bucket_bytes` or more, so each but the last does, and none would without its
    last parameter. `elements` are the parameters' sizes in order of use. ValueError for a size of no bytes.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"a gradient bucket of {bucket_bytes} bytes holds nothing: take a positive size")
    buckets: list[Bucket] = []
    indices: list[int] = []
    offsets: list[int] = []
    total = 0
    for index in reversed(range(len(elements))):
        indices.append(index)
        offsets.append(total)
        total += elements[index]
        if total * element_size >= bucket_bytes or index == 0:
            buckets.append(Bucket(tuple(indices), tuple(offsets), total))
            indices, offsets, total = [], [], 0
    return tuple(buckets)
