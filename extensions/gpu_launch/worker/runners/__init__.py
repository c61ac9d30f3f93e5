"""Ways to start ranks: forked, by torchrun, as a plain command."""
