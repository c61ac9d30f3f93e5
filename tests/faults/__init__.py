"""The fault catalogue: faults of a shared cluster, injected into the running product on the practice closet."""
