"""Users' files: NFS servers and exports, homes, quotas, and copies of datasets."""
