"""`gpuhub node add` and `gpuhub node remove`."""
