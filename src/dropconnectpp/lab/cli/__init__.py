"""The command `dcpp`: its subcommands, their options and what they print."""
