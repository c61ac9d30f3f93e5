"""The hub's pages: spawn form, GPU page, notifications, and their handlers; and JupyterLab's files."""
