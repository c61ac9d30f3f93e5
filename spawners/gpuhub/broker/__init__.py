"""The broker: owner of every lease, as a JupyterHub service."""
