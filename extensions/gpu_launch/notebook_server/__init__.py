"""The extension of a notebook's Jupyter Server, which reports to the broker whether the notebook is idle."""
