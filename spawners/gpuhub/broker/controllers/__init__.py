"""Control loops: compare leases with what runs on the nodes, and act."""
