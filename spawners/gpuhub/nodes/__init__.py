"""State of the nodes: the GPU agent on each node, its readings, and the health that follows from them."""
