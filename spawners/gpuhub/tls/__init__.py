"""Certificates and authorities: TLS between the parts of gpuhub, and towards browsers."""
