"""What runs in a worker container beside the engine: the ranks, and what starts them."""
