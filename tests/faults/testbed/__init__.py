"""The running product in the fault tests: its faults, its users, and the invariants that must hold."""
