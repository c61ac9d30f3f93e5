"""Logins: JupyterHub's authenticators, chosen by one line of cluster.toml, with the same access rules for all of them.

`authenticator_config` has the traits that jupyterhub_config.py sets. `rules` decides who may log in, and `base` applies
it in every authenticator: those with a form (`password_forms`, `ldap`) and those of providers (`providers`).
"""
