"""The soak: hours of use and faults on the practice closet, with a verdict whether anything grows."""
