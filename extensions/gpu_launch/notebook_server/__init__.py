"""Extensions of a notebook's Jupyter Server: reports on idleness, and what gpuhub's JupyterLab extension asks for."""
