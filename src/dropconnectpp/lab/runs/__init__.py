"""Work that survives being killed, and its results on disk."""
