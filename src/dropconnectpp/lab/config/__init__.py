"""What an experiment is, as frozen settings; the digest of one is the identity of a run."""
