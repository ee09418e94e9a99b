"""Results as a reader meets them: tables, figures, one web page. No torch: a report is rebuilt anywhere."""

from dropconnectpp.lab.report.building import build, text, text_tables
from dropconnectpp.lab.report.tables.paper import report_tables
from dropconnectpp.lab.report.watching import watch
from dropconnectpp.lab.report.writing import ReportError

__all__ = ["ReportError", "build", "report_tables", "text", "text_tables", "watch"]
