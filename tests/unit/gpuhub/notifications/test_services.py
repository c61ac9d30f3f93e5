"""Which destinations a user may have."""

from __future__ import annotations

import pytest

from gpuhub.common.errors import InvalidRequest
from gpuhub.config.notifications import parse_allowed
from gpuhub.notifications.services import check_url
from gpuhub.web.notifications_page import EXAMPLES

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("url", "label"),
    [
        (f"ntfys://{SECRET}-topic", "ntfy"),
        (f"ntfys://ntfy.example.org/{SECRET}", "ntfy at ntfy.example.org"),
        (f"jsons://ada:{SECRET}@example.org:8443/hook?+X-Token={SECRET}&method=PUT", "Webhook at example.org"),
        (f"mailtos://ada:{SECRET}@example.org?smtp=mail.example.org&to=b@example.org", "Mail at mail.example.org"),
        (f"tgram://123456789:{SECRET}/12345", "Telegram"),
        (f"slack://{SECRET}/b/c/#general", "Slack"),
        (f"matrixs://ada:{SECRET}@matrix.example.org/#room", "Matrix at matrix.example.org"),
        (f"discord://123/{SECRET}", "Discord"),
    ],
)
def test_labels_have_no_secret(url: str, label: str) -> None:
    """Only the service, and the host where it is not the secret itself."""
    assert check_url(url, ()) == label


@pytest.mark.parametrize(("service", "url"), EXAMPLES)
def test_the_examples_of_the_page_are_permitted(service: str, url: str) -> None:
    """As they are shown."""
    assert check_url(url, ()).startswith(service)


@pytest.mark.parametrize(
    "url",
    [
        # Plugins of Apprise that run programs, write files, or use the machine's own services.
        "exec://x", "syslog://", "dbus://", "kde://", "glib://", "gnome://", "windows://", "macosx://", "file:///etc/passwd",
        "mqtt://localhost", "smpp://x", "rsyslog://localhost", "http://10.0.0.1/", "https://example.org", "apprise://x/y",
        "xml://example.org", "form://example.org", "hasura", "ntfy:x",
        # Parameters that read files, switch checks off, or keep things on the disk.
        "ntfy://topic?attach=/etc/passwd", "discord://a/b?template=/etc/passwd", "slack://a/b/c?template=/etc/shadow",
        "tgram://123:a/1?template=x", "mailto://a:b@example.org?pgp=yes&pgppub=/etc/passwd", "json://example.org?verify=no",
        "json://example.org?redirect=yes", "json://example.org?store=yes", "json://example.org?rto=9999",
        "json://example.org?tz=../../etc", "matrixs://u:p@example.org/#room?e2ee=yes", "json://example.org?config=x",
        # Addresses of this machine and its network.
        "json://127.0.0.1:8010/", "jsons://[::1]/", "json://10.0.0.1", "ntfy://192.168.1.1/topic", "json://169.254.169.254/",
        "matrix://u:p@localhost/#r", "json://broker.internal/", "mailto://a:b@example.org?smtp=127.0.0.1",
        "mailto://a:b@example.org?SMTP=10.0.0.1", "json://[::ffff:127.0.0.1]/", "json://x:99999/", "json://[::1/",
    ],
)  # fmt: skip
def test_everything_else_is_refused_without_quoting_it(url: str) -> None:
    """The reason has nothing of the URL but host, address and the parameter's name."""
    with pytest.raises(InvalidRequest) as refusal:
        check_url(url.replace("topic", SECRET), ())
    assert SECRET not in str(refusal.value)


def test_parameters_are_limited_in_number() -> None:
    """Also a webhook's headers."""
    with pytest.raises(InvalidRequest, match="20 are the limit"):
        check_url("json://example.org?" + "&".join(f"+h{number}=x" for number in range(21)), ())


def test_private_addresses_are_permitted_by_the_administrator() -> None:
    """With their port, and to the owner of the machines without."""
    allowed = [parse_allowed("192.168.1.10:2586")]
    assert check_url("ntfy://192.168.1.10:2586/topic", allowed) == "ntfy at 192.168.1.10"
    with pytest.raises(InvalidRequest, match=r"192.168.1.10 is not an address of the internet; an administrator can"):
        check_url("ntfy://192.168.1.10/topic", allowed)
    assert check_url("mailto://localhost?to=ops@example.org", None) == "Mail at localhost"
