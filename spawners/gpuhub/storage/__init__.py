"""Where users' files are: NFS servers that may be silent, homes, quotas, and scratch on the nodes."""
