"""Services: containers that gpuhub keeps running behind the hub's login."""
