"""Checks of a request before it is stored: settings, limits, quotas."""
