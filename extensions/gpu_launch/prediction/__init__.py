"""How long a step of a training takes on some cards: what is measured before, the model, and the report."""
