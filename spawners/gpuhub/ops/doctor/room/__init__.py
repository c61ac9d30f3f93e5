"""Checks of the room that the nodes stand in: its electrical circuits, and its temperature."""
