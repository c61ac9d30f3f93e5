"""Logins: JupyterHub's authenticators, chosen by one line of cluster.toml, with the same access rules for all of them.

`kinds` lists the kinds of login, with the traits that jupyterhub_config.py sets. `rules` decides who may log in, and
`base` applies it in every authenticator: those with a form (`password_forms`, `ldap`) and those of providers (`oauth`).
"""
