"""The controller of notifications, with a sender that the tests control."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gpuhub.broker.controllers.notification_controller import MAX_OWNER_PROCESSES, NotificationController
from gpuhub.broker.db.outbox import DestinationRow
from gpuhub.broker.db.store import Store
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.schemas import NotificationKind
from gpuhub.config.notifications import NotificationSettings
from gpuhub.domain.models import EventRow, NotificationRow
from gpuhub.notifications.sender import SendOrder, SendResult
from gpuhub.notifications.url_cipher import UrlCipher
from tests.support.broker.in_process import Setting, Workers, until
from tests.support.clocks import AheadClock
from tests.support.docker.simulated_nodes import build_cluster

CIPHER = UrlCipher("key")
SENT = SendResult(outcome="sent")


@dataclass
class Sender:
    """Keeps orders; results by URL, and URLs that do not answer before `answers` is set."""

    orders: list[SendOrder] = field(default_factory=list)
    results: dict[str, SendResult] = field(default_factory=dict)
    slow: set[str] = field(default_factory=set)
    answers: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, order: SendOrder) -> SendResult:
        self.orders.append(order)
        if order.url in self.slow:
            await self.answers.wait()
        return self.results.get(order.url, SENT)

    @property
    def urls(self) -> list[str]:
        return [order.url for order in self.orders]


@dataclass
class Scene:
    """A broker's state, and the controller of it."""

    core: BrokerState
    clock: AheadClock
    sender: Sender
    controller: NotificationController

    def add_destination(self, key: str, owner: str = "ada", kinds: tuple[str, ...] = ("job-ended",)) -> None:
        row = DestinationRow(
            id=key, owner=owner, name="", label="", url=CIPHER.encrypt(f"json://{key}"), kinds=kinds, created_at=1.0
        )
        assert self.core.store.outbox.add_destination(row)

    def report(self, key: str, owner: str | None = "ada", kind: NotificationKind = NotificationKind.JOB_ENDED) -> None:
        row = NotificationRow(kind=kind, key=key, title=key, body="text", owner=owner, valid_s=86400.0)
        now = self.clock.now()
        self.core.store.save_events([EventRow(at=now, kind="x", text="", owner=owner, notifications=(row,))])

    async def pass_time(self, seconds: float = 0.0) -> None:
        """Check once after some time, and wait for everything that can end."""
        self.clock.ahead_s += seconds
        await self.controller.check()
        await asyncio.sleep(0)
        running = [
            task for url, (_, task) in self.controller._sending.items() if f"json://{url}" not in self.sender.slow
        ]
        await asyncio.gather(*running)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    clock = AheadClock()
    cluster = build_cluster(notifications=NotificationSettings(allowed_addresses=("10.0.0.1",)))
    setting = Setting(tmp_path, cluster=cluster, clock=clock)
    store = Store.open_file(tmp_path / "broker.sqlite")
    core: BrokerState = setting.build(store, Workers(setting.nodes)).state.core
    store.outbox.machine_destinations = ("file:1",)
    sender = Sender()
    controller = NotificationController(
        core=core, send=sender, cipher=CIPHER, machine_urls={"file:1": "mailto://machines"}
    )
    yield Scene(core, clock, sender, controller)
    store.close()


async def test_what_waits_for_one_destination_is_one_message(scene: Scene) -> None:
    """And the next one comes some time later, however much happens."""
    scene.add_destination("a")
    scene.report("1")
    scene.report("2")
    await scene.pass_time()
    scene.report("3")
    await scene.pass_time(1)
    [order] = scene.sender.orders
    assert order.message is not None
    assert (order.message.title, order.allowed) == ("2 notifications of gpuhub", ("10.0.0.1",))
    await scene.pass_time(30)
    assert len(scene.sender.orders) == 2
    await scene.pass_time(30)
    assert len(scene.sender.orders) == 2


async def test_the_owner_of_the_machines_may_use_any_address(scene: Scene) -> None:
    """The file has them, which only root can write."""
    scene.report("node:rig1", None, NotificationKind.NODE_DOWN)
    await scene.pass_time()
    assert [(order.url, order.allowed) for order in scene.sender.orders] == [("mailto://machines", None)]


async def test_failures_are_tried_again_later_and_refusals_never(scene: Scene) -> None:
    """With growing pauses."""
    scene.add_destination("a")
    scene.add_destination("b")
    scene.sender.results = {
        "json://a": SendResult(outcome="failed", reason="status 500"),
        "json://b": SendResult(outcome="refused", reason="private"),
    }
    scene.report("1")
    await scene.pass_time()
    assert sorted(scene.sender.urls) == ["json://a", "json://b"]
    await scene.pass_time(29)
    assert len(scene.sender.orders) == 2
    await scene.pass_time(2)
    await scene.pass_time(60)
    assert scene.sender.urls[2:] == ["json://a"]
    scene.sender.results.clear()
    await scene.pass_time(61)
    assert scene.sender.urls[2:] == ["json://a", "json://a"]
    states = {row.id: (row.error, waiting) for row, waiting in scene.core.store.outbox.list_destinations("ada")}
    assert states == {"a": (None, 0), "b": ("private", 0)}


async def test_a_notification_is_given_up_after_a_day(scene: Scene) -> None:
    """Nobody needs it then."""
    scene.add_destination("a")
    scene.sender.results = {"json://a": SendResult(outcome="failed", reason="down")}
    scene.report("1")
    for _ in range(60):
        await scene.pass_time(1800)
    count = len(scene.sender.orders)
    assert 20 < count < 40
    await scene.pass_time(7200)
    assert len(scene.sender.orders) == count
    assert scene.core.store.outbox.list_destinations("ada")[0][1] == 0


async def test_slow_destinations_delay_themselves_alone(scene: Scene) -> None:
    """Other destinations of the user while there is room for them, other users, and the owner of the machines."""
    for key in ("a", "b", "c"):
        scene.add_destination(key)
    scene.add_destination("d", "ben")
    scene.sender.slow = {"json://a", "json://b", "json://c"}
    scene.report("1")
    scene.report("2", "ben")
    scene.report("node:rig1", None, NotificationKind.NODE_DOWN)
    await scene.pass_time()
    await until(lambda: len(scene.sender.orders) == MAX_OWNER_PROCESSES + 2, "all start")
    assert {"json://d", "mailto://machines"} < set(scene.sender.urls)
    scene.report("3")
    await scene.pass_time(60)
    assert len(scene.sender.orders) == MAX_OWNER_PROCESSES + 2
    scene.sender.answers.set()
    await scene.controller.close()
    scene.sender.slow = set()
    await scene.pass_time(60)
    assert set(scene.sender.urls) == {"json://a", "json://b", "json://c", "json://d", "mailto://machines"}


async def test_a_message_that_was_cut_off_is_sent_again_with_a_remark(scene: Scene) -> None:
    """By the next broker: whether it arrived is not known."""
    scene.add_destination("a")
    scene.sender.slow = {"json://a"}
    scene.report("1")
    await scene.controller.check()
    await until(lambda: scene.sender.orders, "it is being sent")
    [(_, task)] = scene.controller._sending.values()
    task.cancel()
    await asyncio.wait([task])
    scene.sender.slow = set()
    scene.controller = NotificationController(core=scene.core, send=scene.sender, cipher=CIPHER, machine_urls={})
    await scene.pass_time(1)
    bodies = [order.message.body for order in scene.sender.orders if order.message is not None]
    assert [body.startswith("gpuhub restarted") for body in bodies] == [False, True]


async def test_a_replaced_key_is_reported(scene: Scene) -> None:
    """Nothing can be sent there any more."""
    scene.add_destination("a")
    scene.controller._cipher = UrlCipher("another key")
    scene.report("1")
    await scene.pass_time()
    assert scene.sender.orders == []
    [(row, waiting)] = scene.core.store.outbox.list_destinations("ada")
    assert waiting == 0
    assert row.error is not None
    assert row.error.startswith("the head node's key was replaced")
