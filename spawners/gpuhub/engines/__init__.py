"""What grants leases: the seam between the broker and its scheduler."""
