"""The operations behind the broker's API."""
