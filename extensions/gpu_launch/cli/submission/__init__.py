"""From the command line of `run` to a job: scripts and task files, what is sent, and the request."""
