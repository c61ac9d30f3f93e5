"""`gpuhub up` and `gpuhub down`."""
