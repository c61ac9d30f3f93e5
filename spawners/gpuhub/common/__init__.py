"""Small values that every other package uses: errors, names, paths, units."""
