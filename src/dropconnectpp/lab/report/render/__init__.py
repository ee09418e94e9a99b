"""Laid-out tables and figures as a page, LaTeX, Markdown, CSV or text."""
