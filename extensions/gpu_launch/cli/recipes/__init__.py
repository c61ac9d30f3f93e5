"""Recipes: task files with a head that names their parameters, those that gpu-launch ships and the lab's own."""
