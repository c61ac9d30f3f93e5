"""The broker's state in memory: the ledger of open leases and jobs, and what follows from each change."""
