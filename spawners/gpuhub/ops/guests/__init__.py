"""Guests: machines that others lend over the internet, joined by WireGuard."""
