"""Results as a reader meets them: tables, figures, one web page. No torch: a report is rebuilt anywhere."""

from dropconnectpp.lab.report.page import build, text, text_tables
from dropconnectpp.lab.report.tables import report_tables

__all__ = ["build", "report_tables", "text", "text_tables"]
