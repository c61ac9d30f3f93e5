"""What the head node does to and knows of a node."""
