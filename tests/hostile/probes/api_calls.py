"""Send requests to hub or broker with the notebook's own token and certificates; print each answer's status and text.

Arguments: base (hub, broker), calls: [method, path, body or null], headers.
"""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request

wanted = json.load(sys.stdin)
base = os.environ["JUPYTERHUB_API_URL"] if wanted["base"] == "hub" else f"{os.environ['GPUHUB_BROKER_URL']}/api/v1"
trust = os.environ["JUPYTERHUB_SSL_CLIENT_CA"] if wanted["base"] == "hub" else os.environ["GPUHUB_BROKER_CA"]
tls = ssl.create_default_context(cafile=trust)
tls.load_cert_chain(os.environ["JUPYTERHUB_SSL_CERTFILE"], os.environ["JUPYTERHUB_SSL_KEYFILE"])
web = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls))
headers = {"Authorization": f"token {os.environ['JUPYTERHUB_API_TOKEN']}", "Content-Type": "application/json"}


def ask(method, path, body):
    data = None if body is None else (body if isinstance(body, str) else json.dumps(body)).encode()
    request = urllib.request.Request(base + path, data, headers | wanted.get("headers", {}), method=method)
    try:
        with web.open(request, timeout=30) as answer:
            return answer.status, answer.read(100_000).decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read(100_000).decode(errors="replace")


print(json.dumps([ask(*call) for call in wanted["calls"]]))
