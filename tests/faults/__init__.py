"""The fault catalogue: what breaks a shared cluster, done to the running product on the practice closet."""
