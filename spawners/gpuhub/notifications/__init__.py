"""Sends notifications through Apprise: reviewed kinds of destinations, their addresses, and the process that sends."""
