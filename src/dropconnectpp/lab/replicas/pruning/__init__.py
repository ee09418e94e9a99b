"""How the gated layers of a stack of networks become small: one file a family of methods, the same verbs in each."""
