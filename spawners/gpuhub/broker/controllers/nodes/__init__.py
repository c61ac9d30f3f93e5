"""Controllers of the nodes: probes, what runs there, power, and volumes."""
