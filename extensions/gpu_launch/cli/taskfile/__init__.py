"""Task files in SkyPilot's YAML format, written from the format's public description, without code of SkyPilot."""
