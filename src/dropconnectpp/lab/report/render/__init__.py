"""Formats of a report: tables and figures as a web page, LaTeX, Markdown, CSV, plain text and drawings."""
