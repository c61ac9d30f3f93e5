"""The contract between the two distributions, which are installed on different machines."""
