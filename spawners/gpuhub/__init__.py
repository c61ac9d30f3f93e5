"""gpuhub: share a few GPU machines through JupyterHub; all that runs on the head node."""
