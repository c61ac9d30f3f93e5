"""The command `gpuhub`."""
