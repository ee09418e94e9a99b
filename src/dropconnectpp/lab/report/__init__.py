"""The report of a store: tables, figures and one web page. No torch: a report can be rebuilt on any machine."""

from dropconnectpp.lab.report.building import build, lines, text, text_tables
from dropconnectpp.lab.report.tables.paper import report_tables
from dropconnectpp.lab.report.watching import watch
from dropconnectpp.lab.report.writing import ReportError

__all__ = ["ReportError", "build", "lines", "report_tables", "text", "text_tables", "watch"]
