"""Operating a cluster: deployment, images, provisioning of nodes, diagnosis."""
