"""Who may log in: JupyterHub's authenticators, chosen by one line of cluster.toml, under one rule for all of them.

`values` has what jupyterhub_config.py sets; `rules` is the rule; `ruled` applies it in every authenticator: those with
a form (`forms`, `directory`) and those of other parties (`oauth`, `providers`).
"""
