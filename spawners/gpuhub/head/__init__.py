"""The head node's own processes: brought up in order, kept running, and taken down to nothing."""
