"""The tables of a report as plain data: unrounded numbers, one mapping for each row."""
