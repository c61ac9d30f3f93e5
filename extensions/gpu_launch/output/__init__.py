"""The display of a launch to its user: lines, progress, failures, logs."""
