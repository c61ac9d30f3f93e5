"""Docker on the nodes: clients of the daemons, and the containers, networks and volumes that gpuhub makes."""
