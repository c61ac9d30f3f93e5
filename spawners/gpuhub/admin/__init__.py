"""The administrator's commands: nodes, leases, reservations, usage and events, asked of the broker on this machine."""
