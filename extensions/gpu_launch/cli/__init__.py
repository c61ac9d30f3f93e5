"""The command line `gpu-launch`: what a laptop, or a terminal in a notebook, does on the cluster.

Light: it needs neither torch nor anything else that only the notebook images have.
"""
