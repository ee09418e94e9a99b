"""Really smaller: a pruned model as an ordinary one with fewer units, or with sparse products."""
