"""Certificates and authorities: TLS between gpuhub's parts, and towards browsers."""
