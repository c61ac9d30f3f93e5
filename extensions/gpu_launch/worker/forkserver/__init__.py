"""The fork server: a process that has imported torch and forks ranks."""
