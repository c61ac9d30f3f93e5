"""The hub's pages: spawn form, GPU page, and their handlers."""
