"""The small Plotly charts: functions from frames and records to figures; none of them computes."""
