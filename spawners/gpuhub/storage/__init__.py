"""Users' files: NFS servers, homes and quotas."""
