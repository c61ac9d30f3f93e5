"""JupyterHub's configuration: wiring only. Values come from cluster.toml through gpuhub.hubconfig."""

from gpuhub import hubconfig
from gpuhub.containers.rendering import TEMPLATES

c = get_config()
paths = hubconfig.paths()
cluster = hubconfig.cluster()

# Where the hub listens: browsers come through the proxy, nodes and containers to the head node's own address.
c.JupyterHub.bind_url = f"http://{cluster.hub.bind}:{cluster.hub.port}"
c.JupyterHub.hub_ip = hubconfig.head_address()
c.JupyterHub.hub_port = cluster.hub.api_port

# The proxy is a process of its own: it goes on serving notebooks while the hub is restarted.
c.ConfigurableHTTPProxy.should_start = False
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{cluster.hub.proxy_api_port}"
c.ConfigurableHTTPProxy.auth_token = hubconfig.proxy_token()
c.JupyterHub.cleanup_servers = False
c.JupyterHub.cleanup_proxy = False

c.JupyterHub.db_url = f"sqlite:///{paths.state / 'jupyterhub.sqlite'}"
c.JupyterHub.cookie_secret_file = str(paths.secrets / "cookie-secret")

# Who can log in
c.JupyterHub.authenticator_class = hubconfig.authenticator()
c.Authenticator.allowed_users = set(cluster.users.allowed)
c.Authenticator.admin_users = set(cluster.users.admins)
c.Authenticator.username_pattern = hubconfig.ANCHORED_USERNAME_PATTERN
c.SharedPasswordAuthenticator.user_password = hubconfig.user_password()
c.SharedPasswordAuthenticator.admin_password = hubconfig.admin_password()
c.PAMAuthenticator.open_sessions = False

# Who may do what
c.JupyterHub.services = hubconfig.services()
c.JupyterHub.custom_scopes = hubconfig.custom_scopes()
c.JupyterHub.load_roles = hubconfig.roles()
c.Spawner.server_token_scopes = ["users:activity!user", "access:servers!server", hubconfig.BROKER_ACCESS_SCOPE]
c.JupyterHub.service_check_interval = 60

# Notebooks
c.JupyterHub.spawner_class = "gpuhub-docker"
c.GpuDockerSpawner.cluster = cluster
c.GpuDockerSpawner.instance = paths.instance
c.GpuDockerSpawner.head_address = hubconfig.head_address()
c.GpuDockerSpawner.make_daemons = hubconfig.make_daemons
c.GpuDockerSpawner.make_broker = hubconfig.make_broker
c.Spawner.cmd = ["jupyterhub-singleuser"]
c.Spawner.default_url = "/lab"
# The wait in the queue is part of a start; from the grant on, GpuDockerSpawner has a limit of its own.
c.Spawner.start_timeout = cluster.users.queue_limit + 300
c.Spawner.http_timeout = 60
c.Spawner.poll_interval = 15
c.JupyterHub.allow_named_servers = True
c.JupyterHub.named_server_limit_per_user = 8
c.JupyterHub.concurrent_spawn_limit = 0
c.JupyterHub.init_spawners_timeout = 2
c.JupyterHub.tornado_settings = {"slow_spawn_timeout": 2}

# Pages
c.JupyterHub.template_paths = [str(TEMPLATES)]
c.JupyterHub.extra_handlers = hubconfig.handlers()
