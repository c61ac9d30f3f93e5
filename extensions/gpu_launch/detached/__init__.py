"""Jobs that continue without the notebook or the laptop that requested them."""
