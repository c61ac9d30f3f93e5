"""The hub's service that stops idle notebooks: jupyterhub-idle-culler, which asks the broker about each of them."""
