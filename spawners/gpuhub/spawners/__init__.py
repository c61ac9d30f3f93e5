"""JupyterHub's spawners."""
