"""The way to a hub: saved logins, its HTTP and WebSocket clients, the user's servers."""
