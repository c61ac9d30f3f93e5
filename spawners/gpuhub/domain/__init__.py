"""States, rules and values of leases and jobs, without I/O."""
