"""Services: the containers of their programs and relays, and the scripts that run there."""
