"""The tables behind the figures, as text: made once, shown short on a terminal and whole on the page."""

from __future__ import annotations

from stepscope.analysis.report import tables_of_traffic as traffic
from stepscope.analysis.report import tables_of_work as work
from stepscope.analysis.report.model import Report
from stepscope.analysis.report.tables import Detail

MAKERS = (
    *(traffic.classes, work.stages, traffic.alpha_beta, traffic.links, traffic.ratios, traffic.volumes),
    *(
        work.beside,
        work.memory,
        work.peaks,
        work.experts,
        work.loads,
        work.idle,
        work.contention,
        traffic.matching,
        traffic.clocks,
    ),
)


def details(report: Report) -> list[Detail]:
    """Those tables that the run has anything for."""
    made = [make(report) for make in MAKERS]
    return [one for one in made if one is not None and one.rows]
