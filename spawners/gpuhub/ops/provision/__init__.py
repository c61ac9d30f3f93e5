"""`gpuhub node autoinstall`, `prepare`, `add` and `remove`: machines that become nodes, and leave."""
