"""The destinations of the owner of the machines, from the file that cluster.toml names."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from gpuhub.common.errors import InvalidRequest, SettingsError
from gpuhub.config.notifications import NotificationSettings, read_destinations
from gpuhub.notifications.services import check_url


def load(settings: NotificationSettings) -> list[str]:
    """Return the URLs.

    Raises:
        SettingsError: The file cannot be used, or a line is not a destination; the line is not quoted.
    """
    if settings.destinations_file is None:
        return []
    urls = read_destinations(settings.destinations_file)
    for number, url in enumerate(urls, start=1):
        try:
            check_url(url, None)
        except InvalidRequest as error:
            where = f"notifications.destinations_file: {str(settings.destinations_file)!r}"
            raise SettingsError(f"{where}: destination {number}: {error}") from None
    return urls


def build_ids(urls: Iterable[str], secret: str) -> dict[str, str]:
    """Return the URLs by the ids that the outbox has for them, which do not depend on other lines of the file.

    Args:
        urls: Those of the file.
        secret: The text of a file of the head node's secrets, without which no URL can be guessed from its id.
    """
    return {f"file:{hmac.digest(secret.encode(), url.encode(), 'sha256').hex()[:24]}": url for url in urls}
