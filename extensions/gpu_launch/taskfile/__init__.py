"""Task files in SkyPilot's YAML format: what they request, and the variables of their commands.

Written from the format's public description, without code of SkyPilot.
"""
