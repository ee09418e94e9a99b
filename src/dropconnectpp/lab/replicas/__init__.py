"""Many networks at once: a stack of replicas, trained and evaluated."""
