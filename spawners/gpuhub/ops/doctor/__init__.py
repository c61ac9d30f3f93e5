"""`gpuhub doctor`: checks of the nodes and the head node."""
