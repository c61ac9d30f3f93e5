"""Users' files and terminals, reached through couriers."""
