"""Options of launches: one typed value for the magic, the function and the command line."""
