"""The builtin scheduling backend: gpuhub's own queue decides."""
