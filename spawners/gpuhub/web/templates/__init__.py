"""Templates, styles and scripts of the hub's pages."""
