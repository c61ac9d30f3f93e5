"""Whether a machine can be a node, and whether the nodes and the head node are as they should be."""
