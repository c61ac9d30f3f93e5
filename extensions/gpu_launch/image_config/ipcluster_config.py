"""`ipp.Cluster(engines="gpuhub")`: controller and engines start at the same time. Goes to /etc/ipython/."""

c = get_config()  # type: ignore[name-defined]  # noqa: F821 - given by traitlets

# The launcher waits for the controller's connection file itself, so neither a pause nor an order is needed.
c.Cluster.delay = 0
c.Cluster.send_engines_connection_env = False
