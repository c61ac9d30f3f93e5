"""What the recipes of gpu-launch run: programs for transformers, one process on each GPU; `files` has the recipes."""
