"""Docker for tests: nodes simulated in memory, and small images and containers on real daemons."""
