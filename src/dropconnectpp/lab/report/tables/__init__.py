"""Rows of numbers for each table of a report."""
