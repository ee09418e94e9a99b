"""The laboratory: the paper's experiments, and anybody's own. The library never imports it."""
