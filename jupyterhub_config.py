"""JupyterHub's configuration: wiring only. Values come from cluster.toml through gpuhub.hubconfig."""

from gpuhub import hubconfig
from gpuhub.containers.rendering import TEMPLATES
from gpuhub.login import values as login
from gpuhub.trust import public

c = get_config()
paths = hubconfig.paths()
cluster = hubconfig.cluster()
hubconfig.lock()

# Where the hub listens: browsers come through the proxy, nodes and containers to the head node's own address.
c.JupyterHub.bind_url = f"http://{cluster.hub.bind}:{cluster.hub.port}"
c.JupyterHub.hub_ip = hubconfig.head_address()
c.JupyterHub.hub_port = cluster.hub.api_port

# What browsers are told: where the hub is, and what they must keep to.
c.JupyterHub.public_url = hubconfig.canonical_url()
c.JupyterHub.subdomain_host = hubconfig.subdomain_host()
c.JupyterHub.cookie_host_prefix_enabled = public.has_host_prefix(cluster.hub)
c.JupyterHub.tornado_settings = hubconfig.tornado_settings()
c.Proxy.extra_routes = hubconfig.extra_routes()

# The proxy is a process of its own: it goes on serving notebooks while the hub is restarted.
c.ConfigurableHTTPProxy.should_start = False
c.ConfigurableHTTPProxy.api_url = hubconfig.proxy_api_url()
c.ConfigurableHTTPProxy.auth_token = hubconfig.proxy_token()
c.JupyterHub.cleanup_servers = False
c.JupyterHub.cleanup_proxy = False

# TLS with certificates on both sides between proxy, hub, broker and notebooks; `gpuhub up` has made them.
c.JupyterHub.internal_ssl = cluster.has_internal_tls
c.JupyterHub.internal_certs_location = str(paths.internal_certificates)
c.JupyterHub.trusted_alt_names = hubconfig.alt_names()

c.JupyterHub.db_url = f"sqlite:///{paths.state / 'jupyterhub.sqlite'}"
c.JupyterHub.cookie_secret_file = str(paths.secrets / "cookie-secret")

# Who can log in
c.JupyterHub.authenticator_class = login.authenticator_class(cluster)
c.Authenticator.username_pattern = hubconfig.ANCHORED_USERNAME_PATTERN
for name, values in hubconfig.login_settings().items():
    c[name].update(values)

# Who may do what
c.JupyterHub.services = hubconfig.services()
c.JupyterHub.custom_scopes = hubconfig.custom_scopes()
c.JupyterHub.load_roles = hubconfig.roles()
c.Spawner.server_token_scopes = ["users:activity!user", "access:servers!server", hubconfig.BROKER_ACCESS_SCOPE]
c.JupyterHub.service_check_interval = 60

# Notebooks
c.JupyterHub.spawner_class = hubconfig.spawner_class()
c.LeasedSpawner.cluster = cluster
c.LeasedSpawner.instance = paths.instance
c.LeasedSpawner.head_address = hubconfig.head_address()
c.LeasedSpawner.make_broker = hubconfig.make_broker
c.GpuDockerSpawner.make_daemons = hubconfig.make_daemons
c.GpuSlurmSpawner.make_slurm = hubconfig.make_slurm
c.Spawner.cmd = hubconfig.notebook_command()
c.Spawner.default_url = "/lab"
# What is in a home does not change who may use its server; the image keeps users' own kernels.
c.Spawner.disable_user_config = True
# The wait in the queue is part of a start.
c.Spawner.start_timeout = cluster.users.queue_limit + 300
c.Spawner.http_timeout = 60
c.Spawner.poll_interval = 15
c.JupyterHub.allow_named_servers = True
c.JupyterHub.named_server_limit_per_user = 8
c.JupyterHub.concurrent_spawn_limit = 0
c.JupyterHub.init_spawners_timeout = 2

# Pages
c.JupyterHub.template_paths = [str(TEMPLATES)]
c.JupyterHub.template_vars = {"gpuhub_url": hubconfig.canonical_url()}
c.JupyterHub.extra_handlers = hubconfig.handlers()
