"""Notebook and worker containers on the nodes' Docker daemons."""
