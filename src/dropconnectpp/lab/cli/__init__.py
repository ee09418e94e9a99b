"""The command `dcpp`."""
