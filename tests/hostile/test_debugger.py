"""The debugger on others' ranks: through the terminal's route, its socket, and debugpy's port."""

from __future__ import annotations

import httpx

from gpuhub.common import names
from tests.hostile.scene import Scene
from tests.support.hub.users import UPGRADE

PORT = 45678
ATTACH = "gpu-launch debug --here run --rank 0"


def test_another_users_rank_through_the_hub(scene: Scene) -> None:
    """`gpu-launch debug` is a program in the job's terminal, which the broker hides from ben."""
    url = f"{scene.product.address}/services/broker/api/v1/jobs/{scene.job['id']}/shell"
    for token, status in ((scene.ben.token, 404), ("0" * 32, 401)):
        answer = httpx.get(
            url,
            params={"command": ATTACH},
            headers={"Authorization": f"token {token}"} | UPGRADE,
            trust_env=False,
            timeout=30,
        )
        assert answer.status_code == status


def test_socket_and_port_are_the_containers_own(scene: Scene) -> None:
    """The folder of the sockets is its user's; debugpy listens where ben's container does not reach."""
    (worker,) = scene.find_containers("ada", names.KIND_WORKER)
    status, shown = scene.shell("stat -c '%a %n' /tmp/gpu_launch-stacks-*", seen=worker)
    assert status == 0, shown
    assert {line.split()[0] for line in shown.splitlines()} == {"700"}
    status, shown = scene.shell(f"{ATTACH} --listen {PORT}", seen=worker)
    assert status == 0, shown
    assert f"debugpy listens on 127.0.0.1:{PORT}" in shown
    described = scene.inspect(worker)
    addresses = [network["IPAddress"] for network in described["NetworkSettings"]["Networks"].values()]
    targets = [[address, PORT] for address in (*filter(None, addresses), described["Name"].lstrip("/"))]
    assert targets
    assert scene.probe("ports", tcp=targets)["tcp"] == []
    # Not his own ranks, and none of hers.
    status, shown = scene.shell(ATTACH)
    assert (status, "Ranks here: none." in shown) == (1, True), shown
