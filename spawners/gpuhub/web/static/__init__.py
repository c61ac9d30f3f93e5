"""Scripts and style sheets that browsers fetch as files."""
