"""Volume audit: operations and bytes of a step, as recorded and as theory predicts them from the configuration.

A wrong count is a bug of the program or of the trace; each difference is named in words. What the run does not say is not
predicted. Formulas: traffic.py, and definitions.md, Volumes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import pandas as pd

from stepscope.analysis.causes.columns import coded, firsts, places
from stepscope.analysis.causes.pipeline import stage_of
from stepscope.analysis.causes.setup import Setup
from stepscope.analysis.causes.traffic import Flow, predicted, sent_share
from stepscope.analysis.ledger.keys import code_columns
from stepscope.tracer.schema import RunMeta

VOLUME_COLUMNS = (
    *("stage", "axis", "strategy", "collective"),
    *("operations", "operations_theory", "bytes", "bytes_theory", "sent_bytes", "sent_bytes_theory", "verdict"),
)
"""One row a (stage, strategy, collective), and of an unknown strategy one an axis too: means of a rank and step; `axis` as
recorded. Unknown is None."""

Key = tuple[int, str, str, str]
"""Stage, strategy, collective, and the axis where the strategy is not known (else the empty word)."""

AS_PREDICTED, NOT_PREDICTED, NONE_RECORDED = "as predicted", "not predicted", "none was recorded"
OPERATIONS_ALONE, BYTES_ALONE = "operations as predicted, bytes unknown", "bytes as predicted, operations unknown"

AGREEING = (AS_PREDICTED, OPERATIONS_ALONE, BYTES_ALONE)
"""Verdicts of what does not differ: of both numbers, or of the one that theory and the recording both have."""

NOT_DIFFERING = (*AGREEING, NOT_PREDICTED, "")


# -- what was recorded -------------------------------------------------------------------------------------------------


class Volume(NamedTuple):
    """Operations, message bytes and bytes sent, of a rank and step; None: unknown."""

    operations: Fraction | None
    bytes: Fraction | None
    sent_bytes: Fraction | None


def recorded(meta: RunMeta, parts: pd.DataFrame, ranks: Iterable[int], steps: int) -> dict[Key, tuple[str, Volume]]:
    """Key -> (axes, volume), means over the stage's `ranks` and over `steps` steps.

    `parts`: Matches.parts of those steps and ranks. A strategy that is not known is the empty word.
    """
    stages = {rank: stage_of(meta, rank) for rank in ranks}
    members = Counter(stages.values())
    rank, known = parts["rank"].to_numpy(np.int64), np.array(sorted(stages), np.int64)
    rows = np.flatnonzero(places(rank, known) >= 0)
    stage = np.array([stages[one] for one in known.tolist()], np.int64)[places(rank[rows], known)]
    words, codes = zip(*(coded(parts[name]) for name in ("strategy", "collective", "axis")), strict=True)
    unnamed = np.array([word == "" for word in words[0]], bool)[codes[0]]
    kind = code_columns([stage, codes[0][rows], codes[1][rows], np.where(unnamed, codes[2], -1)[rows]])
    order = np.argsort(kind, kind="stable")
    number, size = _group_sizes(meta, parts), parts["bytes"].to_numpy(np.int64)
    found: dict[Key, tuple[str, Volume]] = {}
    for mine in np.split(order, firsts(kind[order])[1:]) if len(order) else []:
        place, mine = int(stage[mine[0]]), rows[mine]
        strategy, collective = (words[one][codes[one][mine[0]]] for one in range(2))
        share = steps * members[place]
        told = bool((size[mine] >= 0).all())
        sent = _sent(collective, number[mine], size[mine]) if told else None
        total = Fraction(int(size[mine].sum()), share) if told else None
        volume = Volume(Fraction(len(mine), share), total, None if sent is None else sent / share)
        axes = ", ".join(words[2][one] for one in np.unique(codes[2][mine]).tolist() if words[2][one])
        found[place, strategy, collective, "" if strategy else axes] = (axes, volume)
    return found


def _group_sizes(meta: RunMeta, parts: pd.DataFrame) -> np.ndarray:
    """Ranks of each part's group: as run.json says, else as many as were seen in its communication."""
    sizes = {group.name: len(group.ranks) for group in meta.groups}
    names, group = coded(parts["group"])
    said = np.array([sizes.get(name, -1) for name in names], np.int64)[group]
    match = pd.factorize(parts["match_id"])[0]
    return np.where(said >= 0, said, np.bincount(match)[match])


def _sent(collective: str, ranks: np.ndarray, size: np.ndarray) -> Fraction | None:
    """Bytes sent for operations of one kind over so many ranks; None where their share of the message is not known."""
    total = Fraction(0)
    for number in np.unique(ranks).tolist():
        share = sent_share(collective, number)
        if share is None:
            return None
        total += share * int(size[ranks == number].sum())
    return total


# -- side by side ------------------------------------------------------------------------------------------------------


def summed(flows: Iterable[Flow], whole_stage: bool) -> dict[tuple[str, str], Volume]:
    """(strategy, collective) -> prediction. `whole_stage`: all ranks of the stage were recorded."""
    found: dict[tuple[str, str], list[Volume]] = {}
    for flow in flows:
        known = flow.bytes is not None and (flow.each or whole_stage)
        size = Fraction(flow.bytes) if known and flow.bytes is not None else None
        share = sent_share(flow.collective, flow.ranks)
        number = None if flow.operations is None else Fraction(flow.operations)
        sent = None if size is None or share is None else size * share
        found.setdefault((flow.strategy, flow.collective), []).append(Volume(number, size, sent))
    return {key: Volume(*(_total(column) for column in zip(*rows, strict=True))) for key, rows in found.items()}


def _total(column: Iterable[Fraction | None]) -> Fraction | None:
    values = list(column)
    known = [value for value in values if value is not None]
    return sum(known, Fraction(0)) if len(known) == len(values) else None


def verdict(measured: Volume | None, theory: Volume | None) -> str:
    """How the recorded volume differs from the predicted one, in words."""
    if theory is None:
        return NOT_PREDICTED
    if measured is None:
        return NONE_RECORDED
    words = []
    counted = sized = False
    if theory.operations is not None and measured.operations is not None:
        counted = True
        if measured.operations != theory.operations:
            words.append(f"{_plain(measured.operations)} operations instead of {_plain(theory.operations)}")
    if theory.bytes is not None and measured.bytes is not None:
        sized = True
        more = measured.bytes - theory.bytes
        share = f" ({float(abs(more) / theory.bytes):.1%})" if theory.bytes else ""
        if more:
            words.append(f"{_plain(abs(more))} bytes {'more' if more > 0 else 'less'} than predicted{share}")
    agreed = {(True, True): AS_PREDICTED, (True, False): OPERATIONS_ALONE, (False, True): BYTES_ALONE}
    return "; ".join(words) or agreed.get((counted, sized), "")


def _plain(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.1f}"


def volumes(
    meta: RunMeta,
    parts: pd.DataFrame,
    ranks: tuple[int, ...],
    steps: tuple[int | str, ...],
    taken: Mapping[int, float] | None = None,
) -> pd.DataFrame:
    """The audit: VOLUME_COLUMNS. `parts`: Matches.parts with `step`; `ranks`, `steps`: those that count.

    `taken`: rank -> tokens that its experts took in a step, the mean of `steps`.
    """
    if not steps:
        return pd.DataFrame(columns=list(VOLUME_COLUMNS))
    needed = ["match_id", "rank", "group", "axis", "strategy", "collective", "bytes"]
    counted = parts[needed][parts["rank"].isin(ranks) & parts["step"].isin(steps)]
    measured = recorded(meta, counted, ranks, len(steps))
    setup = Setup.of(meta)
    tokens = {rank: Fraction(round(mean * len(steps)), len(steps)) for rank, mean in (taken or {}).items()}
    theory = _theory(meta, setup, ranks, tokens) if setup is not None else {}
    rows = []
    for key in sorted({*measured, *theory}):
        axis, here = measured.get(key, ("", None))
        there = theory.get(key)
        rows.append(
            {
                **{"stage": key[0], "strategy": key[1], "collective": key[2]},
                "axis": axis,
                "verdict": verdict(here, there) if setup is not None else "",
                **_columns(here or Volume(Fraction(0), Fraction(0), Fraction(0)), ""),
                **_columns(there or Volume(None, None, None), "_theory"),
            }
        )
    return pd.DataFrame(rows, columns=list(VOLUME_COLUMNS))


def _theory(meta: RunMeta, setup: Setup, ranks: tuple[int, ...], taken: Mapping[int, Fraction]) -> Mapping[Key, Volume]:
    found: dict[Key, Volume] = {}
    by_stage: dict[int, list[int]] = {}
    for rank in ranks:
        by_stage.setdefault(stage_of(meta, rank), []).append(rank)
    for stage, members in by_stage.items():
        if stage < 0:
            continue
        table = meta.pipeline_table[members[0]] if members[0] < len(meta.pipeline_table) else ()
        work = [action for action in table if action.phase in ("forward", "backward", "weight_grad")]
        whole = len(members) == setup.dp * setup.cp * setup.tp
        counted = [taken[rank] for rank in members if rank in taken]
        tokens = sum(counted, Fraction(0)) if len(counted) == len(members) else None
        for key, volume in summed(predicted(setup, stage, work, tokens), whole).items():
            found[(stage, *key, "")] = volume
    return found


def _columns(volume: Volume, suffix: str) -> dict[str, float | None]:
    return {f"{name}{suffix}": None if value is None else float(value) for name, value in volume._asdict().items()}
