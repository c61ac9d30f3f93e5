"""README's commands on a new machine; see `clean_room.sh`."""
