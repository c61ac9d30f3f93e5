"""Task files in SkyPilot's task YAML: what they ask for, and the variables that their commands find.

Written from the format's public description; nothing of SkyPilot is needed or used.
"""
