"""OpenSSH's server in a notebook's or worker's container: one process for each connection through the hub."""
