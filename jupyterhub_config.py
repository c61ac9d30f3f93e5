"""JupyterHub's configuration; its values come from cluster.toml through gpuhub.hub_config."""

from pathlib import Path

from gpuhub import hub_config
from gpuhub.login import kinds as login
from gpuhub.ops.deploy import own_config
from gpuhub.tls import public_access
from gpuhub.web.template_loader import TEMPLATES

c = get_config()
paths = hub_config.paths()
cluster = hub_config.cluster()
hub_config.lock()

# Where the hub listens: browsers come through the proxy, nodes and containers to the head node's own address.
c.JupyterHub.bind_url = f"http://{cluster.hub.bind}:{cluster.hub.port}"
c.JupyterHub.hub_ip = hub_config.head_address()
c.JupyterHub.hub_port = cluster.hub.api_port

# The hub's address for browsers, and the rules for its pages and cookies.
c.JupyterHub.public_url = hub_config.canonical_url()
c.JupyterHub.subdomain_host = hub_config.subdomain_host()
c.JupyterHub.cookie_host_prefix_enabled = public_access.has_host_prefix(cluster.hub)
c.JupyterHub.tornado_settings = hub_config.tornado_settings()
c.Proxy.extra_routes = hub_config.extra_routes()

# The proxy is a separate process: it serves notebooks while the hub is restarted.
c.ConfigurableHTTPProxy.should_start = False
c.ConfigurableHTTPProxy.api_url = hub_config.proxy_api_url()
c.ConfigurableHTTPProxy.auth_token = hub_config.proxy_token()
c.JupyterHub.cleanup_servers = False
c.JupyterHub.cleanup_proxy = False

# Mutual TLS between proxy, hub, broker and notebooks; `gpuhub up` makes the certificates.
c.JupyterHub.internal_ssl = cluster.has_internal_tls
c.JupyterHub.internal_certs_location = str(paths.internal_certificates)
c.JupyterHub.trusted_alt_names = hub_config.alt_names()

c.JupyterHub.db_url = hub_config.database_url()
# After an update of JupyterHub; `gpuhub up` has made a backup before.
c.JupyterHub.upgrade_db = True
c.JupyterHub.cookie_secret_file = str(paths.secrets / "cookie-secret")

# Who can log in
c.JupyterHub.authenticator_class = login.find_authenticator_class(cluster)
c.Authenticator.username_pattern = hub_config.ANCHORED_USERNAME_PATTERN
for name, values in hub_config.login_settings().items():
    c[name].update(values)

# Who may do what
c.JupyterHub.services = hub_config.services()
c.JupyterHub.custom_scopes = hub_config.custom_scopes()
c.JupyterHub.load_roles = hub_config.roles()
c.Spawner.server_token_scopes = ["users:activity!user", "access:servers!server", hub_config.BROKER_ACCESS_SCOPE]
c.JupyterHub.token_expires_in_max_seconds = cluster.hub.longest_token
c.JupyterHub.service_check_interval = 60
c.GpuHub.make_broker = hub_config.make_broker

# Notebooks
c.JupyterHub.spawner_class = hub_config.spawner_class()
c.LeasedSpawner.cluster = cluster
c.LeasedSpawner.instance = paths.instance
c.LeasedSpawner.head_address = hub_config.head_address()
c.LeasedSpawner.make_broker = hub_config.make_broker
c.GpuDockerSpawner.make_daemons = hub_config.make_daemons
c.GpuSlurmSpawner.make_slurm = hub_config.make_slurm
c.Spawner.cmd = hub_config.notebook_command()
c.Spawner.default_url = "/lab"
c.Spawner.environment = hub_config.notebook_environment()
# Files in a home must not change who may use its server; the image still finds users' own kernels.
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
c.JupyterHub.template_vars = {
    "gpuhub_url": hub_config.canonical_url(),
    "gpuhub_lab_urls": hub_config.lab_first_urls,
    "gpuhub_services": hub_config.service_links,
    "gpuhub_has_idle_notices": cluster.stops_idle_notebooks,
    "gpuhub_has_notifications": cluster.notifications.users,
}
c.JupyterHub.extra_handlers = hub_config.handlers()

# Your own files, jupyterhub_config.d/*.py: docs/jupyterhub.md says what they may set.
own_config.read(
    c,
    Path(__file__),
    spawner=hub_config.load_spawner_class(),
    authenticator=login.load_authenticator_class(cluster),
)
hub_config.check_service_names(c.JupyterHub.services)
