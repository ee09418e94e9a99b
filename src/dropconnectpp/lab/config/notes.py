"""Names of the notes that the store keeps beside protocols: how settings were chosen, and by which commands."""

from __future__ import annotations

PAPERS_WAY, TOGETHER = "selection", "selection together"
WAYS = (PAPERS_WAY, TOGETHER)
"""Notes on how settings were chosen: the paper's way, and step sizes together with rates."""
COMMAND, COMMAND_TOGETHER, TIMING_COMMAND = "command", "command together", "timing command"
COMMANDS = {COMMAND: PAPERS_WAY, COMMAND_TOGETHER: TOGETHER, TIMING_COMMAND: PAPERS_WAY}
"""Notes of commands, with the way of choosing that each took: a protocol with open settings may have taken both."""
SPARSITY = "sparsity "
"""Notes that begin so tell which setting of a method was chosen at a share of weights, and what else was tried."""
PASS = "pass "
"""Notes that begin so tell how long a pass of a replica took before and after it was made compact."""
DEMO = "demo"
"""The note of `dcpp demo`: its networks with few connections."""
POPULATION = "population"
"""The note on how a schedule was found: the members' settings, scores and takeovers, and what they cost."""
