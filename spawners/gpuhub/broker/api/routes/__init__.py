"""HTTP and WebSocket routes: each parses a request, calls an operation, and returns the answer."""
