"""Pages, style and script of the spawn form, and JupyterHub pages that ours extend."""
