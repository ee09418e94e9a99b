"""Readers, one for each file format: `find` names the files, `read` returns their arrays."""
