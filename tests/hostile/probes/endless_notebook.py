"""Write a start-up file that replaces the notebook server by one that answers without end. Argument: folder."""

import json
import os
import sys

CODE = """
import os, ssl, sys, socket, threading

if "jupyterhub-singleuser" in " ".join(sys.argv) or "singleuser" in " ".join(getattr(sys, "orig_argv", [])):
    def answer(wire):
        try:
            wire.recv(65536)
            head = "HTTP/1.1 200 OK\\r\\nX-JupyterHub-Version: 5.4.0\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"
            wire.sendall(head.encode())
            while True:
                wire.sendall(b"100000\\r\\n" + b"a" * 0x100000 + b"\\r\\n")
        except OSError:
            wire.close()

    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(os.environ["JUPYTERHUB_SSL_CERTFILE"], os.environ["JUPYTERHUB_SSL_KEYFILE"])
    server = socket.create_server(("0.0.0.0", 8888))
    while True:
        plain, _ = server.accept()
        try:
            wire = tls.wrap_socket(plain, server_side=True)
        except OSError:
            continue
        threading.Thread(target=answer, args=(wire,), daemon=True).start()
"""
with open(os.path.join(json.load(sys.stdin)["folder"], "usercustomize.py"), "w") as file:
    file.write(CODE)
print(json.dumps({"written": True}))
