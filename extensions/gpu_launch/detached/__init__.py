"""Jobs that go on without the notebook or the laptop that asked for them."""
