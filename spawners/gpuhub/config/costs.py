"""`[costs]` in cluster.toml: what GPU time and energy cost, and how long it is remembered who used how much."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from pydantic import Field, StringConstraints

from gpuhub.common.gpu import shorten_model
from gpuhub.common.units import Span
from gpuhub.config.base import Number, ProfileName, SettingsTable, Text

#: An amount of money for one unit.
Price = Annotated[Number, Field(ge=0, le=1_000_000)]


class CostSettings(SettingsTable):
    """Prices, and how long sums by day are kept."""

    #: Currency of all prices, as it is shown; needed where there is a price.
    currency: Annotated[str, StringConstraints(max_length=8, pattern=r"^[^\s\x00-\x1f\x7f]*$")] = ""
    #: Price of an hour of a GPU, for those without a price of their own.
    gpu_hour: Price = 0.0
    #: Price of an hour of a GPU by model, with or without "NVIDIA GeForce".
    models: dict[Text, Price] = {}
    #: Price of an hour of a GPU for notebooks with a profile, instead of that of the model.
    profiles: dict[ProfileName, Price] = {}
    #: Price of a kilowatt-hour that a GPU takes, in addition.
    kwh: Price = 0.0
    #: How long it is remembered what each user used on each day, seconds.
    keep: Span = 104 * 7 * 86400

    @property
    def has_prices(self) -> bool:
        """Return whether anything costs money."""
        return any((self.gpu_hour, self.kwh, *self.models.values(), *self.profiles.values()))

    def find_gpu_hour_price(self, profile: str | None, model: str) -> float:
        """Return the price of an hour of a GPU; `profile` is None for jobs."""
        if profile is not None and profile in self.profiles:
            return self.profiles[profile]
        prices = {shorten_model(name).casefold(): price for name, price in self.models.items()}
        return prices.get(model.casefold(), self.gpu_hour)


def find_cost_mistakes(costs: CostSettings, profiles: Collection[str]) -> list[str]:
    """Return a line for each key that does not go with the others; `profiles` are the names of all profiles."""
    mistakes = [
        f"costs.profiles: there is no profile {name!r}; there are: {', '.join(profiles)}"
        for name in costs.profiles
        if name not in profiles
    ]
    if costs.has_prices and not costs.currency:
        mistakes.append('costs.currency: is missing, and there are prices: add one, such as "EUR"')
    return mistakes
