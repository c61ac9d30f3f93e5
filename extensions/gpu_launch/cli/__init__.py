"""The command line `gpu-launch` for a laptop or a terminal in a notebook.

It needs neither torch nor other packages that only the notebook images have.
"""
