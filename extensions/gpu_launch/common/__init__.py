"""Values and helpers shared by the notebook side and the worker side."""
