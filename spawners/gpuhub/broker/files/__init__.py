"""Users' files and terminals, reached through couriers, and copies of datasets on nodes."""
